"""Serve a child that is a session at a URL.

Each of its requests is a POST, and the response has every message about that request. The child's
other messages come on a separate stream.

Rules:

1. A request is sent again only if the transport proves that it did not run, and once for each
   proof. The table in ``url_requests.py`` has all proofs.
2. An invalid answer costs one request. A session that the server forgot has ended.
3. Whether the server still knows the session is learned by a request without an effect.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

import httpx2

from mcp_sessions import method_names
from mcp_sessions.background import report
from mcp_sessions.core.headers import sendable_headers
from mcp_sessions.core.messages import (
    Answer,
    encode,
    meta_of,
    notification_message,
)
from mcp_sessions.core.nearness import past_proxies
from mcp_sessions.errors import LimitReached
from mcp_sessions.external_server import ExternalServer, HTTPServer
from mcp_sessions.http_client.body import ResponseTooLarge
from mcp_sessions.http_client.connect_errors import reason_of
from mcp_sessions.http_client.exchange import FAILURES, Exchange, Opens, events_of
from mcp_sessions.http_client.session import BoundedJar, HttpSession, is_sse
from mcp_sessions.http_client.sse_reader import EventTooLarge, Position, ReadEvent
from mcp_sessions.principal import Principal
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.external.child import Child, ChildWire
from mcp_sessions.server.upstream.external.child_requests import (
    ChildRefused,
    Forgotten,
    Waiting,
)
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders, headers_of
from mcp_sessions.server.upstream.external.reading import more_than, outlined
from mcp_sessions.server.upstream.external.server_stream import ReadStream, ServerStream
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.external.starts import NoMeans, Starter
from mcp_sessions.server.upstream.external.url_requests import (
    CONNECTING,
    UNSENT,
    Credentials,
    Doubtful,
    Messages,
    Missing,
    Undispatched,
    Wire,
    lack_of,
    refused,
    said,
    unknown,
)
from mcp_sessions.server.upstream.port import UpstreamError

if TYPE_CHECKING:
    from mcp_sessions.external_server import Credential

logger = logging.getLogger(__name__)

_PAGES: Final = 100
"""Pages of a list of tools that are read to learn the headers of the tools."""

_FETCHED_ON: Final = 5
"""How often in a row a response is fetched on without anything new in it."""

_AFTER: Final = 5.0
"""Seconds in which a response may end by itself after its answer, so that its connection serves
the next request."""

_ENDING: Final = 2.0
"""Seconds in which what was asked may still be answered when it ends, and its end be reported."""


class _Reach:
    """Whether a server can be reached. The log has a line when that changes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self.is_away = False

    def lost(self, why: str) -> None:
        if not self.is_away:
            self.is_away = True
            logger.warning("%s cannot be reached: %s", self._title, why)

    def found(self) -> None:
        self.is_away = False
        logger.warning("%s is reached again", self._title)


class HttpChildren(Starter):
    """Begin sessions at a URL. A session costs only a handshake, so none is begun in advance.

    Args:
        longest: Bytes of one message of theirs.
    """

    def __init__(self, server: HTTPServer, longest: int) -> None:
        self._server = server
        self._longest = longest
        self._limits = ReachedLimits(time.monotonic)
        self._reach = _Reach(server.title)
        self._tls: ssl.SSLContext | None = None

    async def start(self, slot: Slot, principal: Principal) -> Child:
        server = self._server
        ask = partial(self._credential, principal)
        is_asked = server.auth is not None and not isinstance(server.auth, httpx2.Auth)
        credentials = Credentials(await ask(), ask if is_asked else None)
        if self._tls is None:
            # They share it: to read the system's certificates takes many milliseconds.
            self._tls = httpx2.create_ssl_context()
        client = httpx2.AsyncClient(
            verify=self._tls,
            cookies=BoundedJar(),
            mounts=past_proxies(server.url),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=8),
        )
        wire = HttpWire(
            Wire(
                HttpSession(server.url, client),
                headers=server.headers,
                credentials=credentials,
                silence=server.silence,
            ),
            self._longest,
            self._limits,
            self._reach,
        )
        return Child(wire, slot)

    async def _credential(self, principal: Principal) -> Credential:
        auth = self._server.auth
        if auth is None or isinstance(auth, httpx2.Auth):
            return auth
        try:
            found = auth(principal)
            if isawaitable(found):
                async with asyncio.timeout(self._server.start_timeout):
                    found = await found
            if isinstance(found, Mapping):
                return sendable_headers(found, may_name_host=True)
            return found
        except Exception as failed:
            # The boundary to the operator's code. Its text may quote the credential.
            raise refused(f"there is no credential for it ({type(failed).__name__})") from None

    def use(self, server: ExternalServer) -> None:
        if not isinstance(server, HTTPServer):
            raise AssertionError("it is of another kind")
        self._server = server


