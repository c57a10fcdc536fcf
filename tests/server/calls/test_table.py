"""The table of calls: one id, one load, each entered once and removed once."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.message import Message, read
from mcp_sessions.core.messages import SESSION_META, Request
from mcp_sessions.errors import InvalidParams, InvalidRequest, LimitReached
from mcp_sessions.ids import ConnectionId, RequestKey, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.calls.table import Call, Calls, abort

HERE = ConnectionId("here")


class Running:
    """A `Work` that says what is asked of it."""

    def __init__(self, *, is_awaited: bool = True) -> None:
        self.is_awaited = is_awaited
        self.task: Any = object()
        self.aborted: list[dict[str, Any]] = []

    def is_awaited_by(self, call: Call) -> bool:
        return self.is_awaited

    async def abort(self, error: dict[str, Any]) -> None:
        self.aborted.append(error)


def message(request_id: str | int = 1, meta: Any = None) -> Message:
    params = {"_meta": meta} if meta is not None else None
    return read(Request(request_id, "tools/call", params))


def opened(
    calls: Calls[Any],
    request_id: str | int = 1,
    *,
    owner: ConnectionId = HERE,
    wire: bool = True,
    is_ours: bool = False,
    meta: Any = None,
) -> Call:
    """It came on a connection whose answers go out on one wire, or on one over HTTP."""
    connection = SimpleNamespace(id=owner, is_one_wire=wire)
    inbound: Any = SimpleNamespace(principal=ANONYMOUS, connection=connection)
    call = Call(message(request_id, meta), inbound)
    calls.open(call, is_ours=is_ours)
    return call


def test_an_id_is_free_again_when_its_call_is_closed() -> None:
    """REQ2."""
    calls = Calls[Any](9)
    first = opened(calls)
    with pytest.raises(InvalidRequest):
        opened(calls)
    opened(calls, 2)

    calls.close(first)
    opened(calls)

    assert calls.has(HERE, 1) and calls.has(HERE, 2) and not calls.has(HERE, 3)


def test_over_http_several_calls_share_an_id() -> None:
    """REQ9."""
    calls = Calls[Any](9)
    same = [opened(calls, wire=False) for _ in range(3)]
    calls.close(same[1])

    assert calls.meant(HERE, 1) == [same[0], same[2]]


def test_a_cancellation_reaches_those_that_are_awaited_else_the_newest() -> None:
    """REQ3."""
    calls = Calls[Any](9)
    same = [opened(calls, wire=False) for _ in range(2)]
    for each in same:
        each.begins(Running(is_awaited=each is same[0]))
    assert calls.meant(HERE, 1) == [same[0]]

    same[0].begins(Running(is_awaited=False))
    assert calls.meant(HERE, 1) == [same[1]]
    assert calls.meant(HERE, 2) == calls.meant(ConnectionId("other"), 1) == []


async def test_a_call_that_does_not_run_yet_is_cancelled_with_the_one_that_it_follows() -> None:
    calls, running = Calls[Any](9), Running(is_awaited=False)
    before = opened(calls)
    before.begins(running)
    again = opened(calls)
    assert again.task is running.task
    error = {"code": 1}

    await abort(again, error)

    assert again.error is error
    assert running.aborted == [error]


def test_a_sender_has_only_so_many_and_a_refused_call_leaves_nothing() -> None:
    """ERR6."""
    calls = Calls[Any](1)
    first = opened(calls)
    with pytest.raises(LimitReached):
        opened(calls, 2)
    with pytest.raises(InvalidParams):
        opened(calls, 3, meta={SESSION_META: 1})
    assert not calls.has(HERE, 2) and not calls.has(HERE, 3)
    # What the layer answers at once is nobody's load.
    opened(calls, 4, is_ours=True)

    for _ in range(2):
        calls.close(first)
    opened(calls, 2)


def test_a_closed_call_knows_nothing_of_what_ran() -> None:
    calls = Calls[Any](9)
    first = opened(calls)
    first.begins(Running())
    assert len(calls.tasks(HERE)) == len(calls.load) == 1

    calls.close(first)

    assert not first.is_open and first.work is first.task is None
    assert not calls.has(HERE) and calls.tasks(HERE) == []
    assert len(calls.load) == 0


def test_without_a_connection_it_is_the_load_of_its_session_or_its_principal() -> None:
    principal = Principal("issuer", "subject")
    lone: Any = SimpleNamespace(principal=principal, connection=None)
    no_client: Any = SimpleNamespace(principal=ANONYMOUS, connection=None)
    named = message(meta={SESSION_META: {"sessionId": "s"}})

    calls = Calls[Any](1)

    def load(request: Message, inbound: Any, *, is_ours: bool = False) -> Any:
        call = Call(request, inbound)
        calls.open(call, is_ours=is_ours)
        return call.load

    assert load(named, no_client) == "s"
    assert load(message(), lone) == principal
    assert load(message(), lone, is_ours=True) is None
    # Nobody has no bound.
    for _ in range(3):
        assert load(message(), no_client) is None
    assert {*calls.load} == {"s", principal}


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b"]))))
def test_each_sender_has_a_bound_of_its_own_and_who_has_nothing_costs_nothing(
    steps: list[tuple[bool, str]],
) -> None:
    calls, mine = Calls[Any](2), dict[str, list[Call]](a=[], b=[])
    for number, (opens, name) in enumerate(steps):
        owner = ConnectionId(name)
        if opens and not calls.is_full(owner):
            mine[name].append(opened(calls, number, owner=owner))
        elif mine[name]:
            calls.close(mine[name].pop())

        assert calls.is_full(owner) is (len(mine[name]) >= 2)
        assert calls.load == {one: len(of) for one, of in mine.items() if of}


class Busy(Running):
    """A `Run` of one call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.waiters = [call]
        self.session_id = self.keyed_in = SessionId("s")
        self.started_at, self.request = 7.0, call.request
        self.key = RequestKey("k")
        self.sessions = [self.session_id, SessionId("transport")]


def test_what_runs_holds_its_sessions_and_its_key_until_it_ends() -> None:
    """SES14, KEY5. A call that became a task is answered, and still runs in its sessions."""
    calls = Calls[Busy](9)
    first, second = Busy(opened(calls, 1)), Busy(opened(calls, 2))
    for run in (first, second):
        calls.begins(run)
    assert [*calls.running] == [first, second] and {*calls.held} == {"s", "transport"}
    assert first.waiters[0].work is first

    calls.end(first)
    assert [*calls.held[first.session_id]] == [*calls.running] == [second]
    assert calls.by_key(second.session_id, second.key) is second
    assert not calls.has(HERE, 1) and calls.has(HERE, 2)

    calls.end(second, runs_on=True)
    assert calls.by_key(second.session_id, second.key) is None
    assert not calls.has(HERE, 2) and not second.waiters[0].is_open
    assert [*calls.running] == [second] and {*calls.held} == {"s", "transport"}

    calls.handled(second)
    assert not calls.held and not calls.running


def test_the_newest_request_of_a_session_is_known_for_a_while() -> None:
    """An operator asks. Rounds make room, so that a call does not."""
    calls = Calls[Busy](9)
    run = Busy(opened(calls, 1))
    calls.begins(run)
    calls.end(run)
    assert calls.latest_in(run.session_id) == (7.0, run.request.method)

    for _ in range(2):
        for number in range(10_001):
            other = Busy(opened(calls, 2))
            other.sessions = [SessionId(f"session {number}")]
            calls.begins(other)
            calls.end(other)
        calls.round()
    assert calls.latest_in(run.session_id) is None
    assert calls.latest_in(SessionId("session 0")) is not None
