"""What a start finds after a power loss, or in a file that is a copy."""

import sqlite3
from pathlib import Path

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import Refusal
from mcp_sessions.ids import (
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.sqlite import cleaning as sqlite_start
from mcp_sessions.stores.sqlite import served_file
from mcp_sessions.stores.sqlite.schema import Durability
from tests.stores.sqlite.file_store import NOW, copied, counted, new, opened, sql


def killed(_: sqlite3.Connection, seen: object) -> None:
    """Instead of ``shut_down``: nothing was said at the end."""


@pytest.mark.parametrize(
    ("durability", "closed", "boots", "refusal"),
    [
        ("normal", False, ("one", "two"), Refusal.LOG_REPLACED),
        ("normal", False, ("one", "one"), None),
        ("normal", True, ("one", "two"), None),
        ("full", False, ("one", "two"), None),
        ("normal", False, (None, None), None),
    ],
)
async def test_a_power_loss_that_may_have_cost_events_is_noticed(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: Durability,
    closed: bool,
    boots: tuple[str | None, str | None],
    refusal: Refusal | None,
) -> None:
    """CUP8: an id that a client has seen is never given to another event."""
    monkeypatch.setattr(sqlite_start, "boot_id", lambda: boots[0])
    if not closed:
        monkeypatch.setattr(served_file, "shut_down", killed)
    async with opened(path, durability) as store:
        of = await new(store)
        head = await store.head(of)
        appended = await store.append(of, Draft(b"{}"), now=NOW)
        assert head is not None and appended is not None
    monkeypatch.setattr(sqlite_start, "boot_id", lambda: boots[1])
    async with opened(path, durability) as store:
        events, found = await store.read(of, head.event_id(), now=NOW)
        assert (len(events), found) == ((0, refusal) if refusal else (1, None))
        again = await store.append(of, Draft(b"{}"), now=NOW)
        assert again is not None and again.event.event_id > appended.event.event_id


def restore(path: Path, copy: bytes) -> None:
    """Put a copy in the file's place, as an operator does: SQLite's own files go."""
    for own in ("-wal", "-shm"):
        path.with_name(path.name + own).unlink(missing_ok=True)
    path.write_bytes(copy)


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_file_restored_from_a_copy_gives_no_event_id_out_again(
    path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that saw more than the copy has is refused, and reads again what it follows."""
    async with opened(path) as store:
        of = await new(store)
        await store.append(of, Draft(b"1"), now=NOW)
        copy = copied(path)
        seen = await store.append(of, Draft(b"2"), now=NOW)
        assert seen is not None
        await counted(store)
        killed = {each: each.read_bytes() for each in path.parent.iterdir()}
    if how == "killed":
        for each, content in killed.items():
            each.write_bytes(content)
    restore(path, copy)
    async with opened(path) as store:
        assert "is a copy" in caplog.text
        await store.append(of, Draft(b"another"), now=NOW)
        for position in (seen.event.event_id, f"{seen.event.event_id[:-1]}1"):
            assert await store.read(of, position, now=NOW) == ((), Refusal.LOG_REPLACED)
        head = await store.head(of)
        caplog.clear()
    # Once: from here on it is the file that was seen.
    async with opened(path) as store:
        assert await store.head(of) == head
        assert not caplog.text


@pytest.mark.parametrize(
    ("what", "is_kept"),
    [
        ("closed and opened", True),
        ("killed", True),
        ("killed before it was said", True),
        ("moved with what is beside it", True),
        ("of an older version", True),
        ("moved alone", False),
        ("what is beside it is not ours", False),
        ("a copy of an older version", False),
    ],
)
async def test_positions_are_refused_where_a_file_may_be_a_copy_and_nowhere_else(
    path: Path, tmp_path: Path, what: str, is_kept: bool
) -> None:
    """What was written is there, and what a client saw has no other meaning now."""
    seen_file = path.with_name(path.name + "-seen")
    async with opened(path) as store:
        of = await new(store)
        appended = await store.append(of, Draft(b"1"), now=NOW)
        assert appended is not None
        before = seen_file.read_bytes()
        await counted(store)
        killed = {each: each.read_bytes() for each in path.parent.iterdir()}
    if what.startswith("killed"):
        for each, content in killed.items():
            each.write_bytes(content)
    if what == "killed before it was said":
        seen_file.write_bytes(before)
    elif what.startswith("moved"):
        position = tmp_path / "elsewhere" / "other.db"
        position.parent.mkdir()
        path.rename(position)
        if what != "moved alone":
            seen_file.rename(position.with_name("other.db-seen"))
        path = position
    elif what == "what is beside it is not ours":
        seen_file.write_text("something")
    elif "older version" in what:
        other = sqlite3.connect(path)
        other.execute("DELETE FROM meta WHERE name IN ('file', 'count')")
        other.commit()
        other.close()
        if what == "of an older version":
            seen_file.unlink()
    async with opened(path) as store:
        _, refusal = await store.read(of, appended.event.event_id, now=NOW)
        assert refusal is (None if is_kept else Refusal.LOG_REPLACED)
        assert (await store.load(of, now=NOW)) is not None


async def test_response_streams_of_the_process_before_give_back_their_room(path: Path) -> None:
    """Nobody is left who drops them, and their session may go on for days."""
    stock = "SELECT count(*), total(length(payload)) FROM events"
    policy = SessionPolicy(idle_timeout=100, max_lifetime=1_000, max_age=50)
    async with opened(path, policy=policy) as store:
        of = await new(store, Mode.TRANSPORT)
        for name in ("events", "get", "post-1", "post-2"):
            await store.append(of, Draft(b"x" * 100), now=NOW, stream=StreamName(name))
    later = NOW + 49
    async with opened(path, policy=policy) as store:
        await store.append(of, Draft(b"y"), now=later, stream=StreamName("post-3"))
        assert await sql(store, stock) == (5, 401)
        await store.append(of, Draft(b"y"), now=later + 2, stream=StreamName("post-4"))
        # The events of the session and its GET stream are looked at when they are used.
        assert await sql(store, stock) == (4, 202)
        old = "SELECT events, bytes, head, floor FROM logs WHERE stream = 'post-1'"
        assert await sql(store, old) == (0, 0, 1, 1)


async def test_a_new_file_instead_of_another_is_named(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody knows why every session is gone."""
    async with opened(path) as store:
        await new(store)
    assert "is a new file" not in caplog.text
    path.unlink()
    async with opened(path):
        pass
    assert caplog.text.count(f"{path} is a new file") == 1
    async with opened(path):
        pass
    assert caplog.text.count(f"{path} is a new file") == 1
