"""Hand over the messages of a link's streams, and what is known of dropped ones."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import httpx2

from mcp_sessions.client.dialer import Event, Failure, Missed, Received
from mcp_sessions.client.messages import instead_of_dropped, received
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.messages import Json, RequestId
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import is_sendable
from mcp_sessions.errors import OUTCOME_UNKNOWN
from mcp_sessions_transports.http.client.bounded_body import pieces
from mcp_sessions_transports.http.client.failures import refusal
from mcp_sessions_transports.http.client.requester import Requester
from mcp_sessions_transports.http.client.sse_reader import ReadEvent, SseReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incoming:
    requester: Requester
    policy: ReconnectPolicy
    emit: Callable[[Event], Awaitable[None]]
    spawn: Callable[..., None]

    async def events(self, response: httpx2.Response) -> AsyncGenerator[ReadEvent]:
        reader = SseReader(max_bytes=self.policy.max_message, drops=True)
        async with aclosing(pieces(response)) as chunks:
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    yield event

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


def position(event: ReadEvent, before: str | None) -> str | None:
    if not event.id:
        return before
    return event.id if is_sendable(event.id) else None