class HttpWire(ChildWire):
    _child: Child
    _messages: Messages

    def __init__(self, wire: Wire, longest: int, limits: ReachedLimits, reach: _Reach) -> None:
        self._wire = wire
        self._longest = longest
        self._limits, self._reach = limits, reach
        self._posts: set[asyncio.Task[None]] = set()
        self._declared = DeclaredHeaders()
        self._ending = asyncio.Lock()

    def begin(self, child: Child) -> None:
        self._child = child
        self._messages = Messages(child.background, self._send)

    async def stop(self) -> None:
        async with self._ending:
            if not self._wire.session.client.is_closed:
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
                if not was_forgotten and self._wire.session.id is not None:
                    async with self._opened("DELETE"):
                        pass
        except (*FAILURES, TimeoutError, UpstreamError) as failed:
            logger.debug("the end of a session was not reported: %s", said(failed))
        finally:
            await self._wire.close()

    def kill(self) -> None:
        self._child.forget()

    async def last_words(self) -> str:
        return "the server ended its session"

    @asynccontextmanager
    async def _opened(
        self,
        method: str,
        content: bytes | None = None,
        *,
        last_event_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[httpx2.Response]:
        child, fields = self._child, dict(headers or {})
        if last_event_id is not None:
            fields["last-event-id"] = last_event_id
        version = NEWEST_MODERN if child.is_modern else child.result.get("protocolVersion")
        sent = self._wire.request(method, content, version=version, headers=fields)
        async with sent as response:
            await self._wire.check(response, has_begun=bool(child.result))
            yield response

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
            async with self._opened("POST", message):
                pass
        except Missing:
            self._child.forget()

    def learn(self, method: str, result: Mapping[str, Any]) -> None:
        if method == method_names.LIST_TOOLS:
            self._declared.learn(result)

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
            self._declared.learn(result)
            cursor: object = result.get("nextCursor")
            if not isinstance(cursor, str):
                return
            listed = {**envelope, "cursor": cursor}

    def _headers_of(self, message: Mapping[str, Any]) -> dict[str, str] | None:
        if not self._child.is_modern:
            return None
        headers = headers_of(message)
        if message["method"] == method_names.CALL_TOOL:
            headers |= self._declared.headers_for(message["params"])
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
            if lack is None and child.result:
                # That it does not start is said elsewhere.
                self._reach.lost(reason_of(unsent))
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
        """Send a request, and take what its responses bring; its error, should that be no answer.

        Raises:
            Forgotten, UpstreamError: It did not run.
            httpx2.HTTPError: It may have.
            ResponseTooLarge, EventTooLarge: Its answer is too large.
        """
        headers, content = self._headers_of(message), encode(message)
        try:
            return await self._exchanged(content, headers, waiting)
        except Undispatched:
            if message["method"] != method_names.CALL_TOOL:
                raise
            # What its headers have to be was not known, or is no longer.
            with suppress(UpstreamError):
                await self._list_tools(message["params"])
            learned = self._headers_of(message)
            if learned == headers:
                raise
        return await self._exchanged(content, learned, waiting)

    async def _exchanged(
        self, content: bytes, headers: Mapping[str, str] | None, waiting: Waiting
    ) -> UpstreamError:
        def opens(after: str | None) -> AbstractAsyncContextManager[httpx2.Response]:
            if after is None:
                return self._opened("POST", content, headers=headers)
            return self._opened("GET", last_event_id=after)

        async def take(body: bytes) -> None:
            await self._take(body, waiting)
            if not waiting.future.done():
                raise unknown("what it answered is no answer")

        async def on_event(event: ReadEvent) -> None:
            await self._on_event(event, waiting)
            if waiting.future.done():
                # Now, and not with the next turn of the loop: the response may end here.
                exchange.answered()

        exchange = Exchange(
            opens=opens,
            refusal=UpstreamError,
            begun=self._begun,
            on_event=on_event,
            take=take,
            ended=lambda: _release(waiting),
            longest=self._longest,
            attempts=_FETCHED_ON,
            after=_AFTER,
        )
        waiting.future.add_done_callback(exchange.answered)
        await exchange.run()
        return unknown("its response ended without an answer")

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
                async with self._opened("POST", encode(asked), headers=headers):
                    pass
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

    async def _begun(self, response: httpx2.Response) -> None:
        if self._reach.is_away:
            self._reach.found()
        if not self._child.result and not self._child.is_modern:
            self._wire.joined(response)
        if "json" not in response.headers.get("content-type", "") and not is_sse(response):
            raise unknown("what it answered is no answer")

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
            await self._take(event.data, waiting)

    async def _take(self, body: bytes, waiting: Waiting | None) -> None:
        later = self._child.take(body, waiting)
        if later is not None:
            await later()

    def stream(self) -> ReadStream | None:
        return self._reader(lambda last_id: self._opened("GET", last_event_id=last_id))

    async def listen(
        self,
        request_id: int,
        params: dict[str, Any],
        stream: ServerStream,
    ) -> float | None:
        message = {
            "jsonrpc": "2.0",
            "id": request_id,
            "method": method_names.LISTEN,
            "params": params,
        }
        headers, content = headers_of(message), encode(message)
        reader = self._reader(
            lambda _: self._opened("POST", content, headers=headers), is_acknowledged=True
        )
        return await reader(stream)

    def _reader(self, opens: Opens, *, is_acknowledged: bool = False) -> ReadStream:
        """Return a function that reads one stream of the server.

        Args:
            opens: Opens it, after the event of that id.
            is_acknowledged: Whether the stream itself says that it is open.
        """
        position = Position()
        has_stream = False

        async def read(stream: ServerStream) -> float | None:
            nonlocal has_stream
            position.retry = None
            try:
                async with opens(position.id) as response:
                    if not is_sse(response):
                        raise refused("it has no stream for changes")
                    has_stream = True
                    if not is_acknowledged:
                        await stream.begun(continues=position.id is not None)
                    said = 0
                    async with aclosing(events_of(response, self._longest)) as events:
                        async for event in events:
                            said += bool(event.data) or event.dropped is not None
                            # Neither an id alone nor the acknowledgement is anything new.
                            if said > is_acknowledged:
                                stream.progressed()
                            position.note(event)
                            await self._on_event(event, None)
            except Forgotten:
                if not has_stream:
                    # There may only be nothing to be had by GET. The next request finds out.
                    raise refused("it has no stream for changes") from None
                self._child.forget()
                raise
            except (*FAILURES, EventTooLarge) as broken:
                logger.debug("the stream of a session broke off: %s", reason_of(broken))
            return position.retry

        return read

    def noise(self, size: int, why: str) -> None:
        self._child.warn("noise", f"its answer is not a message: it {why}")


async def _release(waiting: Waiting) -> None:
    """End the response, since the server ended its own. The client comes back for the rest."""
    response = waiting.call.response if waiting.call is not None else None
    if response is not None and response.close_stream is not None:
        await response.close_stream()


def _envelope_of(params: Mapping[str, Any]) -> dict[str, Any]:
    meta = {name: it for name, it in meta_of(params).items() if name != "progressToken"}
    return {"_meta": meta}
