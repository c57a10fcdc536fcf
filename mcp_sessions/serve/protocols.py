"""uvicorn's protocols, with the bounds that it has not: see ``open_connections.py``.

A client's bytes are parsed some at a time, of all connections in turn. A thousand frames or
requests fit into one packet, and whoever asks for something else waits until they are parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from mcp_sessions.authentication.pace import DELAYS
from mcp_sessions.core.addresses import address_of
from mcp_sessions.core.nearness import CLIENT, ConnectedClient
from mcp_sessions.serve.open_connections import (
    RETRY_AFTER,
    Looked,
    OnlyHealth,
    Open,
    OpenConnections,
)

if TYPE_CHECKING:
    import ssl

    from starlette.types import ASGIApp
    from uvicorn._types import ASGIReceiveEvent
    from websockets.frames import Frame

MAX_HEADER = 65_536
"""Bytes of a request's header, or of what is between two pieces of a chunked body."""

MAX_FIELDS = 1_000
"""Fields of a header, and of what follows a chunked body."""

MAX_WAITING = 65_536
"""Bytes after which no more are read while a request before them has no whole response."""

_SLICE = 2_048
"""Bytes of frames, headers or chunks that are parsed at a time: some 300 of the smallest, in 1 ms.
"""

_BLANK = b"\r\n\r\n"
"""The end of a header (RFC 9112, 2.1) and of a chunked body (RFC 9112, 7.1)."""

_PONG = b"\x8a"

_INVALID_DATA = 1007
"""The close code of RFC 6455, 7.4.1, for a text that is no UTF-8."""

_TRY_AGAIN_LATER = 1013
"""The close code that IANA has registered for a server that has too much to do."""


