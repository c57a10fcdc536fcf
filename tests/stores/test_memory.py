"""What only the store in memory promises: it never suspends, and forgets for good."""

import inspect
import itertools
import tracemalloc
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import BEGINS, Change, Mode, State, after
from mcp_sessions.ids import GET_STREAM, ConnectionId, FencingEpoch, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore

T = TypeVar("T")

ENDED_STATES = frozenset({State.ENDED, State.EXPIRED})

NOW = 1_800_000_000.0
POLICY = SessionPolicy(idle_timeout=100, max_lifetime=1_000)


def now_or_never(call: Coroutine[Any, Any, T]) -> T:
    """What ``call`` returns, if it does so without suspending once."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    call.close()
    raise AssertionError("it suspended")


def opened(policy: SessionPolicy = POLICY) -> SessionStore:
    store = MemoryStore()
    now_or_never(store.open(policy))
    return store


def new_session(store: SessionStore, *, now: float = NOW) -> SessionId:
    call = store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=now)
    return now_or_never(call).session_id


def test_no_method_of_the_store_in_memory_can_suspend() -> None:
    """The fast path does not suspend; each is atomic by that."""
    for name, method in inspect.getmembers(MemoryStore, inspect.iscoroutinefunction):
        source = inspect.getsource(method)
        assert "await " not in source and "async for" not in source, name


def test_the_store_in_memory_works_without_an_event_loop() -> None:
    """It needs none: nothing here waits."""
    store = opened()
    session_id = new_session(store)
    use = KeyUse(RequestKey("key"), b"digest", "process-1")

    assert store.name == "memory" and not store.survives_process
    call = store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=NOW, key=use)
    assert now_or_never(call) is not None
    assert now_or_never(store.append(session_id, Draft(b"{}"), now=NOW)) is not None
    assert now_or_never(store.attach(session_id, ConnectionId("here"), now=NOW)) is not None
    assert now_or_never(store.end(session_id)) is not None
    now_or_never(store.close())


# --- the table of states -------------------------------------------------------------------


def state_of(store: SessionStore, session_id: SessionId) -> State | None:
    """The state as it shows from outside; None: over, one way or the other."""
    record = now_or_never(store.load(session_id, now=NOW))
    if record is None:
        return None
    return State.ATTACHED if record.attachment is not None else State.DETACHED


def happens(store: SessionStore, session_id: SessionId, change: Change) -> bool:
    match change:
        case Change.ATTACH:
            call = store.attach(session_id, ConnectionId("here"), now=NOW)
            return now_or_never(call) is not None
        case Change.DISPLACE:
            return now_or_never(store.attach(session_id, None, now=NOW)) is not None
        case Change.DETACH:
            record = now_or_never(store.load(session_id, now=NOW))
            epoch = record.fencing_epoch if record is not None else FencingEpoch(1)
            now_or_never(store.detach(session_id, epoch))
            return record is not None
        case Change.END:
            return now_or_never(store.end(session_id)) is not None
        case Change.EXPIRE:
            call = store.expire(now=NOW + 1_000, held=(), limit=9)
            return session_id in {record.session_id for record in now_or_never(call)}


@given(st.lists(st.sampled_from(Change), max_size=12))
def test_the_store_in_memory_goes_only_along_the_table(changes: Sequence[Change]) -> None:
    """``core/states.py``: what is not in the table cannot happen (SES18, END1)."""
    store, state = opened(), BEGINS
    session_id = new_session(store)
    for change in changes:
        follows = after(state, change)

        assert happens(store, session_id, change) == (follows is not None)

        state = follows or state
        assert state_of(store, session_id) is (None if state in ENDED_STATES else state)


@pytest.mark.parametrize(
    ("ended", "late"), list(itertools.product([Change.END, Change.EXPIRE], Change))
)
def test_nothing_happens_to_a_session_that_has_ended(ended: Change, late: Change) -> None:
    """SES18, END1: both ways of being over are for ever."""
    store = opened()
    session_id = new_session(store)
    assert happens(store, session_id, ended)

    assert not happens(store, session_id, late)
    assert state_of(store, session_id) is None


# --- memory --------------------------------------------------------------------------------


def used(store: SessionStore, *, now: float) -> SessionId:
    session_id = new_session(store, now=now)
    use = KeyUse(RequestKey("key"), b"digest", "process-1")
    for call in (
        store.admit(session_id, ANONYMOUS, mode=Mode.PROTOCOL, now=now, key=use),
        store.subscribe(session_id, f"note://{session_id}"),
        store.append(session_id, Draft(b"x" * 100, key="k"), now=now),
        store.append(session_id, Draft(b"x" * 100), now=now, stream=GET_STREAM),
        store.attach(session_id, ConnectionId("here"), now=now),
        store.replace_data(session_id, {"n": 1}, expected_version=0),
    ):
        now_or_never(call)
    return session_id


def hundred_sessions_come_and_go(store: SessionStore, by: Change, *, now: float) -> None:
    session_ids = [used(store, now=now) for _ in range(100)]
    if by is Change.EXPIRE:
        now_or_never(store.expire(now=now + 100, held=(), limit=100))
    else:
        for session_id in session_ids:
            now_or_never(store.end(session_id))


def bytes_left(by: Change) -> int:
    """Bytes that stay of 2,000 sessions that were made, used, and have ended."""
    store = opened()
    hundred_sessions_come_and_go(store, Change.EXPIRE, now=NOW)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for cycle in range(20):
            # Deadlines come only where sessions are to expire.
            passed = 200 * (cycle + 1) if by is Change.EXPIRE else 0
            hundred_sessions_come_and_go(store, by, now=NOW + passed)
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not now_or_never(store.all_sessions())
    return left - before


def test_sessions_that_expired_leave_no_memory_behind() -> None:
    """END2: cycles of create and drop without DELETE; the soak has 10,000."""
    assert bytes_left(Change.EXPIRE) < 64 * 1024


def test_sessions_that_ended_leave_no_memory_behind() -> None:
    """END2: "every trace", so not its id until its deadline would have come either."""
    assert bytes_left(Change.END) < 64 * 1024
