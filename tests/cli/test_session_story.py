"""``sessions show`` and ``sessions top``: what happened to a session, and who has one."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli import sessions
from mcp_sessions.cli.main import main
from mcp_sessions.core.ends import EndReason
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry, detaches
from mcp_sessions.ids import ConnectionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.ends_contract import end_of
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

ALICE = Principal("app", "https://issuer.example", "alice")
HERE = ConnectionId("websocket-a@process-v1-abcdefgh12345678")


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[SQLiteStore]:
    store = SQLiteStore(path)
    await store.open(SessionPolicy())
    try:
        yield store
    finally:
        await store.close()


async def run(path: Path, *arguments: str) -> int:
    command, *more = arguments
    store = f"sqlite:///{path}"
    return await asyncio.to_thread(main, ["sessions", command, "--store", store, *more])


async def made(
    store: SQLiteStore, name: str, *, principal: Principal = ALICE, ago: float = 60.0
) -> SessionRecord:
    peer = Peer("2025-11-25", {"clientInfo": {"name": name, "version": "1"}})
    at = time.time() - ago
    record = await store.create(Mode.PROTOCOL, principal, peer=peer, now=at)
    entry = Entry(at, "attached websocket abcdefgh started")
    attached = await store.attach(record.session_id, HERE, now=at, entry=entry)
    assert attached is not None
    await store.detach(
        record.session_id,
        attached.fencing_epoch,
        detaches(at + 5, "slow", "abcdefgh", "tools/call"),
    )
    return record


async def ended(store: SQLiteStore, record: SessionRecord) -> None:
    gone = await store.end(record.session_id)
    assert gone is not None
    end = end_of(gone, EndReason.CLIENT, time.time(), age=60.0)
    await store.remember_ends([end], now=time.time())


STORY = [
    ("started", "started"),
    ("attached", "attached by websocket at replica abcdefgh at its start"),
    ("detached", "detached at replica abcdefgh: slow, after tools/call"),
]


async def test_one_session_is_shown_with_its_story_also_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        lives, over = await made(store, "code"), await made(store, "other")
        await ended(store, over)

    assert await run(path, "show", digest(lives.session_id), "--json") == 0
    said = capsys.readouterr().out
    shown = json.loads(said)
    assert [(each["what"], each["text"]) for each in shown["story"]] == STORY
    assert (shown["foldedEntries"], shown["events"], shown["dataBytes"]) == (0, 0, 0)
    assert shown["lastMethod"] == "tools/call"
    assert lives.session_id not in said and HERE not in said

    assert await run(path, "show", digest(over.session_id), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    last = ("ended", "ended: its client ended it")
    assert [(each["what"], each["text"]) for each in shown["story"]] == [*STORY, last]
    assert (shown["client"], shown["principal"]) == ("other 1", "alice")
    assert shown["lastMethod"] == "tools/call"

    assert await run(path, "show", digest(over.session_id)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[1] for line in lines[-4:]] == [text for _, text in [*STORY, last]]
    assert not [line for line in lines if line.startswith("foldedEntries")]


async def test_a_clients_name_finds_its_sessions_and_its_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        first, over = await made(store, "claude-code-for-all"), await made(store, "code")
        await ended(store, over)
        again = await made(store, "code")

    for name in ("claude-code-for-all", "Claude-Code-For-All 1"):
        assert await run(path, "show", name, "--json") == 0
        assert json.loads(capsys.readouterr().out)["digest"] == digest(first.session_id)

    assert await run(path, "show", "code", "--json") == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["digest"] for row in rows] == [digest(each.session_id) for each in (over, again)]
    assert [row.get("why") for row in rows] == ["its client ended it", None]
    assert await run(path, "show", "code") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["SESSION", "MODE", "AGE", "WHAT"]
    assert "its client ended it" in table[1] and "it lives" in table[2]

    assert await run(path, "show", "nobody") == 2
    said = capsys.readouterr().err
    assert "by its client's name" in said and "nobody" not in said


async def test_a_session_is_followed_until_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry is printed once, also if older ones fold away meanwhile."""
    path = tmp_path / "sessions.db"
    monkeypatch.setattr(sessions, "FOLLOW_EVERY", 0.01)
    looked, loop = asyncio.Event(), asyncio.get_running_loop()
    told = sessions.story_of

    def seen(story: str, created_at: float | None) -> dict[str, Any]:
        found = told(story, created_at)
        loop.call_soon_threadsafe(looked.set)
        return found

    monkeypatch.setattr(sessions, "story_of", seen)
    async with opened(path) as store:
        record = await made(store, "code")
        following = asyncio.create_task(
            run(path, "show", digest(record.session_id), "--follow", "--json")
        )
        for number in range(60):
            looked.clear()
            async with asyncio.timeout(20):
                await looked.wait()
            entry = Entry(time.time(), f"attached websocket replica{number:02} resumed")
            assert await store.attach(record.session_id, HERE, now=time.time(), entry=entry)
        # What comes right before the end is printed, too.
        await ended(store, record)
        async with asyncio.timeout(20):
            assert await following == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["what"] for row in rows[:3]] == [what for what, _ in STORY]
    assert [row["replica"] for row in rows[3:-1]] == [f"replica{number:02}" for number in range(60)]
    assert rows[-1]["text"] == "ended: its client ended it"


