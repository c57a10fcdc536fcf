"""``mcp-sessions sessions``: what an operator sees of a store, and ends in it."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli.main import main
from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import GET_STREAM, ConnectionId, FencingEpoch, SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.dispatch.cluster_handlers import ClusterHandlers
from mcp_sessions.stores.record_changes import SetCurrent
from mcp_sessions.stores.records import CurrentSession, Peer, SessionRecord
from mcp_sessions.stores.sqlite import sqlite_operator as sqlite_operator
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.raw import at_most, in_session
from tests.support.redis_server import namespace, redis_store, shared_redis
from tests.support.world import world

ALICE = Principal("app", "https://issuer.example", "alice", frozenset({"read"}))
BOB = Principal("app", "https://issuer.example", "bob\x1b[31m")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[SQLiteStore]:
    store = SQLiteStore(path)
    await store.open(SessionPolicy())
    try:
        yield store
    finally:
        await store.close()


async def run(path: Path, *arguments: str) -> int:
    """The command, as another process would be: it has an event loop of its own."""
    command, *more = arguments
    store = f"sqlite:///{path}"
    return await asyncio.to_thread(main, ["sessions", command, "--store", store, *more])


async def filled(path: Path) -> dict[str, SessionRecord]:
    """Four sessions, of two principals and nobody, made at different times."""
    now = time.time()
    peer = Peer("2025-11-25", {"clientInfo": {"name": "stock", "version": "1"}})
    async with opened(path) as store:
        made = {
            "http": await store.create(Mode.TRANSPORT, ALICE, peer=peer, now=now - 600),
            "on http": await store.create(Mode.PROTOCOL, ALICE, peer=peer, now=now - 300),
            "waiting": await store.create(Mode.PROTOCOL, BOB, peer=None, now=now - 60),
            "nobody's": await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=now),
            "expired": await store.create(Mode.PROTOCOL, ALICE, peer=None, now=now - 99_999),
        }
        http, on_http = made["http"].session_id, made["on http"].session_id
        await store.attach(on_http, ConnectionId(http), now=now)
        await store.change(http, SetCurrent(CurrentSession(on_http, FencingEpoch(1))))
        await store.subscribe(on_http, "note://1")
        await store.change_state(on_http, {"secret": "of the application"}, ())
        await store.touch([http], now=now)
    return made


async def test_sessions_are_listed_by_digest_and_distinguished(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEC2: "the loggable id is not the credential"; what others named cannot steer a terminal."""
    made = await filled(path)

    assert await run(path, "list") == 0
    table, counted = capsys.readouterr()
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == [
        "SESSION",
        "MODE",
        "TRANSPORT",
        "CLIENT",
        "PRINCIPAL",
        "AGE",
        "IDLE",
        "EXPIRES",
    ]
    # A name and a version are two words.
    shown = [line[:3] + line[5:] if "stock" in line else line[:3] + line[4:] for line in lines]
    assert all("stock 1" in line for line in table.splitlines() if "alice" in line)
    rows = {line[0]: line[1:6] for line in shown[1:]}
    names = {name: digest(record.session_id) for name, record in made.items()}
    assert list(rows) == [names[each] for each in ("http", "on http", "waiting", "nobody's")]
    assert rows[names["http"]][:3] == ["transport", "http", "alice"]
    assert rows[names["http"]][3].startswith("10m") and rows[names["http"]][4].endswith("s")
    assert rows[names["on http"]][1:3] == ["http", "alice"]
    assert rows[names["on http"]][4].startswith("5m")
    assert rows[names["waiting"]][1:3] == ["none", r"bob\x1b[31m"]
    assert rows[names["nobody's"]][2] == "anonymous"
    assert counted == "4 of 4 sessions\n"
    for record in made.values():
        assert record.session_id not in table


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--principal", "alice"], {"http", "on http"}),
        (["--principal", "app"], {"http", "on http", "waiting"}),
        (["--principal", "anonymous"], {"nobody's"}),
        (["--age", "200"], {"http", "on http"}),
        (["--idle", "200"], {"on http"}),
        (["--idle", "200", "--principal", "bob"], set[str]()),
        (["--transport", "http"], {"http", "on http"}),
        (["--transport", "none"], {"waiting", "nobody's"}),
        (["--mode", "transport"], {"http"}),
    ],
)
async def test_a_list_is_of_what_was_asked_for(
    path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: set[str]
) -> None:
    made = await filled(path)
    names = {digest(record.session_id): name for name, record in made.items()}

    await run(path, "list", "--json", *options)

    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {names[row["digest"]] for row in rows} == expected
    assert all("id" not in row for row in rows)


