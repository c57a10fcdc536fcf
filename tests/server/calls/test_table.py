"""The table of calls: one id, one load, each entered once and removed once."""

from types import SimpleNamespace
from typing import Any

import pytest

from mcp_sessions.core.message import Message, read
from mcp_sessions.core.messages import SESSION_META, Request
from mcp_sessions.errors import InvalidParams, InvalidRequest, LimitReached
from mcp_sessions.ids import ConnectionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.calls.call import Call, arriving
from mcp_sessions.server.calls.table import Calls

HERE = ConnectionId("here")


class Running:
    """A `Work` that says what is asked of it."""

    def __init__(self, *, is_heard: bool = True) -> None:
        self.is_heard = is_heard
        self.task: Any = object()
        self.aborted: list[dict[str, Any]] = []

    def is_awaited_by(self, call: Call) -> bool:
        """See `Work`."""
        return self.is_heard

    async def abort(self, error: dict[str, Any]) -> None:
        """See `Work`."""
        self.aborted.append(error)


def message(request_id: str | int = 1, meta: Any = None) -> Message:
    """A request with that ``_meta``."""
    params = {"_meta": meta} if meta is not None else None
    return read(Request(request_id, "tools/call", params))


def call(
    request_id: str | int = 1, *, wire: bool = True, is_ours: bool = False, meta: Any = None
) -> Call:
    """It came on a connection whose answers go out on one wire, or on one over HTTP."""
    connection = SimpleNamespace(id=HERE, is_one_wire=wire)
    inbound: Any = SimpleNamespace(principal=ANONYMOUS, connection=connection)
    return arriving(message(request_id, meta), inbound, is_ours=is_ours)


def test_an_id_is_free_again_when_its_call_is_closed() -> None:
    """REQ2."""
    calls, first = Calls(9), call()
    calls.open(first)
    with pytest.raises(InvalidRequest):
        calls.open(call())
    calls.open(call(2))

    calls.close(first)
    calls.open(call())

    assert calls.has(HERE, 1) and calls.has(HERE, 2) and not calls.has(HERE, 3)


def test_over_http_several_calls_share_an_id() -> None:
    """REQ9."""
    calls, same = Calls(9), [call(wire=False) for _ in range(3)]
    for each in same:
        calls.open(each)
    calls.close(same[1])

    assert calls.meant(HERE, 1) == [same[0], same[2]]


def test_a_cancellation_reaches_those_that_are_awaited_else_the_newest() -> None:
    """REQ3."""
    calls, same = Calls(9), [call(wire=False) for _ in range(2)]
    for each in same:
        calls.open(each)
        each.begins(Running(is_heard=each is same[0]))
    assert calls.meant(HERE, 1) == [same[0]]

    same[0].begins(Running(is_heard=False))
    assert calls.meant(HERE, 1) == [same[1]]
    assert calls.meant(HERE, 2) == calls.meant(ConnectionId("other"), 1) == []


@pytest.mark.anyio
async def test_a_call_that_does_not_run_yet_is_cancelled_with_the_one_that_it_follows() -> None:
    calls, before, running = Calls(9), call(), Running(is_heard=False)
    calls.open(before)
    before.begins(running)
    again = call()
    calls.open(again)
    assert again.task is running.task
    error = {"code": 1}

    await again.abort(error)

    assert again.error is error
    assert running.aborted == [error]


def test_a_sender_has_only_so_many_and_a_refused_call_leaves_nothing() -> None:
    """SEC8."""
    calls, first = Calls(1), call(1)
    calls.open(first)
    with pytest.raises(LimitReached):
        calls.open(call(2))
    malformed = call(3, meta={SESSION_META: 1})
    with pytest.raises(InvalidParams):
        calls.open(malformed)
    assert not calls.has(HERE, 2) and not calls.has(HERE, 3)
    # What the layer answers at once is nobody's load.
    calls.open(call(4, is_ours=True), is_ours=True)

    for _ in range(2):
        calls.close(first)
    calls.open(call(2))


def test_a_closed_call_knows_nothing_of_what_ran() -> None:
    calls, first = Calls(9), call()
    calls.open(first)
    first.begins(Running())
    assert len(calls.tasks(HERE)) == len(calls.load) == 1

    calls.close(first)

    assert first.is_over and first.work is first.task is None
    assert not calls.has(HERE) and calls.tasks(HERE) == []
    assert len(calls.load) == 0


def test_without_a_connection_it_is_the_load_of_its_session_or_its_principal() -> None:
    principal = Principal("issuer", "subject")
    lone: Any = SimpleNamespace(principal=principal, connection=None)
    nobody: Any = SimpleNamespace(principal=ANONYMOUS, connection=None)
    named = message(meta={SESSION_META: {"sessionId": "s"}})

    assert arriving(named, nobody).load == "s"
    assert arriving(message(), lone).load == principal
    assert arriving(message(), nobody).load is arriving(message(), lone, is_ours=True).load is None
