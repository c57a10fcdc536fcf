"""What only the store in a file promises: it comes back, is bounded, and says what is wrong."""

import asyncio
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import (
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    RequestKey,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.record_changes import SetCurrent, SetFilter, SetStreamOpened, SetWaitsFrom
from mcp_sessions.stores.records import CurrentSession, Peer
from mcp_sessions.stores.sqlite import schema as sqlite_schema
from mcp_sessions.stores.sqlite import served_file
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.testing.parts import change_of, subscribers_of
from tests.stores.sqlite.file_store import (
    NOW,
    POLICY,
    new,
    opened,
    refusal_of,
    sql,
)

HERE = ConnectionId("here")


# --- coming back ---------------------------------------------------------------------------


async def test_everything_of_a_session_comes_back(path: Path) -> None:
    """Also what JSON can say and SQLite's text or orjson cannot."""
    principal = Principal("client", "https://issuer", "älice\ud800", frozenset({"b", "a"}), 5.5)
    peer = Peer("2025-11-25", {"capabilities": {"x": 2**70}}, modern=False)
    async with opened(path) as store:
        made = await store.create(Mode.TRANSPORT, principal, peer=peer, now=NOW)
        of = made.session_id
        await store.attach(of, ConnectionId(of), now=NOW)
        await store.change(of, SetCurrent(CurrentSession(SessionId("other"), FencingEpoch(7))))
        await store.change(of, SetStreamOpened())
        await store.subscribe(of, "note://\ud800")
        await store.change_state(of, {"big": 2**80, "lone": "\ud800", "list": [1, None]}, ())
        assert await store.replace_data(of, {"deep": {"n": 2**64}}, expected_version=0)
        head = await store.open_stream(of, GET_STREAM)
        assert head is not None
        await store.carry(of, SessionId("other"), FencingEpoch(7), head)
        await store.change(of, SetWaitsFrom(head.event_id()))
        await store.change(of, SetFilter(frozenset({"note://\ud800", "b:1"}), frozenset({"tools"})))
        for key in ("a", None, "a\ud800"):
            await store.append(of, Draft(b"{}", key=key, origin=of), now=NOW, stream=GET_STREAM)
        before = await store.load(of, now=NOW)
        events = await store.read(of, head.event_id(), now=NOW, stream=GET_STREAM)
        data = await store.load_data(of)
    async with opened(path) as store:
        assert await store.load(of, now=NOW) == before
        assert await store.all_sessions(principal) == [before]
        assert await store.read(of, head.event_id(), now=NOW, stream=GET_STREAM) == events
        assert await store.load_data(of) == data
        assert await subscribers_of(store, "note://\ud800") == [of]
        assert await store.relay(
            of, SessionId("other"), FencingEpoch(7), events[0][0], now=NOW
        ) == await_relayed(4)


def await_relayed(number: int) -> Any:
    """Equal to a ``Relayed`` whose event has that number."""

    class Same:
        def __eq__(self, other: object) -> bool:
            event = getattr(other, "event", None)
            return event is not None and event.number == number

    return Same()


async def test_only_connections_that_can_come_back_are_attached_after_a_start(path: Path) -> None:
    """A transport-mode session is in the file, its client comes back to it; a WebSocket, a
    pipe or a listen stream of the process before is gone, and must not keep others away.
    """
    async with opened(path) as store:
        connection = await new(store, Mode.TRANSPORT)
        on_http, on_pipe = await new(store), await new(store)
        await store.attach(on_http, ConnectionId(connection), now=NOW)
        await store.attach(on_pipe, ConnectionId("stdio-x"), now=NOW)
    async with opened(path) as store:
        kept, freed = [await store.load(each, now=NOW) for each in (on_http, on_pipe)]
        assert kept is not None and kept.attachment is not None
        assert kept.attachment.connection_id == connection
        assert freed is not None and (freed.attachment, freed.fencing_epoch) == (None, 1)
        assert await store.attach(on_pipe, HERE, now=NOW, only_if_free=True) is not None


async def test_what_ran_at_the_end_is_never_run_again_and_its_key_is_not_kept_for_ever(
    path: Path,
) -> None:
    """KEY3: its runner is gone, so nobody can know how it ended."""
    policy = SessionPolicy(request_key_lifetime=50, request_key_bytes=200)
    use = KeyUse(RequestKey("key"), b"digest", "process-1")
    async with opened(path, policy=policy) as store:
        of = await new(store)
        admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
        assert admitted is not None and admitted.key is Begun.FIRST
    async with opened(path, policy=policy) as store:
        for now, begun in ((NOW + 50, Begun.DROPPED), (NOW + 51, Begun.FIRST)):
            admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=now, key=use)
            assert admitted is not None and admitted.key is begun
        assert not await store.finish_request(of, RequestKey("other"), b"x", now=NOW)


