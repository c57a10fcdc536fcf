"""The file of API keys: what is in it, who may read it, and how it changes."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.authentication import key_file
from mcp_sessions.authentication.key_file import ApiKey, change, hash_of, id_of, minted, read
from mcp_sessions.errors import ConfigurationError

NOW = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keys.json")


def add(path: str, name: str = "ci", lasts: float | None = None) -> str:
    """Add a key, and return it."""
    key, entry = minted(name, ["use"], NOW, lasts)
    change(path, lambda keys: [*keys, entry])
    return key


def test_a_key_has_256_random_bits_and_a_prefix_that_scanners_find() -> None:
    keys = {minted("ci", [], NOW, None)[0] for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert re.fullmatch(r"mcp_sessions_key_[0-9a-f]{8}_[0-9a-f]{64}", key)


def test_the_file_has_a_hash_and_not_the_key_and_is_its_owners(path: str) -> None:
    key = add(path, lasts=60)
    text = Path(path).read_text()
    assert key not in text and key[-64:] not in text
    assert os.stat(path).st_mode & 0o777 == 0o600
    [entry] = read(path)[0].values()
    assert entry == ApiKey(str(id_of(key)), "ci", hash_of(key), ("use",), int(NOW), int(NOW + 60))


@pytest.mark.parametrize("text", ["", "x", "mcp_sessions_key_", "mcp_sessions_key_0_" + "0" * 64])
def test_another_text_is_no_key(text: str) -> None:
    assert id_of(text) is None


@pytest.mark.parametrize("name", ["", " a", "a\n", "ü", "a" * 101])
def test_a_name_is_a_line_of_plain_text(name: str) -> None:
    with pytest.raises(ConfigurationError, match="printable"):
        minted(name, [], NOW, None)


@pytest.mark.parametrize("scope", ["", "a b", 'a"', "a\\", "ü"])
def test_a_scope_is_one_of_oauth(scope: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot have"):
        minted("ci", [scope], NOW, None)


def make_folder(path: Path) -> None:
    """A folder in its place."""
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    """A named pipe in its place, which nobody writes to."""
    path.unlink()
    os.mkfifo(path, 0o600)


def make_part(path: Path) -> None:
    """It is being written."""
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def make_large(path: Path) -> None:
    """Larger than it can be."""
    path.write_text(" " * (key_file.LARGEST + 1))


def changed(**members: Any) -> Callable[[Path], None]:
    """An entry of it has other members."""

    def change_it(path: Path) -> None:
        value = json.loads(path.read_text())
        value["keys"][0] = {**value["keys"][0], **members}
        path.write_text(json.dumps(value))

    return change_it


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "vanished": (Path.unlink, "no such file"),
    "a folder": (make_folder, "this is a folder"),
    "a pipe": (make_pipe, "or a pipe: name a file"),
    "half written": (make_part, "not complete"),
    "empty": (lambda path: path.write_text(""), "not complete"),
    "too deep": (lambda path: path.write_text("[" * 100_000), "not complete"),
    "too large": (make_large, "more than 1048576 bytes"),
    "of something else": (lambda path: path.write_text("{}"), "no file of API keys"),
    "of a later version": (
        lambda path: path.write_text('{"version": 2, "keys": []}'),
        "no file of API keys",
    ),
    "readable by a group": (lambda path: path.chmod(0o640), r"\(mode 0640\): run chmod 600"),
    "readable by all": (lambda path: path.chmod(0o604), r"\(mode 0604\): run chmod 600"),
    "an id that is no text": (changed(id=1), "entry 1 is no API key"),
    "no hash": (changed(sha256="0"), "entry 1 is no API key"),
    "a scope that is no text": (changed(scopes=[1]), "entry 1 is no API key"),
    "an end that is no number": (changed(expires_at="tomorrow"), "entry 1 is no API key"),
    "a name of two lines": (changed(name="a\nb"), "entry 1 is no API key"),
    "an entry that is no object": (
        lambda path: path.write_text('{"version": 1, "keys": [1]}'),
        "entry 1 is no API key",
    ),
}
"""Possible faults of the file."""


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_with_the_reason(path: str, what: str) -> None:
    """O: a keys file that vanishes, is a folder, is written while it is read, or is readable by
    others.
    """
    key = add(path)
    spoil, said = BAD[what]
    spoil(Path(path))
    with pytest.raises(ConfigurationError, match=said) as failed:
        read(path)
    assert path in str(failed.value)
    assert hash_of(key) not in str(failed.value)


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o400])
def test_the_group_may_read_a_file_of_another_user(
    path: str, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """As Kubernetes mounts a secret with ``fsGroup``: root owns it, and the group is the way of
    the service to read it.
    """
    add(path)
    Path(path).chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    assert len(read(path)[0]) == 1


@pytest.mark.parametrize("mode", [0o444, 0o460, 0o660, 0o644])
def test_others_may_not_read_a_file_of_another_user_and_its_group_may_not_change_it(
    path: str, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    add(path)
    Path(path).chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    with pytest.raises(ConfigurationError, match=rf"\(mode {mode:04o}\): run chmod 440"):
        read(path)


def test_two_entries_of_one_id_are_refused(path: str) -> None:
    add(path)
    value = json.loads(Path(path).read_text())
    value["keys"] *= 2
    Path(path).write_text(json.dumps(value))
    with pytest.raises(ConfigurationError, match="entry 2"):
        read(path)


def test_a_file_that_cannot_be_read_is_not_replaced(path: str) -> None:
    """Its keys would be gone."""
    add(path)
    make_part(Path(path))
    before = Path(path).read_text()
    with pytest.raises(ConfigurationError):
        add(path)
    assert Path(path).read_text() == before
    assert os.listdir(os.path.dirname(path)) == ["keys.json"]


def test_a_file_that_root_changes_stays_the_services(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root can give a file away. Others see to whom it was given."""
    add(path)
    if os.geteuid() == 0:
        os.chown(path, 12_345, 12_346)
    before, given, give = os.stat(path), list[tuple[int, int]](), os.fchown

    def fchown(file: int, uid: int, gid: int) -> None:
        given.append((uid, gid))
        give(file, uid, gid)

    monkeypatch.setattr(os, "fchown", fchown)
    add(path)
    after = os.stat(path)
    assert given == [(before.st_uid, before.st_gid)] == [(after.st_uid, after.st_gid)]
    assert after.st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o600])
