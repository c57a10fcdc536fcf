"""What is in memory is what the file has, whatever was done and whenever it is read again."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.record_changes import RenewEvents, SetFilter, SetWaitsFrom
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.stores.sqlite.file_store import NOW, new, opened

POLICY = SessionPolicy(
    idle_timeout=1_000,
    max_lifetime=5_000,
    max_events=3,
    max_bytes=60,
    max_age=20.0,
    request_key_bytes=500,
    request_key_lifetime=60,
)
ORIGINS = st.sampled_from([None, SessionId("one"), SessionId("two")])
STREAMS = st.sampled_from([EVENTS, EVENTS, GET_STREAM, StreamName("post-1")])
KEYS = st.sampled_from([None, None, "a", "b", "\ud800"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), STREAMS, st.integers(1, 50), KEYS, ORIGINS),
        st.tuples(st.just("read"), STREAMS, st.integers(0, 6), st.none() | st.integers(1, 3)),
        st.tuples(st.just("drop origin"), ORIGINS.filter(lambda origin: origin is not None)),
        st.tuples(st.just("drop stream"), STREAMS.filter(lambda name: name != EVENTS)),
        st.tuples(st.just("carry"), ORIGINS.filter(lambda origin: origin is not None)),
        st.tuples(st.just("begin"), st.integers(0, 5), st.sampled_from([b"this", b"that"])),
        st.tuples(
            st.just("finish"), st.integers(0, 5), st.none() | st.sampled_from([0, 20, 150, 400])
        ),
        st.tuples(st.just("attach"), st.booleans()),
        st.tuples(st.just("subscribe"), st.sampled_from(["a:1", "b:\ud800"])),
        st.tuples(st.just("unsubscribe"), st.sampled_from(["a:1", "b:\ud800"])),
        st.tuples(st.just("filter"), st.frozensets(st.sampled_from(["a:1", "c:1"]))),
        st.tuples(st.just("state"), st.integers(0, 2**70)),
        st.tuples(st.just("data"), st.integers(0, 9)),
        st.tuples(st.just("renew")),
        st.tuples(st.just("wait"), st.sampled_from([1, 10, 21, 61])),
        st.tuples(st.just("forget")),
        st.tuples(st.just("reopen")),
    ),
    max_size=25,
)


class Played:
    """A session, in a store, and what the steps said."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self.of = SessionId("")
        self.epochs: dict[str, int] = {}
        self.data = 0

    async def begin(self, mode: Mode) -> None:
        self.of = await new(self.store, mode)

    def plain(self, value: Any) -> Any:
        """A result without what is drawn at random: epochs by the order in which they came."""
        text = repr(value).replace(self.of, "SESSION")
        for word in sorted({each for each in text.split("'") if len(each.partition("-")[0]) == 19}):
            epoch = word.partition("-")[0]
            text = text.replace(epoch, f"epoch-{self.epochs.setdefault(epoch, len(self.epochs))}")
        return text

    async def step(self, step: Sequence[Any], now: float) -> Any:
        store, of = self.store, self.of
        match step:
            case ("append", stream, int(size), key, origin):
                draft = Draft(b"x" * size, b"y", key, origin)
                return await store.append(of, draft, now=now, stream=stream)
            case ("read", stream, int(behind), limit):
                head = await store.head(of, stream=stream)
                after = head and Position(head.log_epoch, max(head.number - behind, 0)).event_id()
                return await store.read(of, after, now=now, stream=stream, limit=limit)
            case ("drop origin", origin):
                return await store.drop_origin(of, origin)
            case ("drop stream", stream):
                return await store.drop_stream(of, stream)
            case ("carry", origin):
                at = Position(LogEpoch("1"), 7)
                return await store.carry(of, origin, FencingEpoch(3), at)
            case ("begin", int(number), bytes(digest)):
                use = KeyUse(RequestKey(f"kéy-{number}"), digest, "process-1", run="r")
                admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=now, key=use)
                return admitted and (admitted.key, admitted.outcome, admitted.runner, admitted.run)
            case ("finish", int(number), size):
                outcome = None if size is None else b"x" * size
                key = RequestKey(f"kéy-{number}")
                return await store.finish_request(of, key, outcome, now=now)
            case ("attach", bool(there)):
                connection = ConnectionId("here") if there else None
                return await store.attach(of, connection, now=now)
            case ("subscribe", str(uri)):
                return await store.subscribe(of, uri)
            case ("unsubscribe", str(uri)):
                return await store.unsubscribe(of, uri)
            case ("filter", uris):
                return await store.change(of, SetFilter(uris, frozenset({"tools"})))
            case ("state", int(value)):
                record = await store.change_state(of, {"n": value}, ())
                return record and record.state
            case ("data", int(value)):
                done = await store.replace_data(of, {"n": value}, expected_version=self.data)
                self.data += done
                return done
            case ("renew",):
                await store.change(of, SetWaitsFrom(None))
                return await store.change(of, RenewEvents())
            case _:
                return None

    async def whole(self, now: float) -> Any:
        """All that a store says of it."""
        store, of = self.store, self.of
        record = await store.load(of, now=now)
        assert record is not None
        found: list[Any] = [
            record.client.carried,
            sorted(record.client.subscriptions),
            record.client.lists,
            record.fencing_epoch,
            record.state,
            await store.load_data(of),
        ]
        for stream in (EVENTS, GET_STREAM, StreamName("post-1")):
            head = await store.head(of, stream=stream)
            floor = head and Position(head.log_epoch, 0).event_id()
            found += [head, await store.read(of, floor, now=now, stream=stream)]
        return self.plain(found)


