"""The sealing key beside a store in a file: ``mcp_sessions/serve/sealing_key_file.py``."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import Conversations, SessionLayer, SessionPolicy, SessionSecurity
from mcp_sessions.cli import logs
from mcp_sessions.cli.main import main
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, InvalidState
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.security import KEYS_VARIABLE, mint_key
from mcp_sessions.serve import sealing_key_file
from mcp_sessions.stores.sqlite import SQLiteStore
from tests.support.world import Toolbox

NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "notes.db"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger=sealing_key_file.__name__):
        yield caplog


def key_of(database: Path) -> Path:
    return database.with_name("notes.db-key")


def made(database: Path, **settings: Any) -> SessionLayer:
    return SessionLayer(Toolbox().server, store=f"sqlite:///{database}", **settings)


async def start(database: Path, **settings: Any) -> SessionLayer:
    layer = made(database, **settings)
    async with layer.lifespan():
        return layer


def sealed(security: SessionSecurity) -> str:
    return security.seal_state(
        {"x": 1}, session_id="s", principal=ANONYMOUS, version=1, expires_at=NOW
    )


def opened(security: SessionSecurity, token: str) -> object:
    return security.open_state(token, session_id="s", principal=ANONYMOUS, now=0.0)


async def with_session(database: Path, mode: Mode) -> None:
    store = SQLiteStore(database)
    await store.open(SessionPolicy())
    await store.create(mode, ANONYMOUS, peer=None, now=NOW)
    await store.close()


def lines(said: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in said.records if each.name == sealing_key_file.__name__]


async def test_a_token_opens_after_a_restart(
    database: Path, said: pytest.LogCaptureFixture
) -> None:
    """Nobody gave a key. The file has one, for its owner alone, and the log says so once."""
    token = sealed((await start(database)).security)

    assert opened((await start(database)).security, token) == ({"x": 1}, 1)

    assert stat.S_IMODE(key_of(database).stat().st_mode) == 0o600
    assert lines(said) == [
        f"{key_of(database)} is the sealing key of this store: keep it with the store"
    ]
    assert not [each for each in said.records if "set MCP_SESSIONS_KEYS" in each.getMessage()]


async def test_nobody_else_reads_it_while_it_is_made(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask is, and there is no moment with half of it."""
    seen: list[tuple[int, str]] = []
    replace = os.replace

    def looking(source: str, target: Path) -> None:
        assert not target.exists()
        seen.append((stat.S_IMODE(os.stat(source).st_mode), Path(source).read_text("ascii")))
        replace(source, target)

    monkeypatch.setattr(os, "replace", looking)
    before = os.umask(0)
    try:
        await start(database)
    finally:
        os.umask(before)
    assert seen == [(0o600, key_of(database).read_text("ascii"))]
    assert sorted(each.name for each in database.parent.iterdir() if "-key" in each.name) == [
        "notes.db-key"
    ]


async def test_conversations_need_no_other_key(database: Path) -> None:
    async def found() -> object:
        layer = await start(database, conversations=Conversations())
        return layer.security.conversation_ids("meta", "one", principal=ANONYMOUS)

    assert await found() == await found()


