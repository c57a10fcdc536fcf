"""What is wrong with a file is said: an older one, a newer one, another one, a damaged one."""

import sqlite3
from pathlib import Path

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.ids import FencingEpoch, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import CurrentSession, Data, Peer
from mcp_sessions.stores.sqlite import schema as sqlite_schema
from mcp_sessions.stores.sqlite.rows import request_end
from mcp_sessions.stores.sqlite.schema import MIGRATIONS, VERSION, statements
from mcp_sessions.testing.parts import change_of
from tests.stores.sqlite.file_store import NOW, new, opened, refusal_of, sql


@pytest.mark.parametrize("version", range(1, VERSION))
@pytest.mark.parametrize(
    ("mode", "now_called"),
    [
        ("protocol", Mode.PROTOCOL),
        ("bound", Mode.CONVERSATION),
        ("conversation", Mode.AGENT),
    ],
)
async def test_a_file_of_an_older_version_is_migrated(
    path: Path, version: int, mode: str, now_called: Mode
) -> None:
    """And what is in it is there."""
    connection = sqlite3.connect(path, isolation_level=None)
    for migration in MIGRATIONS[:version]:
        for statement in statements(migration):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    row = {
        "session_id": "kept",
        "mode": mode if version < 6 else now_called.value,
        "owner": b"[null,null,null]",
        "scopes": b"[]",
        "created_at": NOW,
        "expires_at": NOW + 9,
        "ends_at": NOW + 99,
        "fencing_epoch": 3,
        "stream_opened": 0,
        "state_version": 1,
        "state": b'{"n":1}',
    }
    if version < 3:
        row |= {"key_bytes": 0, "key_answers": 0}
    names, positions = ", ".join(row), ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO sessions ({names}) VALUES ({positions})", tuple(row.values()))
    connection.execute("UPDATE meta SET value = 1")
    connection.close()
    async with opened(path) as store:
        record = await store.load(SessionId("kept"), now=NOW)
        assert record is not None and record.mode is now_called
        assert (record.fencing_epoch, record.state.values) == (3, {"n": 1})
        assert await sql(store, "PRAGMA user_version") == (VERSION,)