class LimitedConfig(uvicorn.Config):
    def __init__(
        self,
        app: ASGIApp,
        open_connections: OpenConnections,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self.open_connections = open_connections
        self._tls = tls

    def load(self) -> None:
        super().load()
        # uvicorn would read the files itself, and say what is wrong with a traceback.
        self.ssl = self._tls


def _ends_if_untaken(transport: asyncio.Transport, seconds: float) -> None:
    """Have the system end a connection whose peer acknowledges nothing of what was sent. Small
    messages wait in the system, not in this process. By itself Linux would hold them for 15
    minutes.
    """
    sock = transport.get_extra_info("socket")
    if sys.platform == "linux" and sock is not None and sock.family != socket.AF_UNIX:
        # A peer that is gone already has the option refused.
        with contextlib.suppress(OSError):
            milliseconds = round(seconds * 1_000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class _Limited:
    """A connection whose bytes may wait, and whose refusals may: see ``pace.py``."""

    __slots__ = ()
    _connections: OpenConnections
    _delay: asyncio.Future[None] | None
    _is_in_turn: bool
    _unparsed: bytearray
    config: LimitedConfig
    app_state: dict[str, Any]
    looked: Looked
    transport: asyncio.Transport

    def _begin(self) -> None:
        self._connections = self.config.open_connections
        self.looked = Looked()
        self._delay = None
        # Each request has a copy.
        self.app_state = {**self.app_state, DELAYS: self.delay}
        self._unparsed = bytearray()
        self._is_in_turn = False

    def _end(self) -> None:
        self._connections.closed(cast("Open", self))
        self.end_delay()
        self._unparsed.clear()

    def _take_turns(self) -> None:
        if not self._is_in_turn:
            self._is_in_turn = True
            self._connections.steps.add(self._step)

    def _step(self) -> bool:
        self._is_in_turn = False
        try:
            self._is_in_turn = not self.transport.is_closing() and self._parse_unparsed()
        except BaseException:
            # As the event loop does where it calls a protocol.
            self.transport.abort()
            raise
        self._count_unfinished()
        if self.transport.is_closing():
            self._unparsed.clear()
        return self._is_in_turn

    def _parse_unparsed(self) -> bool:
        """Parse some of what waits. Return whether more can be parsed."""
        raise NotImplementedError

    def _count_unfinished(self) -> None:
        """Note the bytes that came of what is not whole."""
        if self.transport.is_closing():
            return
        size, scope = self._unfinished()
        if size or self.looked.unfinished:
            sender = self.looked.address if scope is None else address_of(scope)
            self._connections.arrived(cast("Open", self), size, sender)

    def _unfinished(self) -> tuple[int, Any]:
        """Return these bytes, and the scope of their request. None: there is none yet."""
        raise NotImplementedError

    def delay(self, wait: asyncio.Future[None] | None) -> None:
        """Note the wait of a refusal. None: no refusal waits any more."""
        self._delay = wait
        if wait is not None and self.transport.is_closing():
            self.end_delay()
        else:
            self._connections.delayed(cast("Open", self), waits=wait is not None)

    def end_delay(self) -> None:
        # It refers to this connection.
        self.app_state.pop(DELAYS, None)
        if self._delay is not None and not self._delay.done():
            self._delay.set_result(None)


class LimitedHttp(_Limited, HttpToolsProtocol):
    """A connection of HTTP, within the bounds.

    Rules, in addition to those of ``open_connections.py``:

    1. A request is parsed when the one before it has its whole response. Until then its bytes wait,
       and after :data:`MAX_WAITING` no more of them are read.
    2. An offer in ``Upgrade`` that is not taken is ignored (RFC 9110, 7.8).
    """

    # The library's own attributes are as many as instances share the names of: with one more of
    # ours in the same place, each connection would have a table of its own.
    __slots__ = (
        "_before",
        "_body",
        "_body_left",
        "_client",
        "_connections",
        "_delay",
        "_framed",
        "_header",
        "_is_in_turn",
        "_is_upgraded",
        "_receives",
        "_unparsed",
        "looked",
    )

    config: LimitedConfig
    app: Any
    transport: asyncio.Transport
    cycle: Any
    """None before the first request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._begin()
        self._client = self.app_state[CLIENT] = ConnectedClient()
        self._header = 0
        """Bytes that came of a header that is not whole."""

        self._framed: Any = None
        """The scope of the last request whose header is whole."""

        self._body_left = 0
        """Bytes that its body still has. The length of a chunked one is not known."""

        self._body = 0
        """Bytes that came of it, while it is not whole."""

        self._before = b""
        """The last bytes that were parsed, if they may be the first of ``_BLANK``."""

        self._receives = False
        """Some of a request came, and not all of it."""

        self._is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.looked.received_at = self.loop.time()
        # Some clients connect before they have a request: they have as long as after one.
        self.looked.late_at = self.looked.received_at + self.config.timeout_keep_alive
        self._connections.opened(self)
        _ends_if_untaken(transport, self._connections.limits.receive_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.has_left = True
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.looked.received_at = self.loop.time()
        parsed = 0 if self._unparsed else self._parse(data)
        if parsed < len(data):
            self._unparsed += data[parsed:]
            if self._keep_waiting():
                self._take_turns()
        self._count_unfinished()

    def on_body(self, body: bytes) -> None:
        self._header = 0
        self._body += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._count_unfinished()
        if self._unparsed:
            self._take_turns()

    def _parse_unparsed(self) -> bool:
        parsed = self._parse(self._unparsed)
        del self._unparsed[:parsed]
        if self._unparsed:
            return self._keep_waiting()
        if not self.flow.read_paused:
            self.transport.resume_reading()
        return False

    def _keep_waiting(self) -> bool:
        """Keep what waits within its bound. Return whether it can be parsed now."""
        is_next = not self._is_answering()
        if is_next or len(self._unparsed) >= MAX_WAITING:
            self.transport.pause_reading()
        else:
            # Only who reads notices that a peer has left.
            self.transport.resume_reading()
        # An application that waits for its client to leave would have the library read on.
        self.flow.read_paused = False
        return is_next

    def _parse(self, data: bytes | bytearray) -> int:
        """Parse a slice, and what is here of a body whose length is known. Return how many bytes
        that were.
        """
        at, most = 0, _SLICE
        while at < len(data) and most > 0 and not self._is_answering():
            if self._body_left:
                end = min(at + self._body_left, len(data))
                self._body_left -= end - at
            else:
                end = self._end_of_message(data, at, most)
                # Each piece is some work, however short it is.
                most -= max(end - at, _SLICE // 32)
                self._header += end - at
            super().data_received(bytes(data[at:end]))
            at = end
            if not self._is_upgraded:
                self._look_at_header()
            if self._is_upgraded or self.transport.is_closing():
                return len(data)
        self._look_whether_whole()
        return at

    def _end_of_message(self, data: bytes | bytearray, at: int, most: int) -> int:
        """Return where a message may end that has no length, or where the slice does."""
        before, self._before = self._before, b""
        if before:
            found = (before + data[at : at + 3]).find(_BLANK)
            if found >= 0:
                return at + found + len(_BLANK) - len(before)
        found = data.find(_BLANK, at, at + most)
        if found >= 0:
            return found + len(_BLANK)
        end = min(at + most, len(data))
        self._before = (before + data[at:end])[-3:]
        return end

    def _look_at_header(self) -> None:
        if self._has_header() and self._framed is not self.scope:
            self._framed, self._header, self._body = self.scope, 0, 0
            for name, value in self.headers:
                if name == b"content-length":
                    self._body_left = int(value)
        if self._header > MAX_HEADER or (self.headers and len(self.headers) > MAX_FIELDS):
            self._connections.refused_header()
            self._refuse(b"431 Request Header Fields Too Large")

    def _look_whether_whole(self) -> None:
        if self._has_header() and not self.cycle.more_body:
            self._receives, self._body = False, 0
            self.looked.late_at = None
        elif not self._receives:
            self._receives = True
            self.looked.late_at = self.looked.received_at + self._connections.limits.receive_timeout

    def _unfinished(self) -> tuple[int, Any]:
        has_header = self._has_header()
        # Of a body whose request has its response, nothing is kept.
        body = 0 if has_header and self.cycle.response_complete else self._body
        size = self._header + body + len(self._unparsed)
        return size, self.scope if has_header else None

    def _has_header(self) -> bool:
        return self.cycle is not None and self.scope is self.cycle.scope

    def _is_answering(self) -> bool:
        """Whether a whole request is here whose response is not."""
        cycle = self.cycle
        return self._has_header() and not cycle.more_body and not cycle.response_complete

    def _should_upgrade(self) -> bool:
        # The library asks if the parser saw an offer, and then takes the request for one without
        # a body. CONNECT is one, and no offer.
        return self.scope["method"] != "CONNECT"

    def handle_websocket_upgrade(self) -> None:
        if not self._is_offered_websocket():
            self._ignore_offer()
            return
        has_place = self._connections.has_place(self)
        self._connections.closed(self)
        self.end_delay()
        self._is_upgraded = True
        if not has_place:
            self._refuse(b"503 Service Unavailable\r\nretry-after: %d" % RETRY_AFTER)
            return
        super().handle_websocket_upgrade()

    def _is_offered_websocket(self) -> bool:
        scope = self.scope
        fields = [(name, value.lower()) for name, value in self.headers]
        is_usual = scope["method"] == "GET" and scope["http_version"] == "1.1"
        # The library answers nothing to a handshake with a body.
        has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in fields
        )
        return is_usual and not has_body and (b"upgrade", b"websocket") in fields

    def _ignore_offer(self) -> None:
        """Parse the header again without it: the parser would take a body for the next request."""
        scope = self.scope
        line = f"{scope['method']} {self.url.decode('latin-1')} HTTP/{scope['http_version']}\r\n"
        head = [line.encode("latin-1")]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        # It may be at its end: after `Connection: close`, or with HTTP/1.0.
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(b"".join([*head, b"\r\n"]))

    def serve_only(self, paths: frozenset[str]) -> None:
        self.app = OnlyHealth(self.app, paths, partial(self._connections.has_place, self))

    def waits(self) -> bool:
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            return True
        return cycle.more_body and not cycle.response_started

    def is_stuck(self) -> bool:
        return self.flow.write_paused

    def drop(self) -> None:
        self._unparsed.clear()
        if self.waits() and not self.transport.is_closing():
            self._refuse(b"503 Service Unavailable\r\nretry-after: %d" % RETRY_AFTER)
        else:
            self.transport.abort()
        if self.cycle is not None:
            # Whoever reads the body keeps it until then.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def give_up(self) -> bool:
        if not self.waits():
            return False
        cycle = self.cycle
        is_begun = self._header > 0 and not self._has_header()
        if is_begun or (cycle is not None and not cycle.response_complete):
            self._refuse(b"408 Request Timeout")
            return True
        # There is nothing to answer: it was silent, or was answered before its body was here.
        self.transport.close()
        return self._receives

    def _refuse(self, status: bytes) -> None:
        """Answer bytes that uvicorn does not take for a request, and close."""
        self.looked.late_at = None
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
        )
        self.transport.close()


class LimitedWebSocket(_Limited, WebSocketsSansIOProtocol):
    """A WebSocket, within the bounds.

    Rules, in addition to those of ``open_connections.py``:

    1. Frames are parsed some at a time, of all WebSockets in turn.
    2. While the peer takes nothing only its last ping has an answer that waits (RFC 6455, 5.5.3).
    3. A message in many fragments takes no more than its bytes.
    4. A frame is parsed after the handshake has its answer (RFC 6455, 4.1). Until then its bytes
       wait, and no more of them are read.
    """

    config: LimitedConfig
    app: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._begin()
        self._has_spoken = False
        self._pong = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.looked.received_at = self.loop.time()
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_early = self.handshake_initiated and not self.handshake_complete
        if len(data) <= _SLICE and not self._unparsed and not is_early:
            self._parse(data)
            self._count_unfinished()
            return
        self._unparsed += data
        # No more than this is read until it is parsed.
        self.transport.pause_reading()
        if not is_early:
            self._take_turns()

    def start_keepalive(self) -> None:
        # The library calls it when it has accepted the handshake.
        super().start_keepalive()
        if self._unparsed:
            self._take_turns()

    async def run_asgi(self) -> None:
        app = self.app

        async def answered(*request: Any) -> None:
            await app(*request)
            if self.close_sent:
                # By a response of HTTP. The library would log each of them as an error.
                self.handshake_complete = True

        self.app = answered
        try:
            await super().run_asgi()
        finally:
            self.app = app

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._unparsed:
                self._take_turns()
            else:
                self.transport.resume_reading()
        return message

    def handle_ping(self) -> None:
        output = self.conn.data_to_send()
        if not self.writable.is_set():
            pongs = [frame for frame in output if frame[:1] == _PONG]
            output = [frame for frame in output if frame[:1] != _PONG]
            self._pong = pongs[-1] if pongs else self._pong
        if any(output):
            self.transport.write(b"".join(output))

    def resume_writing(self) -> None:
        super().resume_writing()
        pong, self._pong = self._pong, b""
        if pong and not self.close_sent:
            self.transport.write(pong)

    def handle_cont(self, event: Frame) -> None:
        if event.data:
            (whole,) = self.frames
            if not isinstance(whole, bytearray):
                whole = bytearray(whole)
                self.frames = [whole]  # pyright: ignore[reportAttributeAccessIssue]
            whole += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        self._has_spoken = True
        if self.curr_msg_data_type == "text" and not self._is_text():
            # RFC 6455, 8.1. The library would log this with a traceback, and close a second time.
            self.frames = []
            if self.conn.state is State.OPEN:
                self.conn.send_close(_INVALID_DATA)
                self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def _is_text(self) -> bool:
        data = b"".join(self.frames)
        if data.isascii():
            return True
        try:
            data.decode()
        except UnicodeDecodeError:
            return False
        return True

    def serve_only(self, paths: frozenset[str]) -> None:
        """Do nothing: the connection was admitted when it was one of HTTP."""

    def waits(self) -> bool:
        """Return False: a client that has sent a message may get one at any time."""
        return self.transport.is_closing() or not self._has_spoken

    def is_stuck(self) -> bool:
        return not self.writable.is_set()

    def drop(self) -> None:
        self.frames.clear()
        self._unparsed.clear()
        self.conn.reader.discard()
        if self.conn.state is State.OPEN:
            self.conn.send_close(_TRY_AGAIN_LATER)
            self.handle_parser_exception()
        else:
            self.transport.abort()

    def give_up(self) -> bool:
        return False

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            # Its header is more than the library takes, which says so and makes no event of it.
            self.handshake_complete = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _parse_unparsed(self) -> bool:
        if not self.read_paused:
            piece = bytes(self._unparsed[:_SLICE])
            del self._unparsed[:_SLICE]
            self._parse(piece)
        if self.transport.is_closing() or self.read_paused:
            return False
        if self._unparsed:
            return True
        self.transport.resume_reading()
        return False

    def _unfinished(self) -> tuple[int, Any]:
        message = sum(map(len, self.frames)) + len(self.conn.reader.buffer)
        return message + len(self._unparsed), self.scope
