"""Keep a link's notification stream, the GET, open.

A stream that was open and broke is opened again soon, with ``Last-Event-ID``. If that fails, the
server or the way to it is away: the client is informed, and reconnects by another link. A stream
that was never open is no sign of that: a proxy before the server may block it.
"""

from __future__ import annotations

import logging
import random
from contextlib import aclosing
from dataclasses import dataclass

import anyio
import httpx2

from mcp_sessions.client.dialer import (
    Failure,
    StreamBroke,
    StreamFailed,
    StreamRefused,
    StreamReopened,
    StreamUnsure,
)
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.core.resume import FailureCause, is_away
from mcp_sessions_transports.http.client.exchange import STOCK_ATTEMPTS, STOCK_DELAY
from mcp_sessions_transports.http.client.failures import describe, is_sse
from mcp_sessions_transports.http.client.incoming import Incoming, position
from mcp_sessions_transports.http.client.requester import Requester
from mcp_sessions_transports.http.client.sse_reader import EventTooLarge

logger = logging.getLogger(__name__)


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
    _last_id: str | None = None
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
        retry: int | None = None
        was_lost = was_open = False
        failures = 0
        while True:
            headers = {"accept": "text/event-stream", "cache-control": "no-store"}
            if self._last_id is not None:
                headers["last-event-id"] = self._last_id
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
                        await self._incoming.emit(StreamRefused(refused))
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
                        continued = self._last_id is not None and not self._is_in_doubt
                        await self._incoming.emit(StreamReopened(continued, was_lost))
                    was_lost = False
                    async with aclosing(self._incoming.events(response)) as events:
                        async for event in events:
                            backoff.progressed()
                            self._last_id = position(event, self._last_id)
                            retry = event.retry if event.retry is not None else retry
                            await self._incoming.take(event, None)
                failures = 0
            except (httpx2.HTTPError, httpx2.StreamError, OSError, EventTooLarge) as error:
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
            if may_be_open and self._last_id is None:
                # The server may count it as opened (HTL7), now or when it comes to serve it, and
                # take what is attached here off: to go on from an event does not undo that.
                self._is_in_doubt = True
            if requester.settings.has_sessions:
                # As long as the server says, and then some: others were cut with us (TKO11).
                rest = (refused.retry_after or 0.0) if refused is not None else 0.0
                asked = min(max((retry or 0) / 1000, rest), self._policy.give_up_after)
                delay = asked + backoff.failed(random.random())
            elif failures >= STOCK_ATTEMPTS:
                return
            else:
                delay = retry / 1000 if retry is not None else STOCK_DELAY
            await anyio.sleep(delay)