def test_a_command_keeps_the_mode_of_a_file_that_a_group_may_read(path: str, mode: int) -> None:
    """Otherwise the service could not read it any more, after a key was revoked."""
    add(path)
    Path(path).chmod(mode)
    add(path)
    assert os.stat(path).st_mode & 0o777 == mode
    assert len(read(path, by_command=True)[0]) == 2


def test_a_command_refuses_a_file_that_others_may_read(path: str) -> None:
    add(path)
    Path(path).chmod(0o644)
    with pytest.raises(ConfigurationError, match="mode 0644"):
        add(path)


def test_a_link_stays_and_what_it_names_is_changed(path: str, tmp_path: Path) -> None:
    add(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    add(str(link), "other")
    assert link.is_symlink()
    assert [key.name for key in read(path)[0].values()] == ["ci", "other"]


def test_two_commands_do_not_change_it_at_once(path: str) -> None:
    """The first one's change would be lost."""
    add(path)

    def slow(keys: list[ApiKey]) -> list[ApiKey]:
        with pytest.raises(ConfigurationError, match="another command is changing the file"):
            add(path)
        return keys

    change(path, slow)
    add(path)
    assert len(read(path)[0]) == 2


def test_each_change_has_another_stamp(path: str) -> None:
    """Also one of its mode alone."""
    add(path)
    stamps = {read(path)[1]}
    add(path)
    stamps.add(read(path)[1])
    before = key_file.stamp_of(path)
    deadline = time.monotonic() + 10
    while key_file.stamp_of(path) == before and time.monotonic() < deadline:
        os.chmod(path, 0o604)
    stamps.add(key_file.stamp_of(path))
    assert len(stamps) == 3
