"""A request that was sent again elsewhere hears all that it says, and then its answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_sessions.core.message import Message
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.requests import joining
from mcp_sessions.stores.records import Admitted

pytestmark = pytest.mark.anyio


class Elsewhere:
    """One that waits for a run of another process, and what its client hears."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.known = Begun.RUNNING
        self.says_meanwhile: list[bytes] = []
        self.is_alive = True
        self.closed: list[Call] = []
        channel = SimpleNamespace(emit=self._emit, watch=self._nothing)
        inbound = SimpleNamespace(channel=channel, connection=None)
        inbound.error, inbound.answer = self._error, self._answered
        sender: Any = inbound
        waiter = Call(Message(1, "tools/call", None, None), sender)
        begin: Any = self._begin
        bus: Any = SimpleNamespace(is_alive=self._look, tell=self._tell)
        self.join = joining._Join(  # pyright: ignore[reportPrivateUsage]
            bus, waiter, SessionId("s"), RequestKey("k"), "runner", None, begin
        )
        runner: Any = SimpleNamespace(calls=SimpleNamespace(close=self.closed.append))
        locks: Any = None
        self._joining = joining.Joining(bus, runner, self._admit, self._answer, locks)

    async def whole(self) -> None:
        """All of it; the runner is gone by now."""
        self.is_alive = False
        async with asyncio.timeout(5):
            await self._joining._wait(self.join)  # pyright: ignore[reportPrivateUsage]
        assert self.closed == [self.join.waiter]

    async def _begin(self, *_: Any) -> None:
        self.heard.append(b"begun here")

    def _error(self, _: int, error: dict[str, Any]) -> bytes:
        return str(error["code"]).encode()

    async def _answered(self, message: bytes, **_: Any) -> None:
        self.heard.append(message)

    async def _tell(self, *_: Any, **to: str) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    async def step(self, *said: bytes) -> bool:
        """The runner says something; whether the request is answered then."""
        self.join.messages.extend(said)
        self.join.news.set()
        async with asyncio.timeout(5):
            return await self._joining._went_on(self.join, "n")  # pyright: ignore[reportPrivateUsage]

    async def _emit(self, message: bytes) -> None:
        self.heard.append(message)

    async def _look(self, _: str) -> bool:
        return self.is_alive

    async def _admit(self, *_: Any) -> Admitted:
        self.join.messages.extend(self.says_meanwhile)
        self.says_meanwhile = []
        record: Any = None
        return Admitted(record, self.known)

    async def _answer(self, *_: Any) -> None:
        self.heard.append(b"answer")


async def test_the_answer_comes_after_what_was_said_before_it() -> None:
    """The store may have it when the last words are still on their way."""
    there = Elsewhere()
    assert not await there.step(b"1")
    there.known = Begun.ANSWERED
    assert not await there.step(b"2")
    there.join.over(never_began=False)
    assert await there.step(b"3")
    assert there.heard == [b"1", b"2", b"3", b"answer"]


async def test_what_comes_while_the_store_is_asked_is_not_left_out() -> None:
    there = Elsewhere()
    there.known, there.says_meanwhile = Begun.ANSWERED, [b"2"]
    there.join.over(never_began=False)
    assert await there.step(b"1")
    assert there.heard == [b"1", b"2", b"answer"]


async def test_a_runner_that_does_not_say_that_it_is_over_is_waited_for_once() -> None:
    there = Elsewhere()
    there.known = Begun.ANSWERED
    assert not await there.step(b"1")
    assert await there.step()
    assert there.heard == [b"1", b"answer"]


async def test_of_a_runner_that_died_the_answer_is_taken_at_once_and_none_is_unknown() -> None:
    there = Elsewhere()
    there.known, there.is_alive = Begun.ANSWERED, False
    assert await there.step(b"1")
    assert there.heard == [b"1", b"answer"]
    lost = Elsewhere()
    lost.is_alive = False
    with pytest.raises(OutcomeUnknown):
        await lost.step()


async def test_what_was_cancelled_and_never_began_there_does_not_begin_here() -> None:
    there = Elsewhere()
    there.join.over(never_began=True)
    await there.whole()
    assert there.heard == [b"begun here"]

    there = Elsewhere()
    await there.join.abort({"code": -32800, "message": "Request cancelled"})
    there.join.over(never_began=True)
    await there.whole()
    assert there.heard == [b"-32800"]