async def test_one_session_is_shown_without_what_the_application_keeps(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await filled(path)
    on_http, http = made["on http"].session_id, made["http"].session_id

    await run(path, "show", digest(on_http)[:8], "--json")
    said = capsys.readouterr().out
    shown = json.loads(said)
    assert shown["subscriptions"] == ["note://1"]
    assert shown["client"] == {"name": "stock", "version": "1"}
    assert (shown["stateVersion"], shown["scopes"]) == (1, ["read"])
    assert shown["stateBytes"] == len('{"secret":"of the application"}')
    assert "of the application" not in said and on_http not in said

    await run(path, "show", http, "--ids", "--json")
    shown = json.loads(capsys.readouterr().out)
    assert (shown["id"], shown["current"]) == (http, on_http)


async def test_the_events_of_a_connection_are_counted(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are in the log of its GET stream. Its other log has none."""
    http, now = (await filled(path))["http"].session_id, time.time()
    async with opened(path) as store:
        for _ in range(2):
            await store.append(http, Draft(b"{}", None), now=now, stream=GET_STREAM)

    await run(path, "show", digest(http), "--json")

    shown = json.loads(capsys.readouterr().out)
    assert (shown["events"], shown["newestEvent"]) == (2, 2)


async def test_one_session_is_a_table_for_people(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON's names and values, a line each. A name of others cannot steer a terminal."""
    made = await filled(path)
    on_http, waiting = made["on http"].session_id, made["waiting"].session_id

    assert await run(path, "show", digest(on_http)) == 0
    said = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert shown["digest"] == digest(on_http)
    assert shown["client"] == "name stock, version 1"
    assert (shown["subscriptions"], shown["current"]) == ("note://1", "-")
    assert shown["age"].startswith("5m")
    assert "of the application" not in said and on_http not in said

    assert await run(path, "show", digest(waiting)) == 0
    said = capsys.readouterr().out
    assert r"bob\x1b[31m" in said and "\x1b" not in said


async def test_a_list_fits_the_terminal(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is whole, since people copy it. What had no room is named."""
    made = await filled(path)
    names = {digest(made[each].session_id) for each in ("http", "on http", "waiting", "nobody's")}
    capsys.readouterr()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns in (80, 60, 45):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert await run(path, "list") == 0
        table, said = capsys.readouterr()
        lines = table.splitlines()
        assert max(map(len, lines)) <= columns
        assert {line.split()[0] for line in lines if line[0] != " "} == names | {"SESSION"}
        assert "no room for EXPIRES" in said
    monkeypatch.setenv("COLUMNS", "200")
    assert await run(path, "list") == 0
    table, said = capsys.readouterr()
    assert "EXPIRES" in table and "no room" not in said


async def test_the_servers_variables_are_read(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``serve``. An option of the command line replaces its variable."""
    made = await filled(path)
    name = digest(made["waiting"].session_id)

    async def status(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["sessions", *arguments])

    assert await status("list") == 2
    assert "Give --store URL, or set MCP_SESSIONS_STORE" in capsys.readouterr().err
    monkeypatch.setenv("MCP_SESSIONS_STORE", f"sqlite:///{path}")
    assert await status("show", name) == 0
    assert name in capsys.readouterr().out
    assert await status("list", "--store", "memory://") == 2
    assert "MCP_SESSIONS_STORE" not in capsys.readouterr().err
    for text, said in (
        ("", "MCP_SESSIONS_STORE is empty"),
        ("floppy://a/b", "(set by MCP_SESSIONS_STORE)"),
    ):
        monkeypatch.setenv("MCP_SESSIONS_STORE", text)
        assert await status("end", name) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv("MCP_SESSIONS_IDLE_TIMEOUT", "soon")
    assert await status("list", "--store", f"sqlite:///{path}") == 2
    assert "MCP_SESSIONS_IDLE_TIMEOUT: must be a time" in capsys.readouterr().err


@pytest.mark.parametrize("begins", ["-", "--"])
async def test_an_id_that_begins_with_a_dash_is_no_option(
    begins: str, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are base64url: one in sixty-four does."""
    session_id = SessionId(begins.ljust(43, "i"))
    monkeypatch.setattr(
        "mcp_sessions.stores.sqlite.sqlite_store.mint_session_id", lambda: session_id
    )
    async with opened(path) as store:
        await store.create(Mode.PROTOCOL, ALICE, peer=None, now=time.time())
    assert await run(path, "show", session_id, "--ids", "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == session_id
    assert await run(path, "end", session_id) == 0
    assert capsys.readouterr().out == f"{digest(session_id)} ended\n"


async def test_a_name_that_names_none_or_several_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(path)
    for name, said in (
        ("beef0000beef", "no session beef0000beef"),
        ("abc", "4 to 12 digits"),
        ("an-id-of-a-session-that-is-over", "4 to 12 digits"),
    ):
        assert await run(path, "end", name) == 2
        err = capsys.readouterr().err
        assert said in err and "over" not in err

    def same(_: str) -> str:
        return "abcdef012345"

    monkeypatch.setattr("mcp_sessions.cli.sessions.digest", same)
    assert await run(path, "show", "abcd") == 2
    assert "4 sessions begin with abcd" in capsys.readouterr().err


async def test_a_session_is_ended_in_a_file_that_nobody_serves_from(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await filled(path)
    names = [digest(made[each].session_id)[:6] for each in ("waiting", "http")]

    assert await run(path, "end", *names) == 0

    assert capsys.readouterr().out.count("ended") == 2
    async with opened(path) as store:
        for each in ("waiting", "http"):
            assert await store.load(made[each].session_id, now=time.time()) is None
        assert await store.load(made["on http"].session_id, now=time.time()) is not None


async def test_a_running_server_notices_before_the_command_returns(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its next use answers -32043, or 404; what runs in it is answered when the reaper comes."""
    async with world(store=f"sqlite:///{path}") as w:
        client, other = await w.connected(), await w.connected()
        session_id = (await client.start())["sessionId"]
        running = client.call("wait", gate="g")
        await w.box.gate("g").started.wait()
        # Now it is surely in memory.
        assert await client.text("session_id", meta=in_session(session_id)) == session_id
        assert other.session_id is not None
        names = [digest(session_id), digest(other.session_id)]

        w.clock.now = time.time()
        assert await run(path, "end", *names) == 0

        assert capsys.readouterr().out == "".join(f"{name} ended\n" for name in names)
        named = in_session(session_id)
        assert (await client.error("tools/list", {"_meta": named}))["code"] == -32043
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        assert (await other.post(ping).done()).status == 404
        await w.expire()
        error = await running.error()
        assert (error["code"], error["data"]["started"]) == (-32043, True)
        assert w.box.gate("g").cancelled.is_set()


async def test_a_session_that_ended_is_shown_with_when_and_why(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its client, by time, and by an operator while nobody served: what was before."""
    made = await filled(path)
    waiting = made["waiting"].session_id
    assert await run(path, "end", digest(waiting)) == 0
    async with world(store=f"sqlite:///{path}") as w:
        w.clock.now = time.time()
        client = await w.connected()
        session_id = (await client.start())["sessionId"]
        await client.end(session_id)
        await w.expire()
        capsys.readouterr()

        expected = (
            (waiting, "operator", "an operator ended it"),
            (digest(session_id)[:8], "client", "its client ended it"),
            (digest(made["expired"].session_id), "idle", "without a request"),
        )
        for name, reason, why in expected:
            assert await run(path, "show", name, "--json") == 0
            said = capsys.readouterr().out
            shown = json.loads(said)
            assert (shown["ended"], shown["reason"]) == (True, reason)
            assert why in shown["why"] and shown["endedAt"].endswith("Z")
            assert waiting not in said and session_id not in said

        assert await run(path, "list", "--ended") == 0
        table, counted = capsys.readouterr()
        heads = ["SESSION", "MODE", "CLIENT", "PRINCIPAL", "ENDED", "AGE", "WHY"]
        assert table.splitlines()[0].split() == heads
        assert {line.split()[0] for line in table.splitlines()[1:]} == {
            digest(each) for each in (waiting, session_id, made["expired"].session_id)
        }
        assert counted == "3 of 3 ends that are remembered\n"

        assert await run(path, "show", waiting) == 0
        shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert (shown["ended"], shown["why"]) == ("yes", "an operator ended it")

        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "60")
        assert await run(path, "list", "--ended") == 0
        table, said = capsys.readouterr()
        assert max(map(len, table.splitlines())) <= 60
        # The reason goes on in the next line.
        assert "WHY" in table and "request" in table and "no room for AGE" in said

        assert await run(path, "show", "0123456789ab") == 2
        said = capsys.readouterr().err
        assert "no session 0123456789ab" in said and "The store is new since then" in said
        assert "A server notes an end some seconds after it" in said


async def test_an_end_while_nobody_served_is_reported_by_the_next_server(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: the one after it says nothing."""
    made = await filled(path)
    name = digest(made["waiting"].session_id)
    assert await run(path, "end", name) == 0
    caplog.set_level("INFO", "mcp_sessions")
    for _ in range(2):
        async with world(store=f"sqlite:///{path}") as w:
            w.clock.now = time.time()
            await w.expire()
    assert caplog.text.count(f"session {name} ended: an operator ended it") == 1


@pytest.mark.redis
async def test_one_replica_reports_what_an_operator_ended(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """However many there are."""
    own = namespace()
    url = f"{shared_redis().url}?namespace={own}"
    caplog.set_level("INFO", "mcp_sessions")
    stores = redis_store(own=own), redis_store(own=own)
    async with world(store=stores[0]) as w, world(store=stores[1]) as other:
        w.clock.now = other.clock.now = time.time()
        client = await w.connected()
        name = digest((await client.start())["sessionId"])
        assert await asyncio.to_thread(main, ["sessions", "end", "--store", url, name]) == 0
        capsys.readouterr()
        for each in (w, other, w):
            await each.expire()
        assert caplog.text.count(f"session {name} ended: an operator ended it") == 1
        assert (
            await asyncio.to_thread(main, ["sessions", "show", "--json", "--store", url, name]) == 0
        )
        assert json.loads(capsys.readouterr().out)["reason"] == "operator"


def _nothing(_: ClusterHandlers) -> tuple[()]:
    return ()


@pytest.mark.redis
async def test_every_replica_on_a_redis_learns_of_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when it looks next: what runs is answered, streams end, nothing is left of
    the session in the stream of its connection.
    """
    own = namespace()
    url = f"{shared_redis().url}?namespace={own}"
    async with world(store=redis_store(own=own)) as w:
        w.clock.now = time.time()
        client, other = await w.connected(), await w.connected()
        session_id = (await client.start())["sessionId"]
        stream, closed = await client.get().started(), await other.get().started()
        await client.text("update", uri="a:1")
        running = client.call("wait", gate="g")
        await w.box.gate("g").started.wait()
        await stream.has(1)
        assert client.session_id is not None and other.session_id is not None
        names = [digest(session_id), digest(other.session_id)]
        # What it finds in its rounds would hide that it is not notified.
        monkeypatch.setattr(ClusterHandlers, "round", _nothing)

        end = ["sessions", "end", "--store", url, *names]
        assert await asyncio.to_thread(main, end) == 0
        assert capsys.readouterr().out == "".join(f"{name} ended\n" for name in names)

        error = await at_most(3, running.error())
        assert (error["code"], error["data"]["started"]) == (-32043, True)
        assert w.box.gate("g").cancelled.is_set()
        await at_most(3, closed.done())
        record = await w.layer.store.load(SessionId(client.session_id), now=time.time())
        assert record is not None and not record.client.carried


async def test_who_serves_and_does_not_answer_is_named(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked all the same, and ends the session when it comes to itself."""
    made = await filled(path)
    session_id = SessionId(made["waiting"].session_id)
    monkeypatch.setattr(sqlite_operator, "END_WITHIN", 0.05)
    # It looks when it starts, and again in a minute.
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 60.0)
    async with opened(path) as store:
        assert await store.load(session_id, now=time.time()) is not None
        assert await run(path, "end", digest(session_id)) == 1
        said = capsys.readouterr().err
        assert "did not end the session within 0.05 s" in said
    async with opened(path) as store:
        assert await store.load(session_id, now=time.time()) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://", "nobody else sees it"),
        ("sqlite:////nowhere/sessions.db", "no such file"),
        ("sqlite:////usr", "/usr is a directory"),
        ("floppy://a:secret@b", "unknown store 'floppy'"),
    ],
)
async def test_a_store_with_nothing_to_see_is_refused(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["sessions", "list", "--store", url]) == 2
    err = capsys.readouterr().err
    assert said in err and "secret" not in err and err.count("\n") == 1


async def test_a_file_of_an_older_version_is_left_to_its_server(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened(path) as store:
        writer = store._writer  # pyright: ignore[reportPrivateUsage]
        await writer.call(lambda tx: tx.execute("PRAGMA user_version = 1"))
    assert await run(path, "list") == 2
    assert "schema version 1" in capsys.readouterr().err


async def test_a_store_that_is_away_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> int:
        raise StoreUnavailable("the store is\naway")

    monkeypatch.setattr("mcp_sessions.cli.sessions.main", away)
    assert main(["sessions", "list", "--store", "x"]) == 1
    assert capsys.readouterr().err == "mcp-sessions sessions: the store is away\n"


async def test_idle_times_are_those_of_what_sleeps_too(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With conversations a connection may be idle for as long as one of them, and is listed so."""
    now, day = time.time(), 86_400
    store = SQLiteStore(path)
    await store.open(SessionPolicy(forget_after=30 * day))
    named = SessionId("n" * 43)
    await store.create(Mode.CONVERSATION, ALICE, peer=None, now=now - 5 * day, session_id=named)
    for days in (3, 1):
        await store.create(Mode.TRANSPORT, ALICE, peer=None, now=now - days * day)
    await store.create(Mode.TRANSPORT, BOB, peer=None, now=now)
    await store.close()

    async def listed(days: float) -> list[str]:
        idle = ("--idle", f"{days * day:.0f}", "--json")
        assert await run(path, "list", *idle) == 0
        return sorted(each["mode"] for each in json.loads(capsys.readouterr().out))

    assert await listed(6) == []
    assert await listed(4) == ["conversation"]
    assert await listed(2) == ["conversation", "transport"]
    assert await listed(0.5) == ["conversation", "transport", "transport"]
    assert await listed(0.0001) == ["conversation", "transport", "transport"]
