"""Questions of a server with a handshake to clients of the modern era: results that need input.

Rules:

1. A call is made once. What the server asks meanwhile is the result of the client's request; the
   call waits for the request that brings the answers, which goes on with it.
2. What names it there is random, and used once. It opens nothing to another principal, in another
   session, or for another request; who brings it too late hears -31012.
3. A call whose client does not come back is cancelled: after a while, or where too many wait.
4. A client that is away keeps neither room nor questions from others. Outside of sessions the calls
   of one principal that wait are fewer than the children that it may keep busy (``sharing.py``).
   The oldest is given up if somebody needs its room and it waited for :data:`AWAY` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.trace import Span

from mcp_sessions.background import Background
from mcp_sessions.core.messages import RequestId, encode, error_body, members_of, wire_error
from mcp_sessions.core.unheard import Unheard
from mcp_sessions.errors import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    OutcomeUnknown,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.upstream.external.asks import Asks
from mcp_sessions.server.upstream.external.modern import NAMED
from mcp_sessions.server.upstream.port import Call, PeerError, PeerRequest, UpstreamError

logger = logging.getLogger(__name__)

_PREFIX: Final = "mcp-sessions-call:"
"""Of a ``requestState``: the rest names a call that waits here."""

_PASSED: Final = "mcp-sessions-passed:"
"""Before a ``requestState`` of the server's own that begins as one of these: it is behind another
layer."""

_KEPT: Final = 65_536
"""Bytes of a result that is kept for a client that was asked, and may never come for it."""

AWAY: Final = 60.0
"""Seconds in which a client that was asked comes back, whoever needs the room of its call."""

_CANCELLING: Final = 5.0
"""Seconds that the cancellation of a call has."""

_NEEDS: Final = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}
"""What a client can be asked in a result → what it has to declare for that."""


def waiting_call(params: Mapping[str, Any] | None) -> str | None:
    """What names the call that a request goes on with; None: it begins one."""
    state: object = (params or {}).get("requestState")
    is_ours = isinstance(state, str) and state.startswith(_PREFIX)
    return state.removeprefix(_PREFIX) if isinstance(state, str) and is_ours else None


def set_apart(result: dict[str, Any]) -> dict[str, Any]:
    """A server's result, whose ``requestState`` nobody takes for one of this layer's."""
    state: object = result.get("requestState")
    if not (isinstance(state, str) and state.startswith((_PREFIX, _PASSED))):
        return result
    return {**result, "requestState": _PASSED + state}


def put_back(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request's params, with the ``requestState`` that :func:`set_apart` was given."""
    state: object = (params or {}).get("requestState")
    if not (isinstance(state, str) and state.startswith(_PASSED)):
        return params
    return {**(params or {}), "requestState": state.removeprefix(_PASSED)}


