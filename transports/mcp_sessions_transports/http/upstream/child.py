"""A child that is a session at a URL: each of its requests is a POST, whose response brings what
is about that request; what else it says comes on a stream of its own.

Rules:

1. No request is sent twice, but one that was answered 404, or whose headers or credential were
   refused: that did not run.
2. A response that breaks off is fetched on from where it broke, if its events have ids; else what
   became of its request is unknown, and that is its answer.
3. What is no answer costs one request. A session that the server forgot is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx2

from mcp_sessions.background import report
from mcp_sessions.core.listening import LISTEN
from mcp_sessions.core.messages import (
    Answer,
    encode,
    meta_of,
    notification_message,
)
from mcp_sessions.server.upstream.external.child import CANCELLED, Client, Forgotten, Waiting
from mcp_sessions.server.upstream.external.either_era import EitherEraChild
from mcp_sessions.server.upstream.external.listening import LEAST_RETRY, Hear, Heard
from mcp_sessions.server.upstream.external.modern import VERSION
from mcp_sessions.server.upstream.port import Call, UpstreamError
from mcp_sessions_transports.connect_errors import reason_of
from mcp_sessions_transports.http.client.bounded_body import BodyTooLarge, whole
from mcp_sessions_transports.http.client.failures import is_sse
from mcp_sessions_transports.http.client.incoming import position
from mcp_sessions_transports.http.client.sse_reader import EventTooLarge, ReadEvent
from mcp_sessions_transports.http.upstream.headers import (
    HEADER_MISMATCH,
    ParamHeaders,
    headers_of,
)
from mcp_sessions_transports.http.upstream.listening import HttpStream
from mcp_sessions_transports.http.upstream.wire import (
    CONNECTING,
    FAILURES,
    RETRY,
    UNSENT,
    Wire,
    events_of,
    refused,
    said,
    unknown,
)

logger = logging.getLogger(__name__)

_WAITING: Final = 256
"""Messages that wait to be taken."""

_REOPENED: Final = 5
"""How often in a row a response is fetched on without anything new in it."""

_AFTER: Final = 5.0
"""Seconds in which a response may end by itself after its answer, so that its connection serves
the next request."""

_PAGES: Final = 100
"""Of a list of tools that is read to learn what their headers are."""

_ENDING: Final = 2.0
"""Seconds in which what was asked may still be answered when it ends, and its end be told."""


@dataclass(slots=True, eq=False)
class _Position:
    """How far a response was read."""

    last_id: str | None = None
    retry: float = RETRY
    """Seconds before it is fetched on."""

    attempts: int = 0
    """How often it was, since there was something new in it."""

    def saw(self, event: ReadEvent) -> None:
        """One more event was read."""
        self.last_id = position(event, self.last_id)
        self.attempts = 0
        if event.retry is not None:
            self.retry = event.retry / 1000


class HttpChild(EitherEraChild):
    """One session at a URL.

    Args:
        longest: Bytes of one of its messages.
    """

    def __init__(self, wire: Wire, client: Client, longest: int) -> None:
        super().__init__(client)
        self._wire = wire
        self._longest = longest
        self._is_over = False
        self._posts: set[asyncio.Task[None]] = set()
        self._last_message: asyncio.Task[None] | None = None
        self._waiting_messages = 0
        self._param_headers = ParamHeaders()
        self._ending = asyncio.Lock()

    @property
    def is_over(self) -> bool:
        """See :class:`Child`."""
        return self._is_over

    async def stop(self) -> None:
        """See :class:`Child`."""
        async with self._ending:
            if not self._wire.client.is_closed:
                await self._stop()

    async def _stop(self) -> None:
        was_forgotten, self._is_over = self._is_over, True
        if was_forgotten and self._posts:
            # They are answered 404 as well, and did not run.
            await asyncio.wait(self._posts, timeout=_ENDING)
        self._give_up()
        await self._background.close()
        try:
            async with asyncio.timeout(_ENDING):
                if not was_forgotten and self._wire.session is not None:
                    async with self._request("DELETE"):
                        pass
        except (*FAILURES, TimeoutError, UpstreamError) as failed:
            logger.debug("the end of a session was not told: %s", said(failed))
        except Exception as defect:
            # As of a request: of an application's own.
            report("the end of a session at a URL", defect)
        finally:
            await self._wire.close()

    def kill(self) -> None:
        """See :class:`Child`."""
        self._is_over = True

    async def last_words(self) -> str:
        """See :class:`Child`."""
        return "the server ended its session"

    def _request(
        self,
        method: str,
        content: bytes | None = None,
        *,
        last_event_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        version = VERSION if self._modern is not None else self.result.get("protocolVersion")
        return self._wire.request(
            method, content, version=version, last_event_id=last_event_id, headers=headers
        )

    # --- what it is told ---------------------------------------------------------------------

    def _write(self, message: bytes) -> None:
        if self._modern is not None:
            # That era tells a server nothing; whoever reads no more has cancelled.
            return
        if self._waiting_messages >= _WAITING:
            self.failure = self.failure or "it takes no messages"
            self._forget()
            return
        self._waiting_messages += 1
        told = self._tell(message, self._last_message)
        self._last_message = self._background.run("a message to a URL", told)

    def _room(self) -> Coroutine[Any, Any, None] | None:
        last = self._last_message
        return self._until_taken() if last is not None and not last.done() else None

    async def _until_taken(self) -> None:
        # Of all who wait one goes on after the other: no more is waiting there than was asked
        # without waiting.
        while (last := self._last_message) is not None and not last.done():
            await asyncio.wait({last})

    async def _tell(self, message: bytes, before: asyncio.Task[None] | None) -> None:
        """Send what is no request: one after the other, as it was said."""
        try:
            if before is not None:
                await asyncio.wait({before})
            async with (
                asyncio.timeout(CONNECTING),
                self._request("POST", message) as response,
            ):
                await self._wire.check(response)
        except Forgotten:
            self._forget()
        except (*FAILURES, TimeoutError, UpstreamError) as failed:
            logger.info("a message was not taken: %s", said(failed))
        finally:
            self._waiting_messages -= 1

    async def _exchange(
        self, request_id: int, call: Call | None, method: str, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        known = self._param_headers.of(params or {}) if method == "tools/call" else {}
        try:
            result = await super()._exchange(request_id, call, method, params)
        except UpstreamError as refused:
            is_mismatch = refused.error.get("code") == HEADER_MISMATCH and method == "tools/call"
            if self._modern is None or params is None or not is_mismatch:
                raise
            # It did not run: what its headers have to be was not known, or is no longer.
            with suppress(UpstreamError):
                await self._list_tools(params)
            if self._param_headers.of(params) == known:
                raise
            return await super()._exchange(self._next_id(), call, method, params)
        if method == "tools/list" and self._modern is not None:
            self._param_headers.learn(result)
        return result

    async def _list_tools(self, params: Mapping[str, Any]) -> None:
        """Read them as whoever sent that request.

        Raises:
            UpstreamError: They cannot be read.
        """
        meta = {name: it for name, it in (meta_of(params) or {}).items() if name != "progressToken"}
        listed: dict[str, Any] = {"_meta": meta}
        for _ in range(_PAGES):
            result = await self._exchange(self._next_id(), None, "tools/list", listed)
            cursor: object = result.get("nextCursor")
            if not isinstance(cursor, str):
                return
            listed = {"_meta": meta, "cursor": cursor}

    def _headers_of(self, message: Mapping[str, Any]) -> dict[str, str]:
        headers = headers_of(message)
        if message["method"] == "tools/call":
            headers |= self._param_headers.of(message["params"])
        return headers

    def _submit(self, request_id: int, message: Mapping[str, Any]) -> None:
        waiting = self._open[request_id]
        task = self._background.run("a request to a URL", self._post(request_id, message, waiting))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
        # Whoever does not wait for its answer any more does not read it, either.
        waiting.future.add_done_callback(lambda it: task.cancel() if it.cancelled() else None)

    async def _post(self, request_id: int, message: Mapping[str, Any], waiting: Waiting) -> None:
        failed: UpstreamError
        try:
            failed = await self._answer_of(message, waiting)
        except Forgotten as forgotten:
            self._forget()
            failed = forgotten
        except UpstreamError as error:
            failed = error
        except UNSENT as unsent:
            failed = refused(reason_of(unsent))
        except (BodyTooLarge, EventTooLarge):
            self._fail(waiting, f"the server's answer has more than {self._longest} bytes")
            return
        except FAILURES as broken:
            failed = unknown(said(broken))
            if isinstance(broken, httpx2.TimeoutException) and not waiting.future.done():
                about = {"requestId": request_id, "reason": "no answer in time"}
                self._write(notification_message(CANCELLED, about))
        except Exception as defect:
            # The boundary to what an application gave (``auth=``): whoever waits is answered.
            report("a request to a URL", defect)
            failed = unknown("it could not be sent, or not be read")
        if waiting.future.done():
            return
        if isinstance(failed, Forgotten):
            waiting.future.set_exception(failed)
        else:
            waiting.future.set_result(Answer(None, None, failed.error))

    async def _answer_of(self, message: Mapping[str, Any], waiting: Waiting) -> UpstreamError:
        """Send a request, and take what its response brings; its error, should that be no answer.

        Raises:
            Forgotten, UpstreamError: It did not run.
            httpx2.HTTPError: It may have.
        """
        at = _Position()
        headers = self._headers_of(message) if self._modern is not None else None
        async with self._request("POST", encode(message), headers=headers) as response:
            await self._wire.check(response)
            if not self.result and self._modern is None:
                self._wire.joined(response)
            if not is_sse(response):
                if "json" in response.headers.get("content-type", ""):
                    body = await whole(response, limit=self._longest)
                    later = self._take(body, waiting.call)
                    if later is not None:
                        await later()
                return unknown("what it answered is no answer")
            try:
                await self._read(response, at, waiting)
                if at.last_id is not None and not waiting.future.done():
                    await _let_go(waiting)
            except FAILURES as broken:
                if at.last_id is None:
                    raise
                logger.debug("a response broke off: %s", reason_of(broken))
        if not waiting.future.done() and at.last_id is not None:
            await self._fetch_on(at, waiting)
        return unknown("its response ended without an answer")

    async def _read(self, response: httpx2.Response, at: _Position, waiting: Waiting) -> None:
        """Take what a response brings, until it ends; or not long after the answer, for a server
        that keeps it open.
        """
        loop, leaves = asyncio.get_running_loop(), asyncio.timeout(None)
        try:
            async with leaves, aclosing(events_of(response, self._longest)) as events:
                async for event in events:
                    at.saw(event)
                    await self._heard(event, waiting)
                    if waiting.future.done() and leaves.when() is None:
                        leaves.reschedule(loop.time() + _AFTER)
        except TimeoutError:
            if not leaves.expired():
                raise
            logger.debug("a response is left, which does not end after its answer")

    async def _fetch_on(self, at: _Position, waiting: Waiting) -> None:
        """Fetch what a response has after an event."""
        at.attempts = 0
        while at.attempts < _REOPENED and at.last_id is not None and not waiting.future.done():
            at.attempts += 1
            await asyncio.sleep(min(max(at.retry, LEAST_RETRY), 30.0))
            try:
                async with self._request("GET", last_event_id=at.last_id) as response:
                    await self._wire.check(response)
                    if not is_sse(response):
                        return
                    await self._read(response, at, waiting)
            except Forgotten:
                # Of what it began nobody knows any more.
                self._forget()
                return
            except UpstreamError:
                return
            except FAILURES as broken:
                logger.debug("a response broke off again: %s", reason_of(broken))

    # --- what it says ------------------------------------------------------------------------

    async def _heard(self, event: ReadEvent, waiting: Waiting | None) -> None:
        if event.dropped is not None:
            if waiting is None or event.dropped.has_method:
                logger.warning("a message of more than %d bytes is left out", self._longest)
                return
            raise EventTooLarge
        if event.data and event.event == "message":
            later = self._take(event.data, waiting.call if waiting is not None else None)
            if later is not None:
                await later()

    async def _said_by_itself(self, event: ReadEvent) -> None:
        await self._heard(event, None)

    def _stream(self) -> Hear:
        if self._modern is not None:
            return self._listen
        return self._hears(lambda last_id: self._request("GET", last_event_id=last_id))

    async def _hear(self, request_id: int, params: dict[str, Any], heard: Heard) -> float | None:
        message = {"jsonrpc": "2.0", "id": request_id, "method": LISTEN, "params": params}
        headers, content = headers_of(message), encode(message)
        hears = self._hears(
            lambda _: self._request("POST", content, headers=headers), is_acknowledged=True
        )
        return await hears(heard)

    def _hears(
        self,
        open_: Callable[[str | None], AbstractAsyncContextManager[httpx2.Response]],
        *,
        is_acknowledged: bool = False,
    ) -> HttpStream:
        return HttpStream(
            open_,
            self._wire.check,
            self._said_by_itself,
            self._forget,
            self._longest,
            is_acknowledged=is_acknowledged,
        )

    def _forget(self) -> None:
        """Nothing can be asked of it any more."""
        self._is_over = True

    def _skip(self, line: bytes, why: str) -> None:
        logger.warning("a URL says what is no message (%s)", why)

    def _was_not_asked(self) -> None:
        logger.warning("a URL answers what it was not asked")


async def _let_go(waiting: Waiting) -> None:
    """The server ends the response to what it goes on with: so does this one, whose client comes
    back for the rest as we do.
    """
    close = waiting.call.close_stream if waiting.call is not None else None
    if close is not None:
        await close()
