"""A request that was repeated at another replica receives all its messages, and then its answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.cluster.relay import Unserved
from mcp_sessions.server.requests import joining
from mcp_sessions.stores.records import Admitted, Peer

FINISHED, NEVER_BEGAN, DEAD = "over", "never began", "dead"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked soon."""
    monkeypatch.setattr(joining, "_ASK_EVERY", 0.05)


class OtherReplicas:
    """One that waits for a run of another process, and what its client receives."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.known = Begun.RUNNING
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.says_meanwhile: list[Any] = []
        self.closed: list[Call] = []
        channel = SimpleNamespace(emit=self._emit, encode=encode, answer=self._answered)
        inbound = SimpleNamespace(
            channel=channel,
            connection=None,
            peer=Peer("2025-11-25"),
            transport="http",
            asked=None,
            audit=None,
        )
        sender: Any = inbound
        waiter = Call(Message(1, "tools/call", None, None), sender)
        begin: Any = self._begin
        bus: Any = SimpleNamespace(is_alive=self._look, try_send=self._try_send)
        relay: Any = SimpleNamespace(bus=bus, ask=self._ask, listens=self._nothing)
        self.join = joining._Join(  # pyright: ignore[reportPrivateUsage]
            bus, waiter, SessionId("s"), RequestKey("k"), "runner", None, begin
        )
        runner: Any = SimpleNamespace(calls=SimpleNamespace(close=self.closed.append))
        locks: Any = None
        self._joining = joining.Joining(relay, runner, self._admit, self._answer, locks)

    async def whole(self, *said: Any) -> None:
        """All of it, if the runner says this."""
        self._say(said)
        async with asyncio.timeout(5):
            await self._joining._wait(self.join)  # pyright: ignore[reportPrivateUsage]
        assert self.closed == [self.join.waiter]

    async def _begin(self, *_: Any) -> None:
        self.received.append("begun here")

    async def _answered(self, message: bytes, *, code: int, **_: Any) -> None:
        assert decode(message)["error"]["code"] == code
        self.received.append(str(code))

    async def _try_send(self, *_: Any, **to: str) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    def _say(self, said: Any) -> None:
        for each in said:
            self.says.put_nowait(each)

    async def step(self, *said: Any) -> bool:
        """The runner says something; whether the request is answered then."""
        self._say(said)
        async with asyncio.timeout(5):
            return await self._joining._step(self.join)  # pyright: ignore[reportPrivateUsage]

    async def _ask(self, _: str, __: object, on_update: Any, **___: Any) -> None:
        while (said := await self.says.get()) != FINISHED:
            if said == NEVER_BEGAN:
                raise Unserved
            if said == DEAD:
                raise OutcomeUnknown
            await on_update({"n": said})

    async def _emit(self, message: bytes, _: object) -> None:
        self.received.append(decode(message)["n"])

    async def _look(self, _: str) -> bool:
        return False

    async def _admit(self, *_: Any) -> Admitted:
        self._say(self.says_meanwhile)
        self.says_meanwhile = []
        record: Any = None
        return Admitted(record, self.known)

    async def _answer(self, *_: Any) -> None:
        self.received.append("answer")


async def test_the_answer_comes_after_what_was_said_before_it() -> None:
    """The store may have it when the last words are still on their way."""
    there = OtherReplicas()
    assert not await there.step(1)
    there.known = Begun.ANSWERED
    assert not await there.step(2)
    assert await there.step(3, FINISHED)
    assert there.received == [1, 2, 3, "answer"]


async def test_what_comes_while_the_store_is_asked_is_not_left_out() -> None:
    there = OtherReplicas()
    there.known, there.says_meanwhile = Begun.ANSWERED, [2, FINISHED]
    assert not await there.step(1)
    assert await there.step()
    assert there.received == [1, 2, "answer"]


async def test_a_runner_that_does_not_say_that_it_has_ended_is_waited_for_once() -> None:
    there = OtherReplicas()
    there.known = Begun.ANSWERED
    assert not await there.step(1)
    assert await there.step()
    assert there.received == [1, "answer"]
    assert there.join.asking is not None
    there.join.asking.cancel()


async def test_of_a_runner_that_died_the_answer_is_taken_at_once_and_none_is_unknown() -> None:
    there = OtherReplicas()
    there.known = Begun.ANSWERED
    assert await there.step(1, DEAD)
    assert there.received == [1, "answer"]
    lost = OtherReplicas()
    with pytest.raises(OutcomeUnknown):
        await lost.step(DEAD)


async def test_what_was_cancelled_and_never_began_there_does_not_begin_here() -> None:
    there = OtherReplicas()
    await there.whole(NEVER_BEGAN)
    assert there.received == ["begun here"]

    there = OtherReplicas()
    await there.join.abort({"code": -32800, "message": "Request cancelled"})
    await there.whole(NEVER_BEGAN)
    assert there.received == ["-32800"]


async def test_half_a_surrogate_pair_reaches_the_process_of_the_client() -> None:
    """Programs cut texts in the middle of a pair, as JavaScript does."""
    said: list[Any] = []

    async def update(message: Any) -> None:
        said.append(message)

    asker: Any = SimpleNamespace(update=update)
    message = {"method": "notifications/message", "params": {"data": "\ud83d"}}
    await joining.RemoteChannel(asker).emit(encode(message))
    assert said == [message]
