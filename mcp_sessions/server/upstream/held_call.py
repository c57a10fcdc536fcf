"""Hold a call in rounds: which requests belong to it, and what becomes of it.

A request that brings answers is served once, and its answer is given to copies of it as well. An
answer is kept until its call has another round, or for a while. Kept answers are bounded in number
and in bytes, by clients (``core/fair_bound.py``). A large answer is not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.fair_bound import FairBound
from mcp_sessions.core.messages import encode, wire_error
from mcp_sessions.core.named import name_in
from mcp_sessions.errors import OutcomeUnknown
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.upstream.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.port import NotAskable, PeerRequest, UpstreamCall, UpstreamError

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_MOST = 256
"""Messages of one call that wait for its next round, the newest."""

_MOST_BYTES = 65_536
"""Bytes of them together."""


@dataclass(eq=False)
class HeldCall:
    call: CallInRounds
    owner: Hashable
    """Session or principal of the call."""

    what: Hashable
    """Client and object of the call, which each round has to match."""

    cancel: Callable[[], object]
    """Cancels its handler."""

    outcome: asyncio.Future[dict[str, Any]]
    share: Hashable = None
    """Its client's, by which it is bounded."""

    name: str | None = None
    """Its name while it waits for its client. None: it does not."""

    _largest: int = 0
    size: int = 0
    """Bytes of its largest request and its open questions."""

    _said: deque[tuple[str, Mapping[str, Any] | None, int]] = field(
        init=False, default_factory=deque[tuple[str, "Mapping[str, Any] | None", int]]
    )
    """Progress and log messages that its handler sent while no round was open."""

    _is_telling: bool = field(init=False, default=False)

    def keeps(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Keep a message for the next round. False: a round is open, and its client gets it now."""
        if self.name is None and not (self._said or self._is_telling):
            return False
        self._said.append((method, params, len(encode(params))))
        while len(self._said) > _MOST or sum(size for *_, size in self._said) > _MOST_BYTES:
            self._said.popleft()
            logger.warning("a call says much while its client is asked: the oldest is left out")
        return True

    async def tells(self) -> None:
        """Send the newest request what was kept."""
        # What is said meanwhile comes after it.
        self._is_telling = True
        while self._said:
            method, params, _ = self._said.popleft()
            if method == method_names.PROGRESS:
                await self.call.newest.report(params or {})
            else:
                await self.call.newest.notify(method, params)
        self._is_telling = False

    def asked(self, params: Mapping[str, Any] | None, questions: Mapping[str, Any]) -> None:
        self._largest = max(self._largest, len(encode(params or {})))
        self.size = self._largest + len(encode(questions))

    async def ask(self, asked: PeerRequest) -> dict[str, Any]:
        """Ask the client by the answer to its newest request.

        Raises:
            NotAskable: It does not accept the question.
            PeerError: See :meth:`Outbound.send_request`.
        """
        if not self.call.may_ask(asked):
            raise NotAskable(asked.method)
        return await self.call.send_request(asked)

    def ends(self, result: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        if not self.outcome.done():
            if result is not None:
                self.outcome.set_result(result)
            else:
                self.outcome.set_exception(UpstreamError(error or wire_error(OutcomeUnknown())))
        self.call.end()


def what_of(
    call: UpstreamCall, owner: Hashable, method: str, params: Mapping[str, Any] | None
) -> Hashable:
    return call.principal, owner, method, name_in(method, params)


def may_continue(what: Any, begun: Any) -> bool:
    """Whether a request may bring the answers of a call, and get its next answer. One with fewer
    scopes than the call began with may not: a handler answers as it was allowed to (KEY18).
    """
    return what == begun and what[0].scopes >= begun[0].scopes


def new_outcome() -> asyncio.Future[dict[str, Any]]:
    """Return a future whose error nobody has to fetch."""
    outcome: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    outcome.add_done_callback(lambda it: it.cancelled() or it.exception())
    return outcome


KEPT = 65_536
"""Bytes of an answer, at most, that is kept for a client that may never fetch it."""


@dataclass(eq=False)
class _Round:
    name: str
    what: Hashable
    brought: bytes
    cancel: Callable[[], object]
    answer: asyncio.Future[dict[str, Any] | UpstreamError]
    senders: int = 0
    """Requests that wait for the answer."""

    asked: int = 0
    """Requests that waited, or wait."""

    async def answered(self) -> dict[str, Any]:
        """Return the answer. The call is cancelled with the last request that waits for it.

        Raises:
            UpstreamError: The answer. It is a new one each time: a raised error keeps the request
                of its sender in memory.
        """
        self.senders += 1
        self.asked += 1
        try:
            answer = await asyncio.shield(self.answer)
            if isinstance(answer, UpstreamError):
                raise UpstreamError(answer.error)
            return dict(answer)
        except asyncio.CancelledError:
            if self.senders == 1 and not self.answer.done():
                self.cancel()
            raise
        finally:
            self.senders -= 1


class RepeatedRounds:
    """Know the last round of each call.

    Args:
        most: Answers that are kept.
        most_bytes: Bytes of them.
        seconds: Time for which they are kept.
    """

    def __init__(self, *, most: int, most_bytes: int, seconds: float) -> None:
        self._bound, self._seconds = FairBound[str](most=most, most_bytes=most_bytes), seconds
        self._rounds: dict[str, _Round] = {}
        self._last: dict[HeldCall, str] = {}
        self._kept: dict[str, asyncio.TimerHandle] = {}
        """The timer that forgets each answer that is kept."""

        self._background = Background()

    async def copy(
        self, name: str, what: Hashable, answers: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the answer to an equal request. None: there was no request of that name.

        Raises:
            UpstreamError: The answer; or -31012: the request of that name was another one.
        """
        known = self._rounds.get(name)
        if known is None:
            return None
        if not may_continue(what, known.what) or known.brought != _digest(answers):
            raise UpstreamError(wire_error(OutcomeUnknown()))
        return await known.answered()

    async def serve(
        self,
        name: str,
        held: HeldCall,
        answers: Mapping[str, Any],
        turn: Callable[[], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Serve the first request of a name.

        Args:
            turn: Waits for the next answer of the call.

        Raises:
            UpstreamError: The answer.
        """
        loop = asyncio.get_running_loop()
        begun = _Round(name, held.what, _digest(answers), held.cancel, loop.create_future())
        last = self._last.pop(held, None)
        if last is not None:
            # Its client has that answer.
            self._forget(last)
        self._rounds[name] = begun
        self._last[held] = name
        held.outcome.add_done_callback(lambda _: self._last.pop(held, None))
        self._background.run("a round of a call", self._run(begun, held, turn))
        return await begun.answered()

    def answered_once(self, name: str) -> HeldCall | None:
        """Return the call whose last round has that name, if nobody else asked for the answer."""
        known = self._rounds.get(name)
        if known is None or known.asked > 1:
            return None
        return next((held for held, last in self._last.items() if last == name), None)

    async def close(self) -> None:
        await self._background.close()
        for name in list(self._kept):
            self._forget(name)

    async def _run(
        self, begun: _Round, held: HeldCall, turn: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        error = wire_error(OutcomeUnknown())
        result: dict[str, Any] | None = None
        try:
            result = await turn()
        except UpstreamError as failed:
            error = failed.error
        finally:
            begun.answer.set_result(UpstreamError(error) if result is None else result)
            begun.cancel = _nothing
            self._keep(begun.name, held, len(encode(error if result is None else result)))

    def _keep(self, name: str, held: HeldCall, size: int) -> None:
        if size > KEPT:
            self._forget(name)
            return
        loop = asyncio.get_running_loop()
        self._kept[name] = loop.call_later(self._seconds, self._forget, name)
        for gone in self._bound.add(name, held.share, held.owner, size):
            self._forget(gone)

    def _forget(self, name: str) -> None:
        self._rounds.pop(name, None)
        self._bound.remove(name)
        timer = self._kept.pop(name, None)
        if timer is not None:
            timer.cancel()


def _nothing() -> None: ...


def _digest(answers: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(encode(answers)).digest()