async def test_the_sessions_that_were_used_last_are_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal once; in a terminal again and again, in the room that it has."""
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        for number in range(30):
            await made(store, f"c{number:02}\x1b[31m", principal=ANONYMOUS, ago=1_000 - number)
        await ended(store, await made(store, "over"))
    assert await run(path, "top") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("  30 sessions, 0 attached")
    assert lines[1] == "ended in the last hour: 1 client"
    assert lines[2].split()[:3] == ["SESSION", "MODE", "TRANSPORT"]
    assert "c29" in lines[3] and "c28" in lines[4]
    assert "\x1b" not in "".join(lines)
    few = tmp_path / "few.db"
    async with opened(few) as store:
        await made(store, "alone", principal=ANONYMOUS)
    assert await run(few, "top") == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("  1 session, 0 attached")

    looks, screen = [0], sessions.screen

    def counted(of: Any) -> list[str]:
        looks[0] += 1
        if looks[0] == 3:
            raise KeyboardInterrupt
        return screen(of)

    monkeypatch.setattr(sessions, "screen", counted)
    monkeypatch.setattr(sessions, "FOLLOW_EVERY", 0.01)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    assert await run(path, "top") == 130
    shown = capsys.readouterr().out.split("\x1b[H")[1:]
    assert len(shown) == 2
    for each in shown:
        lines = each.removesuffix("\x1b[J").split("\x1b[K\n")
        assert len(lines) <= 12 and max(map(len, lines)) <= 60
        assert "SESSION" in lines[2] and "IDLE" in lines[2]


async def test_programs_get_a_line_of_json_for_each_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as store:
        lives = await made(store, "code")
        await ended(store, await made(store, "over"))
    looks, top_row = [0], sessions.top_row

    def counted(*of: Any) -> dict[str, Any]:
        looks[0] += 1
        if looks[0] == 3:
            raise KeyboardInterrupt
        return top_row(*of)

    monkeypatch.setattr(sessions, "top_row", counted)
    monkeypatch.setattr(sessions, "FOLLOW_EVERY", 0.01)
    assert await run(path, "top", "--json") == 130
    said = capsys.readouterr().out
    lines: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
    assert len(lines) == 2 and lives.session_id not in said
    assert (lines[0]["sessions"], lines[0]["attached"]) == (1, 0)
    assert lines[0]["endedInTheLastHour"] == {"client": 1}
    assert [each["digest"] for each in lines[0]["usedLast"]] == [digest(lives.session_id)]
