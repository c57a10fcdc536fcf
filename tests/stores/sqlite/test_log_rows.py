"""Logs and request keys as rows do what the core's do, step by step.

The store does not rebuild the core's objects for each call, so their rules are there twice.
Here the two are held next to each other, in whatever order they are called.
"""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.life import Life
from mcp_sessions.core.log import UNBOUNDED, Draft, EventLog, Window
from mcp_sessions.core.request_keys import Begun, KeyState, KeyUse, RequestKeys
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import EVENTS, Position, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.sqlite import log_rows, session_rows
from mcp_sessions.stores.sqlite.key_rows import Keys, keys_of
from mcp_sessions.stores.sqlite.schema import migrate
from mcp_sessions.stores.sqlite.transaction import Transaction

NOW = 1_800_000_000.0
SESSION = SessionId("session")
ORIGINS = st.sampled_from([None, SessionId("one"), SessionId("two")])
COALESCED = st.sampled_from([None, None, "a", "b", "\ud800"])
WINDOWS = st.sampled_from(
    [Window(3, 60, 20.0), Window(5, None, None), Window(None, 40, None), UNBOUNDED]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 50), COALESCED, ORIGINS),
        st.tuples(st.just("read"), st.integers(-2, 12), st.none() | st.integers(1, 3)),
        st.tuples(st.just("drop"), ORIGINS.filter(lambda origin: origin is not None)),
        st.tuples(st.just("wait"), st.sampled_from([1, 10, 21])),
    ),
    max_size=25,
)


@contextmanager
def a_session(policy: SessionPolicy | None = None) -> Generator[tuple[Transaction, int]]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    tx = Transaction(connection)
    record = SessionRecord(SESSION, Mode.PROTOCOL, ANONYMOUS, Life(NOW, NOW + 10, NOW + 100))
    session_rows.create(tx, record, policy or SessionPolicy())
    found = session_rows.record_of(tx, SESSION)
    assert found is not None
    yield tx, found[0]
    connection.close()


@given(WINDOWS, STEPS)
def test_a_log_of_rows_is_an_event_log(window: Window, steps: list[tuple[Any, ...]]) -> None:
    """CUP10, CUP6, COA6, ATT7: window, floor, coalescing, origins and pages, one by one."""
    with a_session() as (tx, sid):
        log = log_rows.opened(tx, sid, EVENTS)
        model = EventLog(log.log_epoch, window)
        now = NOW
        for step in steps:
            match step:
                case ("append", int(size), key, origin):
                    draft = Draft(b"x" * size, b"y", key, origin)
                    replaces = model.would_replace(draft)
                    appended = log_rows.append(tx, log, draft, window, now=now)
                    assert appended == (model.append(draft, now=now), replaces)
                case ("read", int(behind), limit):
                    number = max(model.head.number - behind, 0)
                    position = Position(log.log_epoch, number).event_id()
                    read = log_rows.since_id(tx, log, position, window, now=now, limit=limit)
                    assert read == model.since_id(position, now=now, limit=limit)
                case ("drop", str(origin)):
                    model.drop_origin(SessionId(origin))
                    log_rows.drop_origin(tx, log, SessionId(origin))
                case ("wait", int(seconds)):
                    now += seconds
                case _:
                    raise AssertionError(step)
            found = log_rows.find(tx, sid, EVENTS)
            assert found == log, "what is in memory for the call is what is in the file"
            assert (log.position, log.events, log.bytes) == (model.head, len(model), model.size)
            assert log.floor == model.floor.number


KEY_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("begin"), st.integers(0, 5), st.sampled_from([b"this", b"this", b"that"])
        ),
        st.tuples(
            st.just("finish"), st.integers(0, 5), st.none() | st.sampled_from([0, 20, 150, 400])
        ),
        st.tuples(st.just("wait"), st.sampled_from([1, 30, 61])),
    ),
    max_size=30,
)


def keys_of_session(tx: Transaction, policy: SessionPolicy) -> Keys:
    found = keys_of(tx, SESSION, policy)
    assert found is not None
    return found