async def play(steps: Sequence[Sequence[Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sessions.db"
        model, file = Played(MemoryStore()), Played(SQLiteStore(path))
        for each in (model, file):
            await each.store.open(POLICY)
            await each.begin(Mode.PROTOCOL)
        now = NOW
        try:
            for step in steps:
                match step:
                    case ("wait", int(seconds)):
                        now += seconds
                    case ("forget",):
                        memory: Any = file.store
                        for session in memory._memory.sessions():
                            memory._memory.drop(session)
                    case ("reopen",):
                        # What ran when a process ended is over, and nobody is attached any more.
                        await file.store.close()
                        file.store = SQLiteStore(path)
                        await file.store.open(POLICY)
                        for number in range(6):
                            await model.step(("finish", number, None), now)
                    case _:
                        said = [each.plain(await each.step(step, now)) for each in (model, file)]
                        if step[0] != "attach":
                            assert said[0] == said[1], step
                assert await model.whole(now) == await file.whole(now), step
        finally:
            await model.store.close()
            await file.store.close()


@settings(deadline=None, max_examples=20)
@given(STEPS)
def test_a_file_says_what_the_memory_says(steps: Sequence[Sequence[Any]]) -> None:
    """CUP8, CUP5, COA4, KEY3: also after it was read again, or opened again."""
    asyncio.run(play(steps))


async def test_no_step_reads_through_what_others_have(path: Path) -> None:
    """What a step costs does not grow with sessions, events or keys: each statement finds its rows
    by an index.
    """
    spoken: list[str] = []
    async with opened(path) as store:
        others = [await new(store) for _ in range(3)]
        of, there = others[0], store._memory  # pyright: ignore[reportPrivateUsage]
        writer = store._writer  # pyright: ignore[reportPrivateUsage]
        connection = await writer.call(lambda tx: tx.connection)
        connection.set_trace_callback(spoken.append)
        for _ in range(2):
            use = KeyUse(RequestKey("key"), b"digest", "process-1")
            for key in ("a", "a", None):
                await store.append(of, Draft(b"x", key=key), now=NOW)
            await store.append(of, Draft(b"x"), now=NOW, stream=StreamName("post-1"))
            admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
            assert admitted is not None and admitted.key in (Begun.FIRST, Begun.ANSWERED)
            await store.finish_request(of, use.key, b"x", now=NOW)
            await store.subscribe(of, "a:1")
            await store.attach(of, ConnectionId("here"), now=NOW)
            await store.load_data(of)
            for session in there.sessions():
                there.drop(session)
        await store.expire(now=NOW, held=(), limit=9)
        await store.end(of)
        connection.set_trace_callback(None)
        assert len(spoken) > 30
        for statement in spoken:
            if statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
                for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {statement}"):
                    assert not detail.startswith("SCAN"), (detail, statement)