async def test_keys_that_are_given_win(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether by the variable or in Python. No file is made."""
    key = mint_key()
    monkeypatch.setenv(KEYS_VARIABLE, key)
    by_variable = (await start(database)).security
    monkeypatch.delenv(KEYS_VARIABLE)
    in_python = (await start(database, security=SessionSecurity([key]))).security
    await start(database, security=SessionSecurity.ephemeral())

    assert sealed(by_variable) == sealed(in_python)
    assert not key_of(database).exists()


async def test_keys_are_rotated_in_the_file(database: Path) -> None:
    token = sealed((await start(database)).security)
    old = key_of(database).read_text("ascii").strip()
    key_of(database).write_text(f"{mint_key()}, {old}\n", "ascii")

    rotated = (await start(database)).security

    assert opened(rotated, token) == ({"x": 1}, 1)
    assert sealed(rotated) != token


async def test_two_layers_with_one_security_have_two_keys(tmp_path: Path) -> None:
    """What one's file says is not the other's."""
    security = SessionSecurity.default(audience="both")
    one = await start(tmp_path / "one.db", security=security)
    other = await start(tmp_path / "two.db", security=security)

    with pytest.raises(InvalidState):
        opened(other.security, sealed(one.security))


async def test_a_lost_key_is_one_line(database: Path, said: pytest.LogCaptureFixture) -> None:
    """Sessions go on. Only what the key sealed is of no use any more."""
    await start(database)
    await with_session(database, Mode.PROTOCOL)
    key_of(database).unlink()
    said.clear()

    await start(database)

    (line,) = lines(said)
    assert line.startswith(f"{key_of(database)} was not there, though the store has sessions")


async def test_conversations_are_not_lost_with_their_key(database: Path) -> None:
    """A new key would find none of them. So it does not start, and makes none."""
    await start(database)
    await with_session(database, Mode.CONVERSATION)
    key = key_of(database).read_bytes()
    key_of(database).unlink()

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="restore the file, or set MCP_SESSIONS_KEYS"):
            await start(database)
    assert not key_of(database).exists()
    key_of(database).touch(0o600)
    key_of(database).write_bytes(key)
    await start(database)


@pytest.mark.parametrize(
    ("text", "mode", "line"),
    [
        ("k" * 43, 0o644, "other users may read or change the file (mode 0644): run chmod 600"),
        ("k" * 43, 0o620, "other users may read or change the file (mode 0620): run chmod 600"),
        ("", 0o600, "key 1 of 1 has 0 characters"),
        ("short", 0o600, "key 1 of 1 has 5 characters"),
        (b"\xff" * 43, 0o600, "the sealing key cannot be read"),
    ],
)
async def test_a_key_that_cannot_be_used_is_one_line(
    database: Path,
    text: str | bytes,
    mode: int,
    line: str,
) -> None:
    """The store is not in use after it. The key is in no line."""
    content = text.encode() if isinstance(text, str) else text
    key_of(database).write_bytes(content)
    key_of(database).chmod(mode)

    for _ in range(2):
        with pytest.raises(ConfigurationError) as refused:
            await start(database)
        assert str(refused.value).startswith(f"{key_of(database)}: {line}")
        assert "\n" not in str(refused.value) and "kkk" not in str(refused.value)


def test_a_folder_in_its_place_is_one_line(database: Path) -> None:
    layer = made(database)
    key_of(database).mkdir()
    with pytest.raises(ConfigurationError, match="this is a folder or a pipe"):
        sealing_key_file.checked_key_file(layer.store, layer.security)


async def test_a_full_disk_leaves_nothing(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(sealing_key_file.os, "fsync", full)
        with pytest.raises(ConfigurationError, match="no space left on device"):
            await start(database)
    assert not [each for each in database.parent.iterdir() if "-key" in each.name]
    await start(database)


def test_the_check_of_a_start_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes no file."""

    def nothing(**_: object) -> None:
        """Configure nothing: the logs are pytest's."""

    monkeypatch.setattr(logs, "configure", nothing)
    monkeypatch.chdir(tmp_path)
    Path("served.py").write_text(
        "from mcp.server.mcpserver import MCPServer\nmcp = MCPServer('notes')\n"
    )
    arguments = ["serve", "served.py", "--port", "0", "--store", "sqlite:///notes.db", "--check"]
    assert main(arguments) == 0
    assert not Path("notes.db-key").exists()
    Path("notes.db-key").write_text(mint_key())
    Path("notes.db-key").chmod(0o604)
    assert main(arguments) == 2
    assert "WRONG: " in (said := capsys.readouterr().out)
    assert "run chmod 600" in said


async def test_a_store_in_memory_has_no_key_file(tmp_path: Path) -> None:
    layer = SessionLayer(Toolbox().server, store="memory://")
    async with layer.lifespan():
        assert layer.security.is_ephemeral