@dataclass(eq=False)
class CallInRounds:
    """A :class:`~mcp_sessions.server.upstream.port.Call` that several requests belong to, one after
    the other: its way back is the newest one's.
    """

    _call: Call
    _asks: Asks
    _questions: dict[str, tuple[PeerRequest, asyncio.Future[dict[str, Any]]]] = field(
        init=False,
        default_factory=dict[str, tuple[PeerRequest, "asyncio.Future[dict[str, Any]]"]],
    )
    _count: int = field(init=False, default=0)
    _is_over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.request_id: RequestId | None = self._call.request_id
        """See :class:`Call`."""

        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- for those who serve its rounds -------------------------------------------------------

    def carry_on(self, call: Call, answers: Mapping[str, Any]) -> None:
        """Another request brings answers, and has the way back from now on.

        Raises:
            UpstreamError: They are malformed. Nothing is answered.
        """
        for answer in answers.values():
            if not isinstance(answer, dict):
                raise UpstreamError(error_body(INVALID_PARAMS, "inputResponses: no result"))
        self._call, self.request_id = call, call.request_id
        self._turn = asyncio.get_running_loop().create_future()
        for name, answer in answers.items():
            _, future = self._questions.pop(name, (None, None))
            if future is not None and not future.done():
                future.set_result(answer)

    async def turn(self) -> dict[str, Any] | None:
        """Wait until it is over, or its server asks; what it asks."""
        if not self._is_over and not self._questions:
            await self._turn
        if self._is_over:
            return None
        return {
            name: {"method": asked.method}
            | ({"params": dict(asked.params)} if asked.params is not None else {})
            for name, (asked, _) in self._questions.items()
        }

    def end(self) -> None:
        """Nothing is asked on its behalf any more."""
        self._is_over = True
        for _, future in self._questions.values():
            if not future.done():
                future.set_exception(_over())
        self._questions.clear()
        self._news()

    def _news(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)

    # --- for its server -----------------------------------------------------------------------

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """See :class:`Outbound`. Of its progress a client does not report in a result."""
        if self._is_over:
            raise _over()
        if _NEEDS.get(asked.method) not in self._asks:
            raise PeerError(METHOD_NOT_FOUND, "Method not found", asked.method)
        self._count += 1
        name = str(self._count)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[name] = asked, future
        self._news()
        try:
            async with asyncio.timeout(asked.timeout):
                return await future
        except TimeoutError:
            raise PeerError(INVALID_REQUEST, "no answer in time") from None
        finally:
            self._questions.pop(name, None)

    @property
    def can_send_request(self) -> bool:
        """See :class:`Call`."""
        return not self._is_over

    @property
    def context(self) -> Any:
        """See :class:`Call`."""
        return self._call.context

    @property
    def transport(self) -> str:
        """See :class:`Call`."""
        return self._call.transport

    @property
    def close_stream(self) -> Callable[[], Awaitable[None]] | None:
        """See :class:`Call`."""
        return self._call.close_stream

    @property
    def close_standalone_stream(self) -> Callable[[], Awaitable[None]] | None:
        """See :class:`Call`."""
        return self._call.close_standalone_stream

    @property
    def session(self) -> str | None:
        """See :class:`Call`."""
        return self._call.session

    @property
    def conversation(self) -> str | None:
        """See :class:`Call`."""
        return self._call.conversation

    @property
    def principal(self) -> Principal:
        """See :class:`Call`."""
        return self._call.principal

    @property
    def bound_session(self) -> SessionId | None:
        """See :class:`Call`."""
        return self._call.bound_session

    @property
    def store_failure(self) -> StoreUnavailable | None:
        """See :class:`~mcp_sessions.server.upstream.port.Call`: no handler of it is here."""
        return None

    def store_failed(self, failed: StoreUnavailable) -> None:
        """See :class:`~mcp_sessions.server.upstream.port.Call`."""

    def is_traced(self, span: Span) -> None:
        """See :class:`Call`."""
        self._call.is_traced(span)

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        """See :class:`Call`."""
        await self._call.notify(method, params)

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """See :class:`Call`."""
        await self._call.progress(progress, total, message)

    async def report(self, params: Mapping[str, Any]) -> None:
        """See :class:`Call`."""
        await self._call.report(params)


@dataclass(eq=False)
class _Held:
    """A call in rounds, and what becomes of it."""

    call: CallInRounds
    whose: Hashable
    """Its session, or its principal."""

    what: Hashable
    """Whose it is, and what is called."""

    task: asyncio.Task[None]
    outcome: asyncio.Future[dict[str, Any]]


