"""Join the requests of one modern-era call, which bring the input that its server asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
)
from mcp_sessions.server.upstream.accepted_questions import Askable, accepts
from mcp_sessions.server.upstream.port import (
    REQUEST_TIMEOUT,
    PeerError,
    PeerRequest,
    UpstreamCall,
    UpstreamError,
)


def timed_out() -> PeerError:
    """Its client had the questions, and did not come back."""
    return PeerError(REQUEST_TIMEOUT, "Request timed out")


def call_ended() -> PeerError:
    return PeerError(INVALID_REQUEST, "the request that asks has ended")


@dataclass(eq=False)
class CallInRounds:
    _call: UpstreamCall
    _asks: Askable
    _questions: dict[str, tuple[PeerRequest, asyncio.Future[dict[str, Any]]]] = field(
        init=False,
        default_factory=dict[str, tuple[PeerRequest, "asyncio.Future[dict[str, Any]]"]],
    )
    _count: int = field(init=False, default=0)
    _why: Callable[[], PeerError] | None = field(init=False, default=None)
    """Makes the error of its questions, once it has ended."""

    def __post_init__(self) -> None:
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- for the code that serves its rounds ---------------------------------------------------

    @property
    def newest(self) -> UpstreamCall:
        return self._call

    def may_ask(self, asked: PeerRequest) -> bool:
        return accepts(self._asks, asked.method, asked.params)

    @property
    def has_ended(self) -> bool:
        return self._why is not None

    def carry_on(self, call: UpstreamCall, answers: Mapping[str, Any]) -> None:
        """Take over another request of the same call, with its answers.

        Raises:
            UpstreamError: The answers are malformed. Nothing is answered.
        """
        for answer in answers.values():
            if not isinstance(answer, dict):
                raise UpstreamError(error_body(INVALID_PARAMS, "inputResponses: no result"))
        self._call = call
        self._turn = asyncio.get_running_loop().create_future()
        for name, answer in answers.items():
            _, future = self._questions.pop(name, (None, None))
            if future is not None and not future.done():
                future.set_result(answer)

    async def turn(self) -> dict[str, Any] | None:
        """Wait until the call completes or its server asks, and return the questions."""
        if not self.has_ended and not self._questions:
            await self._turn
        if self.has_ended:
            return None
        return {name: written(asked) for name, (asked, _) in self._questions.items()}

    def end(self, why: Callable[[], PeerError] = call_ended) -> None:
        """Refuse all questions of the call from now on.

        Args:
            why: Makes their error.
        """
        self._why = self._why or why
        for _, future in self._questions.values():
            if not future.done():
                future.set_exception(why())
        self._questions.clear()
        self._news()

    def _news(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)

    # --- for its server -----------------------------------------------------------------------

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        """Ask the client in a result. A client reports no progress of a question in a result."""
        if self._why is not None:
            raise self._why()
        if not self.may_ask(asked):
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
            raise timed_out() from None
        finally:
            self._questions.pop(name, None)
            # Its error has this frame: a cycle, which would keep the request for a while.
            del future

    @property
    def can_send_request(self) -> bool:
        return self._why is None


def written(asked: PeerRequest) -> dict[str, Any]:
    """Write a question as this era does: an elicitation at a URL has no id."""
    if asked.params is None:
        return {"method": asked.method}
    params = {name: it for name, it in asked.params.items() if name != "elicitationId"}
    return {"method": asked.method, "params": params}