async def test_a_file_of_an_older_release_opens_with_its_sessions(path: Path) -> None:
    """Written by a release whose steps were SQL."""
    connection = sqlite3.connect(path)
    connection.executescript(
        (Path(__file__).parent / "written_by_an_older_release.sql").read_text()
    )
    connection.execute(f"PRAGMA application_id = {sqlite_schema.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    seen = path.with_name(f"{path.name}-seen")
    file = sqlite3.connect(path)
    meta = dict(file.execute("SELECT name, value FROM meta"))
    file.close()
    seen.write_text(f"{meta['file']} {meta['count']:020d}\n")
    alice = Principal("client", "https://issuer", "alice", frozenset({"a", "b"}), 5.5)
    one, wire, agent = SessionId("one"), SessionId("wire"), SessionId("agent")
    async with opened(path) as store:
        record = await store.load(one, now=NOW)
        assert record is not None and record.principal == alice
        assert record.client.subscriptions == {"note://1"} and record.client.log_level == "info"
        assert record.client.peer == Peer("2025-11-25", {"capabilities": {"x": 1}})
        assert (record.state.values, record.state.version) == ({"n": 1}, 1)
        assert await store.load_data(one) == Data({"d": [1]}, 1)
        head = await store.head(one)
        assert head is not None and head.number == 3
        events, _ = await store.read(one, f"{head.log_epoch}-{0:012d}", now=NOW)
        assert [(each.number, each.payload) for each in events] == [
            (2, b'{"n":1}'),
            (3, b'{"n":2}'),
        ]
        # The event that has the name is known, and so is the one with the coalescing key.
        again = await store.append(one, Draft(b"?", key="k", name="named-2", since=NOW), now=NOW)
        assert again is not None and again.event.number == 3
        newer = await store.append(one, Draft(b'{"n":3}', key="k"), now=NOW)
        assert newer is not None and newer.replaced
        found: dict[str, object] = {}
        for name in ("answered", "dropped", "running"):
            use = KeyUse(RequestKey(name), b"digest", "process-2", frozenset({"a"}))
            admitted = await store.admit(one, alice, mode=Mode.PROTOCOL, now=NOW, key=use)
            assert admitted is not None
            found[name] = admitted.key, admitted.outcome
        assert found == {
            "answered": (Begun.ANSWERED, b'"result":{}'),
            "dropped": (Begun.DROPPED, None),
            "running": (Begun.DROPPED, None),
        }
        connection_of = await store.load(wire, now=NOW)
        assert connection_of is not None and connection_of.attachment is not None
        assert connection_of.client.current == CurrentSession(one, FencingEpoch(1))
        assert connection_of.client.stream_opened and connection_of.client.carried == {one: 1}
        relayed = await store.relay(wire, one, FencingEpoch(1), newer.event, now=NOW)
        assert relayed.event is not None and relayed.event.number == 2
        begin = await store.head(agent)
        assert begin is not None
        page, _ = await store.read(agent, f"{begin.log_epoch}-{1:012d}", now=NOW, limit=2)
        assert [each.payload for each in page] == [b'{"entry":1}', b'{"entry":2}']


async def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as store:
        of = await new(store)
    broken = [*MIGRATIONS, "CREATE TABLE half (n);\nINSERT INTO nowhere VALUES (1);\n"]
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", broken)
    monkeypatch.setattr(sqlite_schema, "VERSION", VERSION + 1)
    assert "nowhere" in await refusal_of(path)
    monkeypatch.undo()
    async with opened(path) as store:
        assert await store.load(of, now=NOW) is not None
        assert await sql(store, "SELECT count(*) FROM sqlite_schema WHERE name = 'half'") == (0,)


async def test_a_newer_file_is_refused_and_left_alone(path: Path) -> None:
    async with opened(path) as store:
        await new(store)
        await sql(store, f"PRAGMA user_version = {VERSION + 1}")
    before = path.read_bytes()
    said = await refusal_of(path)
    assert f"schema version {VERSION + 1}, newer than this mcp-sessions" in said
    assert path.read_bytes() == before


async def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (n)")
    other.close()
    before = path.read_bytes()
    assert "another program" in await refusal_of(path)
    assert path.read_bytes() == before
    text = path.with_name("text")
    text.write_text("no database, but long enough to be read as one " * 9)
    assert "is not a SQLite file" in await refusal_of(text)
    assert "cannot be opened" in await refusal_of(path.parent / "nowhere" / "sessions.db")
    assert await refusal_of(path.parent) == f"{path.parent} is a directory, not a file"
    assert not path.parent.with_name(f"{path.parent.name}-lock").exists()


async def test_a_file_that_may_not_be_read_is_named_with_the_cause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite says the same of it as of a folder that is missing."""

    def refused(_: Path) -> sqlite3.Connection:
        return sqlite3.connect(path.parent / "nowhere" / "sessions.db")

    def denied(_: Path, __: int) -> bool:
        return False

    # Root may read each file, so the two answers of the system are given here.
    monkeypatch.setattr(sqlite_schema, "_connect", refused)
    path.touch()
    assert "unable to open database file" in await refusal_of(path)
    monkeypatch.setattr("mcp_sessions.stores.sqlite.schema.os.access", denied)
    assert await refusal_of(path) == f"{path} cannot be opened: permission denied"


async def test_a_damaged_file_is_said_to_be(path: Path) -> None:
    """Never an empty session instead."""
    async with opened(path) as store:
        of = await new(store)
        for _ in range(50):
            await store.append(of, Draft(b"x" * 2_000), now=NOW)
    pages = bytearray(path.read_bytes())
    pages[4096 * 4 :] = b"\xa5" * (len(pages) - 4096 * 4)
    path.write_bytes(pages)
    said = list[str]()
    try:
        async with opened(path) as store:
            for call in (store.all_sessions(), store.head(of), new(store)):
                try:
                    await call
                except StoreUnavailable as refused:
                    said.append(str(refused))
    except (ConfigurationError, StoreUnavailable) as refused:
        said.append(str(refused))
    assert said and all("damaged" in each for each in said)


async def test_a_session_that_cannot_be_read_stops_no_round_for_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer version's, or a row that something else wrote. It is over all the same."""
    async with opened(path) as store:
        first, bad, last = [await new(store) for _ in range(3)]
    other = sqlite3.connect(path)
    other.execute("UPDATE sessions SET mode = 'newer' WHERE session_id = ?", (bad,))
    other.commit()
    other.close()
    async with opened(path) as store:
        ended = await store.expire(now=NOW + 1_000, held=(), limit=9)

        assert {each.session_id for each in ended} == {first, last}
        assert await sql(store, "SELECT count(*) FROM sessions") == (0,)
        assert "could not be read" in caplog.text and bad not in caplog.text


def broken(path: Path, session_id: SessionId) -> None:
    """Write to a session what a newer release may have written."""
    other = sqlite3.connect(path)
    other.execute("UPDATE sessions SET mode = 'newer' WHERE session_id = ?", (session_id,))
    other.commit()
    other.close()


async def test_a_session_that_cannot_be_read_keeps_no_change_from_the_others(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """EVT1, SES14. They are asked for in the same call."""
    async with opened(path) as store:
        ids = [await new(store) for _ in range(3)]
    broken(path, ids[1])
    async with opened(path) as store:
        appended = await store.append_change(ids, change_of(listed="tools"), now=NOW)
        assert [each.session_id for each in appended] == [ids[0], ids[2]]
        assert "a change is not in a session's log" in caplog.text
        listed = {each.session_id for each in await store.all_sessions()}
        assert listed == {ids[0], ids[2]} and "left out of a list" in caplog.text
    async with opened(path) as store:
        await store.touch(ids, now=NOW + 50)
        found = [await store.load(each, now=NOW + 50) for each in (ids[0], ids[2])]
        assert [each.life.expires_at for each in found if each is not None] == [NOW + 150] * 2


async def test_a_session_that_cannot_be_read_sleeps_until_it_expires(path: Path) -> None:
    """SES15. The release that wrote it may come back. What makes room or sleeps leaves it."""
    policy = SessionPolicy(idle_timeout=100, forget_after=1_000, max_lifetime=10_000)
    async with opened(path, policy=policy) as store:
        session_id = await new(store)
    broken(path, session_id)
    async with opened(path, policy=policy) as store:
        await store.sleep(now=NOW + 500)
        for opens in (False, True):
            assert not await store.evict(
                now=NOW + 500, unused_for=60, held=(), limit=9, opened=opens
            )
        assert not await store.evict_heavy(now=NOW + 500, most=0, held=(), limit=9)
        assert await sql(store, "SELECT count(*) FROM sessions") == (1,)
        await store.expire(now=NOW + 1_000, held=(), limit=9)
        assert await sql(store, "SELECT count(*) FROM sessions") == (0,)


async def test_an_operator_who_ends_a_session_that_cannot_be_read_stops_no_server(
    path: Path,
) -> None:
    """END1. The server ends it when it looks, and what an operator asked for after it."""
    async with opened(path) as store:
        bad, good = await new(store), await new(store)
        for each in (bad, good):
            await store._writer.call(  # pyright: ignore[reportPrivateUsage]
                lambda tx, each=each: request_end(tx, each)
            )
        other = sqlite3.connect(path)
        asked = other.execute("SELECT session_id FROM end_requests").fetchall()
        other.close()
        assert {name for (name,) in asked} == {bad, good}
    broken(path, bad)
    async with opened(path) as store:
        assert await store.session_ids() == []
        assert await sql(store, "SELECT count(*) FROM end_requests") == (0,)