class Rounds:
    """The calls of one layer whose clients are asked in results.

    Args:
        policy: What may run on unheard: here, between two rounds.
        room: Children that one principal may have.
        process: This one, if an answer may come to others.
    """

    def __init__(self, policy: SessionPolicy, room: int, process: str | None) -> None:
        self._process = process
        self._patience = policy.detached_timeout
        self._waiting: dict[str, tuple[_Held, asyncio.TimerHandle]] = {}
        """Between two rounds, by what names them."""

        self._bound = Unheard[str](
            most=policy.max_detached_requests,
            most_of_one=min(policy.max_detached_requests_per_session, max(1, room // 2 - 1)),
        )
        self._background = Background()

    async def serve(
        self,
        call: Call,
        whose: Hashable,
        asks: Asks,
        method: str,
        params: dict[str, Any] | None,
        work: Callable[[Call], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Serve a request of a modern client: as a call of its own, or as another round of one.

        Args:
            whose: Its session, or its principal.
            asks: What its client can be asked; empty: nothing.
            work: Makes the call; not asked where it was made before.

        Raises:
            UpstreamError: The call's error; -31012: it was one, and is none any more.
        """
        named: object = (params or {}).get(NAMED.get(method, ""))
        what = (call.principal, whose, method, named if isinstance(named, str) else None)
        name = waiting_call(params)
        if name is not None:
            held = self._resumed(name, what)
            try:
                held.call.carry_on(call, members_of((params or {}).get("inputResponses")))
            except UpstreamError:
                self._wait(held, name)
                raise
        elif asks and method in NAMED:
            held = self._begun(CallInRounds(call, asks), whose, what, work)
        else:
            return await work(call)
        try:
            questions = await held.call.turn()
        except asyncio.CancelledError:
            held.task.cancel()
            raise
        if questions is None:
            return await held.outcome
        name = mint_request_id(self._process)
        self._wait(held, name)
        return {
            "resultType": "input_required",
            "inputRequests": questions,
            "requestState": _PREFIX + name,
        }

    async def give_up_oldest(self, of: Principal | None) -> bool:
        """Somebody needs the room of the oldest call outside of sessions whose client is away.

        Args:
            of: Whose; None: anybody's.

        Returns:
            Whether there was one, and is none any more.
        """
        now = asyncio.get_running_loop().time()
        for name, (held, timer) in self._waiting.items():
            if now - (timer.when() - self._patience) < AWAY:
                return False
            if isinstance(held.whose, Principal) and of in (None, held.whose):
                self._give_up(name)
                await asyncio.wait({held.task}, timeout=_CANCELLING)
                return True
        return False

    async def close(self) -> None:
        """None of them goes on."""
        for _, timer in self._waiting.values():
            timer.cancel()
        await self._background.close()

    def _begun(
        self,
        call: CallInRounds,
        whose: Hashable,
        what: Hashable,
        work: Callable[[Call], Awaitable[dict[str, Any]]],
    ) -> _Held:
        outcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # Nobody may come for it.
        outcome.add_done_callback(lambda it: it.cancelled() or it.exception())
        task = self._background.run("a call in rounds", _make(call, work, outcome))
        return _Held(call, whose, what, task, outcome)

    def _resumed(self, name: str, what: Hashable) -> _Held:
        waiting = self._waiting.get(name)
        if waiting is None or waiting[0].what != what:
            raise UpstreamError(wire_error(OutcomeUnknown()))
        held, timer = waiting
        timer.cancel()
        del self._waiting[name]
        self._bound.remove(name)
        return held

    def _wait(self, held: _Held, name: str) -> None:
        """Its client has what it needs to go on."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._patience, self._give_up, name)
        self._waiting[name] = held, timer
        given_up = self._bound.add(name, held.call.principal, held.whose)
        if given_up is not None:
            self._give_up(given_up)
        held.outcome.add_done_callback(lambda outcome: self._ended(name, outcome))

    def _ended(self, name: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        """Its server did not wait for the answers."""
        if name not in self._waiting or outcome.exception() is not None:
            return
        if len(encode(outcome.result())) > _KEPT:
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        held, timer = self._waiting.pop(name)
        timer.cancel()
        self._bound.remove(name)
        logger.warning("a call whose client was asked and did not come back is cancelled")
        held.task.cancel()


async def _make(
    call: CallInRounds,
    work: Callable[[Call], Awaitable[dict[str, Any]]],
    outcome: asyncio.Future[dict[str, Any]],
) -> None:
    try:
        outcome.set_result(await work(call))
    except Exception as failed:
        # The boundary to whoever asks for it: that is where it is raised.
        outcome.set_exception(failed)
    finally:
        if not outcome.done():
            outcome.set_exception(UpstreamError(wire_error(OutcomeUnknown())))
        call.end()


def _over() -> PeerError:
    return PeerError(INVALID_REQUEST, "the request that asks is over")
