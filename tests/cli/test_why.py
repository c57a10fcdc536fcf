"""``sessions show`` says why a client lost its session, and what to change, over each store."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli.main import main
from mcp_sessions.core.ends import MOST_ENDS, EndReason
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry, detaches
from mcp_sessions.ids import ConnectionId, SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.ends_contract import end_of
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.stores.urls import open_store
from tests.stores.every_store import encrypted_store_over
from tests.support.postgres_server import schema, shared_postgres
from tests.support.redis_server import namespace, shared_redis

HERE = ConnectionId("websocket-a@process-v1-abcdefgh12345678")

URLS: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda path: f"sqlite:///{path / 'sessions.db'}",
    "redis": lambda _: f"{shared_redis().url}?namespace={namespace()}",
    "postgres": lambda _: f"{shared_postgres().url}?schema={schema()}",
}
MARKS = {"redis": [pytest.mark.redis], "postgres": [pytest.mark.postgres], "sqlite": []}
EACH = [
    pytest.param(URLS[name], encrypts, id=f"{name}-encrypted" * encrypts or name, marks=marks)
    for name, marks in MARKS.items()
    for encrypts in (False, True)
]


async def show(url: str, name: str, *more: str) -> int:
    return await asyncio.to_thread(main, ["sessions", "show", name, "--store", url, *more])


async def made(store: SessionStore, client: str, *, ago: float = 60.0) -> SessionRecord:
    peer = Peer("2025-11-25", {"clientInfo": {"name": client, "version": "1"}})
    return await store.create(Mode.PROTOCOL, ANONYMOUS, peer=peer, now=time.time() - ago)


async def over(store: SessionStore, record: SessionRecord, reason: EndReason, **said: Any) -> str:
    gone = await store.end(record.session_id)
    assert gone is not None
    now = time.time()
    await store.remember_ends([end_of(gone, reason, now, age=90.0, **said)], now=now)
    return digest(record.session_id)


REASONS: list[tuple[EndReason, dict[str, Any], str, str]] = [
    (EndReason.IDLE, {"idle": 61.0}, "it expired after 1m1s without a request", "--forget-after"),
    (EndReason.LIFETIME, {}, "it expired after 1m30s, its longest lifetime", "--max-lifetime"),
    (EndReason.CLIENT, {}, "its client ended it", "mend the client"),
    (EndReason.OPERATOR, {}, "an operator ended it", "mcp-sessions sessions end"),
    (
        EndReason.LIMIT,
        {"limit": "max_sessions", "idle": 9.0},
        "it made room for another (max_sessions) after 9s without a request",
        "max_sessions in SessionPolicy, or --max-sessions",
    ),
    (EndReason.EMPTIED, {}, "the store was emptied or replaced", "a database of their own"),
    (EndReason.LOST, {}, "its record was lost in the store", "noeviction"),
]


@pytest.mark.parametrize(("url_in", "encrypts"), EACH)
async def test_each_end_is_answered_for_a_digest_an_id_and_a_clients_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    url_in: Callable[[Path], str],
    encrypts: bool,
) -> None:
    url = url_in(tmp_path)
    plain = open_store(url)
    store = encrypted_store_over(plain) if encrypts else plain
    await store.open(SessionPolicy())
    try:
        await store.made(now=time.time())
        names: list[tuple[str, SessionId, str, str]] = []
        for reason, said, why, change in REASONS:
            record = await made(store, f"client-{reason.value}")
            await over(store, record, reason, **said)
            names.append((f"client-{reason.value}", record.session_id, why, change))
        lives = await made(store, "lives")
        at, entry = time.time(), Entry(time.time(), "attached websocket abcdefgh started")
        attached = await store.attach(lives.session_id, HERE, now=at, entry=entry)
        assert attached is not None
        slow = detaches(at + 1, "slow", "abcdefgh")
        assert await store.detach(lives.session_id, attached.fencing_epoch, slow)
        for client, session_id, why, change in names:
            for name in (client, digest(session_id)[:8], session_id):
                assert await show(url, name, "--json") == 0
                said = capsys.readouterr().out
                shown = json.loads(said)
                assert (shown["ended"], shown["why"]) == (True, why) and change in shown["change"]
                assert session_id not in said
        assert await show(url, "lives") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split(maxsplit=1) == [
            "why",
            "it lives, and no connection has it: detached at replica abcdefgh: slow",
        ]
        assert lines[1].split()[0] == "change" and "buffers" in lines[1]

        assert await show(url, "0123456789ab") == 2
        said = capsys.readouterr().err
        assert "no session 0123456789ab: none is there, and none has ended since 20" in said
        assert "The store is new since then: what was before is gone" in said
        assert await show(url, "nobody") == 2
        said = capsys.readouterr().err
        assert "No client with that name has one" in said and "nobody" not in said
    finally:
        await store.close()


async def test_a_session_whose_time_has_passed_while_no_server_runs_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = URLS["sqlite"](tmp_path)
    store = open_store(url)
    await store.open(SessionPolicy())
    try:
        record = await made(store, "left", ago=3 * 86_400)
    finally:
        await store.close()
    assert await show(url, "left", "--forget-after", "30d", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ended"] and shown["reason"] == "idle"
    assert shown["why"] == "it expired after 30m without a request"
    assert shown["digest"] == digest(record.session_id)


async def test_a_store_that_remembers_no_more_ends_says_since_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = URLS["sqlite"](tmp_path)
    store = open_store(url)
    await store.open(SessionPolicy())
    try:
        now = time.time()
        await store.made(now=now - 30 * 86_400)
        record = await made(store, "x")
        ends = [
            end_of(record, EndReason.CLIENT, now - number, age=float(number))
            for number in range(MOST_ENDS)
        ]
        assert await show(url, "0123456789ab") == 2
        assert "Ends are remembered for 7 days. Or it never was" in capsys.readouterr().err
        await store.remember_ends(ends, now=now)
    finally:
        await store.close()
    assert await show(url, "0123456789ab") == 2
    assert f"The newest {MOST_ENDS} ends are remembered. Or it never" in capsys.readouterr().err