@given(KEY_STEPS)
def test_keys_of_rows_are_request_keys(steps: list[tuple[Any, ...]]) -> None:
    """KEY3: what is known, what is dropped for room, and what is refused, one by one."""
    policy = SessionPolicy(request_key_bytes=500, request_key_lifetime=60)
    with a_session(policy) as (tx, _):
        model = RequestKeys(max_bytes=500, lifetime=60)
        now = NOW
        for step in steps:
            keys = keys_of_session(tx, policy)
            match step:
                case ("begin", int(number), bytes(digest)):
                    use = KeyUse(RequestKey(f"kéy-{number}"), digest, "process-1")
                    expected, entry = model.begin(use, now=now)
                    begun, outcome, *_ = keys.begin(use, now=now)
                    assert begun is expected
                    kept = entry is not None and entry.state is KeyState.ANSWERED
                    if begun.value == "answered":
                        assert kept and entry is not None and outcome == entry.outcome
                    else:
                        assert outcome is None
                case ("finish", int(number), size):
                    outcome = None if size is None else b"x" * size
                    key = RequestKey(f"kéy-{number}")
                    assert keys.finish(key, outcome, now=now) == model.finish(key, outcome, now=now)
                case ("wait", int(seconds)):
                    now += seconds
                case _:
                    raise AssertionError(step)
            # What is known without reading is what is read.
            known = keys_of_session(tx, policy).counts
            tx.learn(SESSION, None)
            read = keys_of_session(tx, policy).counts
            assert (known.bytes, known.answers, known.oldest) == (
                read.bytes, read.answers, read.oldest,
            )  # fmt: skip
            assert known.bytes == model.size <= 500
            # What had the highest numbers may be forgotten: only their order counts.
            assert read.finished <= known.finished
            if read.answers:
                assert known.dropped <= read.dropped


def test_no_call_reads_through_what_a_session_has() -> None:
    """What a call costs does not grow with events, keys or sessions: each statement of the
    calls that are made all the time finds its rows by an index. One that did not made the
    end of a keyed request slower with each one that had ended before.
    """
    policy = SessionPolicy()
    spoken = list[str]()
    with a_session(policy) as (tx, sid):
        # Once in a process the keys of a session are added up.
        keys_of_session(tx, policy)
        connection = tx.connection
        connection.set_trace_callback(spoken.append)
        log = log_rows.opened(tx, sid, EVENTS)
        window = Window(2, 60, 20.0)
        for _ in range(4):
            log_rows.append(tx, log, Draft(b"x", key="a"), window, now=NOW)
            log_rows.append(tx, log, Draft(b"x"), window, now=NOW)
        log_rows.since_id(tx, log, log.position.event_id(), window, now=NOW)
        use = KeyUse(RequestKey("key"), b"digest", "process-1")
        assert keys_of_session(tx, policy).begin(use, now=NOW)[0] is Begun.FIRST
        assert keys_of_session(tx, policy).finish(use.key, b"x", now=NOW)
        session_rows.brief(tx, SESSION)
        session_rows.record_of(tx, SESSION)
        session_rows.subscribe(tx, sid, "a:1", policy)
        session_rows.expire(
            tx, now=NOW, held=(), deadlines={SESSION: NOW + 9}, policy=policy, limit=9
        )
        connection.set_trace_callback(None)
        assert len(spoken) > 30
        for statement in spoken:
            for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {statement}"):
                assert not detail.startswith("SCAN"), (detail, statement)
        # Nor all rows of one session, to look for a few.
        for statement in (each for each in spoken if " keys " in each and "finished" in each):
            plan = " ".join(
                row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")
            )
            assert "(sid=?)" not in plan or "keys_by_end" in plan, (plan, statement)


def test_a_session_that_is_full_is_as_quick_as_one_that_is_not() -> None:
    """Once the oldest answers go for each new one, those that went before cost nothing: the
    same few steps of SQLite's machine after a hundred calls and after a thousand.
    """
    answer = b"x" * 2_000
    policy = SessionPolicy(request_key_bytes=300_000)
    with a_session(policy) as (tx, _):
        connection, steps = tx.connection, [0]

        def count() -> int:
            steps[0] += 1
            return 0

        def call(number: int) -> int:
            """How many steps a whole call takes."""
            use = KeyUse(RequestKey(f"key-{number:04}"), b"digest", "process-1")
            steps[0] = 0
            assert keys_of_session(tx, policy).begin(use, now=NOW)[0] is Begun.FIRST
            assert keys_of_session(tx, policy).finish(use.key, answer, now=NOW)
            return steps[0]

        connection.set_progress_handler(count, 1)
        spent = [call(number) for number in range(1_200)]
        gone = tx.execute("SELECT count(*) FROM keys WHERE outcome IS NULL").fetchone()[0]
        assert gone > 1_000
        assert max(spent[1_100:]) <= 2 * max(spent[200:300])
