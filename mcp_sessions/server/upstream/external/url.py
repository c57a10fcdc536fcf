"""Serve a child that is a session at a URL.

Each of its requests is a POST, and the response has every message about that request. The child's
other messages come on a separate stream.

Rules:

1. A request is sent again only if the transport proves that it did not run, and once for each
   proof. The table in ``wire.py`` has all proofs.
2. An invalid answer costs one request. A session that the server forgot has ended.
3. Whether the server still knows the session is learned by a request without an effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, Final

import httpx2

from mcp_sessions import method_names
from mcp_sessions.background import report
from mcp_sessions.core.messages import (
    Answer,
    encode,
    meta_of,
    notification_message,
)
from mcp_sessions.errors import LimitReached
from mcp_sessions.http_client.body import ResponseTooLarge
from mcp_sessions.http_client.connect_errors import reason_of
from mcp_sessions.http_client.redirects import is_sse
from mcp_sessions.http_client.sse_reader import EventTooLarge, ReadEvent, position
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.external.beginning import NoMeans
from mcp_sessions.server.upstream.external.child_requests import ChildRefused, Forgotten, Waiting
from mcp_sessions.server.upstream.external.child_wire import ChildConnection, SendOnce
from mcp_sessions.server.upstream.external.modern_requests import VERSION
from mcp_sessions.server.upstream.external.param_headers import ParamHeaders, headers_of
from mcp_sessions.server.upstream.external.receiver import Client
from mcp_sessions.server.upstream.external.server_stream import ReadStream, StreamReceiver
from mcp_sessions.server.upstream.external.unreadable import more_than, outlined
from mcp_sessions.server.upstream.external.url_exchange import UrlExchange, UrlSession
from mcp_sessions.server.upstream.external.url_messages import Messages
from mcp_sessions.server.upstream.external.url_wire import (
    CONNECTING,
    FAILURES,
    UNSENT,
    Doubtful,
    Missing,
    Undispatched,
    Wire,
    events_of,
    lack_of,
    refused,
    said,
    unknown,
)
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

StreamOpener = Callable[[str | None], AbstractAsyncContextManager[httpx2.Response]]

_PAGES: Final = 100
"""Pages of a list of tools that are read to learn the headers of the tools."""

_ENDING: Final = 2.0
"""Seconds in which what was asked may still be answered when it ends, and its end be reported."""


class HttpWire:
    _child: ChildConnection
    _messages: Messages

    def __init__(self, wire: Wire, longest: int, limits: ReachedLimits) -> None:
        self._wire = wire
        self._longest = longest
        self._limits = limits
        self._posts: set[asyncio.Task[None]] = set()
        self._session = UrlSession(
            opens=self._request,
            check=self._check,
            begun=self._begun,
            on_event=self._on_event,
            take=self._answered_whole,
            longest=longest,
        )
        self._param_headers = ParamHeaders()
        self._ending = asyncio.Lock()

    def begin(self, child: ChildConnection) -> None:
        self._child = child
        self._messages = Messages(child.background, self._send)

    def given_to(self, client: Client) -> None:
        """Do nothing: the URL has no name of its client."""

    def memory(self) -> None:
        """Return None: it is another machine's."""

    async def stop(self) -> None:
        async with self._ending:
            if not self._wire.client.is_closed:
                await self._stop()

    async def _stop(self) -> None:
        was_forgotten = self._child.has_ended
        self._child.forget()
        if was_forgotten and self._posts:
            # They are answered 404 as well, and did not run.
            await asyncio.wait(self._posts, timeout=_ENDING)
        self._child.give_up()
        await self._child.background.close()
        try:
            async with asyncio.timeout(_ENDING):
                if not was_forgotten and self._wire.session is not None:
                    async with self._request("DELETE"):
                        pass
        except (*FAILURES, TimeoutError, UpstreamError) as failed:
            logger.debug("the end of a session was not reported: %s", said(failed))
        finally:
            await self._wire.close()

    def kill(self) -> None:
        self._child.forget()

    async def last_words(self) -> str:
        return "the server ended its session"

    def _request(
        self,
        method: str,
        content: bytes | None = None,
        *,
        last_event_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        child = self._child
        version = VERSION if child.is_modern else child.result.get("protocolVersion")
        return self._wire.request(
            method, content, version=version, last_event_id=last_event_id, headers=headers
        )

    # --- what is sent to it ---------------------------------------------------------------------

    def write(self, message: bytes) -> None:
        if self._child.is_modern:
            # That era has no notification for it: a client that stops reading has cancelled.
            return
        self._messages.add(message)

    def room(self) -> Coroutine[Any, Any, None] | None:
        return self._messages.until_taken()

    async def hand_over(self, message: bytes) -> None:
        await self._messages.add_in_turn(message)

    async def _send(self, message: bytes) -> None:
        try:
            async with self._request("POST", message) as response:
                await self._check(response)
        except Missing:
            self._child.forget()

    async def around(
        self, exchange: SendOnce, method: str, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        result = await exchange(params)
        if method == method_names.LIST_TOOLS:
            self._param_headers.learn(result)
        return result

    async def _list_tools(self, params: Mapping[str, Any]) -> None:
        """Read them as whoever sent that request.

        Raises:
            UpstreamError: They cannot be read.
        """
        listed = envelope = _envelope_of(params)
        for _ in range(_PAGES):
            result = await self._child.exchange(
                self._child.next_id(), None, method_names.LIST_TOOLS, listed
            )
            self._param_headers.learn(result)
            cursor: object = result.get("nextCursor")
            if not isinstance(cursor, str):
                return
            listed = {**envelope, "cursor": cursor}

    def _headers_of(self, message: Mapping[str, Any]) -> dict[str, str] | None:
        if not self._child.is_modern:
            return None
        headers = headers_of(message)
        if message["method"] == method_names.CALL_TOOL:
            headers |= self._param_headers.headers_for(message["params"])
        return headers

    def submit(self, waiting: Waiting, message: Mapping[str, Any]) -> None:
        task = self._child.background.run("a request to a URL", self._post(message, waiting))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
        # A client that does not wait for the answer does not read it, either.
        waiting.future.add_done_callback(lambda it: task.cancel() if it.cancelled() else None)

    async def _post(self, message: Mapping[str, Any], waiting: Waiting) -> None:
        request_id, child = waiting.request_id, self._child
        failed: UpstreamError
        try:
            failed = await self._sent(message, waiting)
        except Doubtful as doubt:
            failed = await self._looked(message, doubt)
        except UpstreamError as error:
            failed = error
        except UNSENT as unsent:
            lack = lack_of(unsent)
            failed = refused(lack or reason_of(unsent))
            if lack is not None and not child.result:
                # The handshake: that it fails so is not to count as the server's failure.
                failed = NoMeans(failed.error)
        except (ResponseTooLarge, EventTooLarge):
            self._limits.reached(LimitReached("max_answer", self._longest))
            child.fail(waiting, f"the server's answer has {more_than(self._longest)}")
            return
        except FAILURES as broken:
            failed = unknown(said(broken))
            if isinstance(broken, httpx2.TimeoutException) and not waiting.future.done():
                about = {"requestId": request_id, "reason": "no answer in time"}
                self.write(notification_message(method_names.CANCELLED, about))
        except Exception as defect:
            # For any error: the waiting client gets an answer.
            report("a request to a URL", defect)
            failed = unknown("it could not be sent, or not be read")
        if waiting.future.done():
            return
        if isinstance(failed, Forgotten | NoMeans):
            waiting.future.set_exception(failed)
        else:
            answer_id = request_id if isinstance(failed, ChildRefused) else None
            waiting.future.set_result(Answer(answer_id, None, failed.error))

    async def _sent(self, message: Mapping[str, Any], waiting: Waiting) -> UpstreamError:
        """Send a request, see :meth:`UrlExchange.run`."""
        headers, content = self._headers_of(message), encode(message)
        try:
            return await UrlExchange(self._session, waiting).run(content, headers)
        except Undispatched:
            if message["method"] != method_names.CALL_TOOL:
                raise
            # What its headers have to be was not known, or is no longer.
            with suppress(UpstreamError):
                await self._list_tools(message["params"])
            learned = self._headers_of(message)
            if learned == headers:
                raise
        return await UrlExchange(self._session, waiting).run(content, learned)

    async def _looked(self, message: Mapping[str, Any], doubt: Doubtful) -> UpstreamError:
        """Ask something without an effect, as whoever sent that message. If that is refused as
        well, the session has ended. Return what becomes of the message.
        """
        child = self._child
        asked: dict[str, Any] = {"jsonrpc": "2.0", "id": child.next_id()}
        if child.is_modern:
            asked |= {"method": method_names.DISCOVER, "params": _envelope_of(message["params"])}
        else:
            asked["method"] = method_names.PING
        headers = self._headers_of(asked)
        try:
            async with asyncio.timeout(CONNECTING):
                async with self._request("POST", encode(asked), headers=headers) as response:
                    await self._check(response)
        except Doubtful as again:
            child.forget()
            is_gone = isinstance(again, Missing) and isinstance(doubt, Missing)
            if is_gone or (again.is_of_version and doubt.is_of_version):
                # There is no such session. Or the server speaks another era, and takes nothing of
                # this one.
                return Forgotten()
        except (*FAILURES, TimeoutError, UpstreamError) as failed:
            logger.debug("whether a session is known was not learned: %s", said(failed))
        return doubt.refusal

    async def _check(self, response: httpx2.Response) -> None:
        await self._wire.check(response, has_begun=bool(self._child.result))

    def _begun(self, response: httpx2.Response) -> None:
        if not self._child.result and not self._child.is_modern:
            self._wire.joined(response)

    # --- what it says ------------------------------------------------------------------------

    async def _on_event(self, event: ReadEvent, waiting: Waiting | None) -> None:
        if event.dropped is not None:
            said = outlined(event.dropped, f"has {more_than(self._longest)}")
            if self._child.dropped(said, self._longest):
                if said.is_answer:
                    self._limits.reached(LimitReached("max_answer", self._longest))
                return
            if waiting is not None:
                raise EventTooLarge
            self._child.leave_out(self._longest)
            return
        if event.data and event.event == "message":
            later = self._child.take(event.data, waiting)
            if later is not None:
                await later()

    async def _answered_whole(self, body: bytes, waiting: Waiting) -> None:
        later = self._child.take(body, waiting)
        if later is not None:
            await later()

    def stream(self) -> ReadStream | None:
        return self._reader(lambda last_id: self._request("GET", last_event_id=last_id))

    async def listen(
        self,
        request_id: int,
        params: dict[str, Any],
        receiver: StreamReceiver,
        *,
        is_acknowledged: Callable[[], bool],
    ) -> float | None:
        message = {
            "jsonrpc": "2.0",
            "id": request_id,
            "method": method_names.LISTEN,
            "params": params,
        }
        headers, content = headers_of(message), encode(message)
        reader = self._reader(
            lambda _: self._request("POST", content, headers=headers), is_acknowledged=True
        )
        return await reader(receiver)

    def _reader(self, opens: StreamOpener, *, is_acknowledged: bool = False) -> ReadStream:
        """Return a function that reads one stream of the server.

        Args:
            opens: Opens it, after the event of that id.
            is_acknowledged: Whether the stream itself says that it is open.
        """
        last_id: str | None = None
        has_stream = False

        async def read(receiver: StreamReceiver) -> float | None:
            nonlocal last_id, has_stream
            retry: float | None = None
            try:
                async with opens(last_id) as response:
                    await self._check(response)
                    if not is_sse(response):
                        raise refused("it has no stream for changes")
                    has_stream = True
                    if not is_acknowledged:
                        await receiver.begun(continues=last_id is not None)
                    said = 0
                    async with aclosing(events_of(response, self._longest)) as events:
                        async for event in events:
                            said += bool(event.data) or event.dropped is not None
                            # Neither an id alone nor the acknowledgement is anything new.
                            if said > is_acknowledged:
                                receiver.progressed()
                            last_id = position(event, last_id)
                            retry = event.retry / 1000 if event.retry is not None else retry
                            await self._on_event(event, None)
            except Forgotten:
                if not has_stream:
                    # There may only be nothing to be had by GET. The next request finds out.
                    raise refused("it has no stream for changes") from None
                self._child.forget()
                raise
            except (*FAILURES, EventTooLarge) as broken:
                logger.debug("the stream of a session broke off: %s", reason_of(broken))
            return retry

        return read

    def noise(self, size: int, why: str) -> None:
        self._child.warn("noise", f"its answer is not a message: it {why}")


def _envelope_of(params: Mapping[str, Any]) -> dict[str, Any]:
    meta = {name: it for name, it in meta_of(params).items() if name != "progressToken"}
    return {"_meta": meta}
