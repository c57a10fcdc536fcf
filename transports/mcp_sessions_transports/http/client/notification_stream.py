"""Read what a server says on its notification stream, or on the response of a request.

`NotificationStream` keeps the GET open. A
stream that was open and broke is opened again soon, with ``Last-Event-ID``. If that fails, the
server or the way to it is away: the client is informed, and reconnects by another link. A stream
that was never open is no sign of that: a proxy before the server may block it. `Incoming` hands
over what was read, and what is known of dropped messages.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio

from mcp_sessions.client.dialer import (
    Event,
    Failure,
    Missed,
    Received,
    StreamBroke,
    StreamFailed,
    StreamReopened,
    StreamUnsure,
)
from mcp_sessions.client.messages import instead_of_dropped, received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.messages import Json, RequestId
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import FailureCause, is_away
from mcp_sessions.errors import OUTCOME_UNKNOWN
from mcp_sessions.http_client.exchange import FAILURES, events_of
from mcp_sessions.http_client.session import is_sse
from mcp_sessions.http_client.sse_reader import EventTooLarge, Position, ReadEvent
from mcp_sessions_transports.http.client.failures import describe, refusal
from mcp_sessions_transports.http.client.requester import Requester

logger = logging.getLogger(__name__)

STOCK_ATTEMPTS = 2
"""How often the SDK's own transport opens a stream again, one after the other."""

_STOCK_DELAY = 1.0
"""Seconds that it waits before, if the server does not say."""


@dataclass(frozen=True, slots=True)
class Incoming:
    requester: Requester
    policy: ReconnectPolicy
    emit: Callable[[Event], Awaitable[None]]
    spawn: Callable[..., None]

    async def take(self, event: ReadEvent, request_id: RequestId | None) -> bool:
        """Hand over one event. Return whether it is the answer.

        Args:
            request_id: The request that the stream responds to; None: the notification stream.
        """
        if event.dropped is not None:
            return await self._was_dropped(event.dropped, request_id)
        if not event.data or event.event != "message":
            return False
        message = received(event.data)
        if message is None:
            return False
        is_answer = request_id is not None and "method" not in message
        if is_answer:
            # As the SDK does: what answers on this stream answers this request.
            message["id"] = request_id
        await self.emit(Received(message))
        return is_answer

    async def _was_dropped(self, outline: Outline, request_id: RequestId | None) -> bool:
        """Report a message that was too large. Return whether it answers that request."""
        limit = self.policy.max_message
        answer = instead_of_dropped(outline, self.requester.name, limit, answers=request_id)
        if answer is None:
            await self.emit(Missed())
        elif not outline.has_method:
            await self.emit(Received(answer))
        else:
            # Its asker waits; and what is read here need not wait for that.
            self.spawn(self._refuse, answer)
        return not outline.has_method

    async def _refuse(self, answer: Json) -> None:
        failure = await self.requester.post(answer, {})
        if failure is not None:
            logger.info("the refusal of a question could not be sent: %s", failure.explanation)

    def too_large(self, what: str) -> Failure:
        limit = self.policy.max_message
        logger.warning(
            "%s: a %s of more than %d bytes was dropped (ReconnectPolicy.max_message)",
            self.requester.name,
            what,
            limit,
        )
        text = f"Outcome unknown: the {what} is too large: more than {limit} bytes (max_message)"
        text = f"{text}, from {self.requester.name}"
        return refusal(200, OUTCOME_UNKNOWN, text, {"reason": "too_large", "limit": limit})


def _may_have_been_served(failure: Failure) -> bool:
    """Whether a failed GET may have had an effect, or may still have one."""
    if failure.status is not None:
        return failure.status >= 500 and not failure.never_ran
    return failure.cause is not FailureCause.UNREACHABLE


@dataclass(slots=True, eq=False)
class NotificationStream:
    _requester: Requester
    _incoming: Incoming
    _policy: ReconnectPolicy
    _is_read: bool = False
    _position: Position = field(default_factory=Position)
    _was_tried: bool = False
    """A GET went out, and the server may have served it."""

    _is_in_doubt: bool = False
    """The server may have served a GET without a position, so that the next GET may detach the
    sessions (HTL7)."""

    def begin(self) -> bool:
        """Return whether the caller has to call `read` now. False: another caller reads."""
        was_read, self._is_read = self._is_read, True
        return not was_read

    def _failure(self, error: Exception) -> Failure:
        if isinstance(error, EventTooLarge):
            return self._incoming.too_large("SSE event")
        return describe(error, name=self._requester.name)

    async def read(self) -> None:
        """Keep the stream open. Without sessions: for as long as the SDK would try."""
        requester = self._requester
        backoff = Backoff(base=self._policy.backoff_base, cap=self._policy.backoff_cap)
        position = self._position
        position.retry = None
        was_lost = was_open = False
        failures = 0
        while True:
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            if position.id is not None:
                headers["last-event-id"] = position.id
            may_be_open = False
            refused: Failure | None = None
            try:
                async with requester.stream("GET", None, headers, silent=True) as response:
                    status, has_sessions = response.status_code, requester.settings.has_sessions
                    if status != 200:
                        refused = await requester.refused(response, None)
                    if status == 405 and not (was_open and has_sessions):
                        logger.debug("the server has no notification stream")
                        return
                    if refused is not None and status in (400, 404, 405, 410) and has_sessions:
                        # Should this link be gone on with after all, so is the stream.
                        self._is_read = False
                        await self._incoming.emit(StreamFailed(refused))
                        return
                    response.raise_for_status()
                    if not is_sse(response):
                        return
                    if self._is_in_doubt and has_sessions and requester.settings.may_resume:
                        # A request may have attached a session again, behind events that are
                        # not sent here (ATT3). So nothing is read.
                        self._is_read = False
                        await self._incoming.emit(StreamUnsure())
                        return
                    may_be_open = was_open = True
                    if self._was_tried:
                        continued = position.id is not None and not self._is_in_doubt
                        await self._incoming.emit(StreamReopened(continued, was_lost))
                    was_lost = False
                    async with aclosing(events_of(response, self._policy.max_message)) as events:
                        async for event in events:
                            backoff.progressed()
                            position.note(event)
                            await self._incoming.take(event, None)
                failures = 0
            except (*FAILURES, EventTooLarge) as error:
                logger.debug("the notification stream ended: %r", error)
                failures += 1
                failure = refused or self._failure(error)
                if requester.settings.has_sessions and was_open:
                    if may_be_open:
                        await self._incoming.emit(StreamBroke(failure))
                    elif is_away(failure.cause, failure.status):
                        # Should this link be gone on with after all, so is the stream.
                        self._is_read = False
                        await self._incoming.emit(StreamFailed(failure))
                        return
                was_lost = True
                may_be_open = may_be_open or _may_have_been_served(failure)
            self._was_tried = self._was_tried or may_be_open
            if may_be_open and position.id is None:
                # The server may count it as opened (HTL7), now or when it comes to serve it, and
                # take what is attached here off: to go on from an event does not undo that.
                self._is_in_doubt = True
            if requester.settings.has_sessions:
                # As long as the server says, and then some: others were cut with us (TKO11).
                rest = (refused.retry_after or 0.0) if refused is not None else 0.0
                asked = min(max(position.retry or 0, rest), self._policy.give_up_after)
                delay = asked + backoff.failed(random.random())
            elif failures >= STOCK_ATTEMPTS:
                return
            else:
                delay = position.retry if position.retry is not None else _STOCK_DELAY
            await anyio.sleep(delay)