async def test_a_key_that_was_forgotten_is_a_new_one_in_the_file_too(path: Path) -> None:
    """KEY12: its row was there until the step that records it anew."""
    policy = SessionPolicy(request_key_lifetime=50)
    key = RequestKey("key")

    async def begun(store: SQLiteStore, digest: bytes, now: float) -> Begun | None:
        use = KeyUse(key, digest, "process-1")
        admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=now, key=use)
        assert admitted is not None
        return admitted.key

    async with opened(path, policy=policy) as store:
        of = await new(store)
        assert await begun(store, b"one", NOW) is Begun.FIRST
        assert await store.finish_request(of, key, b"one", now=NOW)
        assert await begun(store, b"another", NOW + 51) is Begun.FIRST
        rows = await sql(store, "SELECT count(*) FROM keys WHERE finished IS NULL")
        assert rows == (1,), "it runs"
        assert await store.finish_request(of, key, b"another", now=NOW + 52)
    async with opened(path, policy=policy) as store:
        assert await begun(store, b"another", NOW + 53) is Begun.ANSWERED


async def test_many_sessions_are_listed_in_pages_that_let_others_through(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once; also where pages end exactly with the last one, or the owner's are few."""
    monkeypatch.setattr("mcp_sessions.stores.sqlite.file_reads._PAGE", 3)
    alice = Principal("client", "https://issuer", "alice")
    async with opened(path) as store:
        made = [await new(store, principal=(ANONYMOUS, alice)[n % 2]) for n in range(12)]
        for count in (12, 11, 10):
            listed = [record.session_id for record in await store.all_sessions()]
            assert listed == made[:count]
            of_alice = [record.session_id for record in await store.all_sessions(alice)]
            assert of_alice == made[1:count:2]
            await store.end(made[count - 1])
        many = asyncio.ensure_future(store.all_sessions())
        await store.head(made[0])
        assert not many.done(), "who comes later waits for one page, not for all"
        await many


# --- bounds --------------------------------------------------------------------------------


async def test_what_expired_leaves_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded size: not only the rows go, the space does."""
    monkeypatch.setattr("mcp_sessions.stores.sqlite.writer.IDLE", 0.01)
    async with opened(path) as store:
        for _ in range(20):
            of = await new(store)
            await asyncio.gather(
                *[store.append(of, Draft(b"x" * 20_000), now=NOW) for _ in range(20)]
            )
        assert len(await store.expire(now=NOW + 100, held=(), limit=99)) == 20
        async with asyncio.timeout(20):
            # Another thread's work, which it does by itself.
            while (await sql(store, "PRAGMA page_count"))[0] > 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert path.stat().st_size < 1_000_000
    assert {each.name for each in path.parent.iterdir()} == {
        path.name,
        f"{path.name}-lock",
        f"{path.name}-seen",
    }


async def test_what_ended_cannot_be_read_out_of_the_file(path: Path) -> None:
    """Free space is overwritten."""
    async with opened(path) as store:
        of = await new(store)
        await store.append(of, Draft(b"the-secret-of-a-session"), now=NOW)
        await store.end(of)
    assert b"the-secret" not in path.read_bytes()
    assert of.encode() not in path.read_bytes()


async def test_only_its_owner_can_read_the_file(path: Path) -> None:
    """Session ids are in it: credentials, where there is no other."""
    before = os.umask(0)
    try:
        async with opened(path) as store:
            await new(store)
            for each in path.parent.iterdir():
                assert stat.S_IMODE(each.stat().st_mode) == 0o600, each.name
    finally:
        os.umask(before)


async def test_who_gives_up_while_the_file_is_opened_leaves_it_to_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock goes after the thread: two never serve from one file."""
    begin, go_on = threading.Event(), threading.Event()
    start_up = served_file.start_up

    def slow(*arguments: Any) -> None:
        begin.set()
        assert go_on.wait(10)
        start_up(*arguments)

    monkeypatch.setattr(served_file, "start_up", slow)
    store = SQLiteStore(path)
    opening = asyncio.ensure_future(store.open(POLICY))
    assert await asyncio.to_thread(begin.wait, 10)
    opening.cancel()
    await asyncio.sleep(0)
    assert f"in use by process {os.getpid()}" in await refusal_of(path)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    threads = {thread.name for thread in threading.enumerate()}
    assert "mcp-sessions-sqlite" not in threads
    monkeypatch.undo()
    async with opened(path) as after:
        assert await new(after)


async def test_an_operators_command_copies_no_log(path: Path) -> None:
    """Rule 5 of the writer: the next commit would sync, wherever it is made."""
    async with opened(path):
        connection = sqlite_schema.open_for_operator(path)
        assert connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)
        connection.close()


