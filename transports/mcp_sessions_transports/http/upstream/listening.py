"""Read the server's own messages: on the session's stream, or on a listen."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import KW_ONLY, dataclass

import httpx2

from mcp_sessions.server.upstream.external.child_requests import Forgotten
from mcp_sessions.server.upstream.external.server_stream import StreamReceiver
from mcp_sessions_transports.connect_errors import reason_of
from mcp_sessions_transports.http.client.failures import is_sse
from mcp_sessions_transports.http.client.incoming import position
from mcp_sessions_transports.http.client.sse_reader import EventTooLarge, ReadEvent
from mcp_sessions_transports.http.upstream.wire import FAILURES, events_of, refused

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, repr=False)
class HttpStream:
    """A :data:`~mcp_sessions.server.upstream.external.server_stream.ReadStream` of one child.

    Args:
        open_: Opens it, after the event of that id.
        check: See :meth:`Wire.check`.
        receive: Takes an event.
        forget: There is no such session any more.
        longest: Bytes of an event.
        is_acknowledged: It says itself when it is open.
    """

    _open: Callable[[str | None], AbstractAsyncContextManager[httpx2.Response]]
    _check: Callable[[httpx2.Response], Awaitable[None]]
    _on_event: Callable[[ReadEvent], Awaitable[None]]
    _forget: Callable[[], None]
    _longest: int
    _: KW_ONLY
    is_acknowledged: bool
    _last_id: str | None = None
    _has_stream: bool = False

    async def __call__(self, receiver: StreamReceiver) -> float | None:
        retry: float | None = None
        try:
            async with self._open(self._last_id) as response:
                await self._check(response)
                if not is_sse(response):
                    raise refused("it has no stream for changes")
                self._has_stream = True
                if not self.is_acknowledged:
                    await receiver.begun(continues=self._last_id is not None)
                said = 0
                async with aclosing(events_of(response, self._longest)) as events:
                    async for event in events:
                        said += bool(event.data) or event.dropped is not None
                        # Neither an id alone nor that it was acknowledged is anything new.
                        if said > self.is_acknowledged:
                            receiver.progressed()
                        self._last_id = position(event, self._last_id)
                        retry = event.retry / 1000 if event.retry is not None else retry
                        await self._on_event(event)
        except Forgotten:
            if not self._has_stream:
                # There may only be nothing to be had by GET. The next request finds out.
                raise refused("it has no stream for changes") from None
            self._forget()
            raise
        except (*FAILURES, EventTooLarge) as broken:
            logger.debug("the stream of a session broke off: %s", reason_of(broken))
        return retry