async def test_a_path_may_be_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.db")
    async with opened(path) as store:
        of = await new(store)
        assert await store.append(of, Draft(b"{}"), now=NOW) is not None
    assert path.exists()


async def test_an_old_sqlite_is_said_to_be_too_old(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_schema, "LEAST_SQLITE", (99, 0, 0))
    assert "99.0.0 is needed" in await refusal_of(path)
    assert not path.exists()


async def test_one_process_serves_from_a_file_once(path: Path) -> None:
    """The same answer to a second store of this process, which its lock would admitted."""
    async with opened(path) as store:
        assert f"in use by process {os.getpid()}" in await refusal_of(path)
        assert await new(store)
    async with opened(path):
        pass


async def test_a_store_that_is_not_open_says_so(path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="not open"):
        await SQLiteStore(path).head(SessionId("x"))
    async with opened(path) as store:
        pass
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.append(SessionId("x"), Draft(b"{}"), now=NOW, stream=StreamName("s"))


async def test_sessions_that_expire_and_get_a_change_at_once_wait_for_nobody_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take turns of several sessions. A step of one of them ends in the very turn of the event
    loop in which the round goes on: its turn is free, and the change waits for it.
    """
    ids: list[SessionId] = []
    async with opened(path) as store:
        # The file has them in another order than that of their ids.
        while len(ids) < 2 or ids[0] < ids[1]:
            ids = [*ids[-1:], await new(store)]
    async with opened(path) as store:
        turn = store._turns.of(ids[1])  # pyright: ignore[reportPrivateUsage]
        await turn.acquire()
        change = change_of(listed="tools")
        telling = asyncio.create_task(store.append_change(ids, change, now=NOW))
        were_written = store._were_written  # pyright: ignore[reportPrivateUsage]

        def step_ends(moved: Any) -> None:
            were_written(moved)
            if turn.locked():
                turn.release()

        monkeypatch.setattr(store, "_were_written", step_ends)
        async with asyncio.timeout(10):
            await store.expire(now=NOW + 1_000, held=(), limit=9)
            await telling
            await store.expire(now=NOW + 1_000, held=(), limit=9)
        assert not await store.all_sessions()
