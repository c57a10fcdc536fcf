"""uvicorn's protocols, with the bounds that it has not: see ``open_connections.py``.

A client's bytes are parsed some at a time. A thousand frames fit into one packet, and whoever asks
for something else waits until they are parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from mcp_sessions.authentication.pace import DELAYS
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
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
    from websockets.frames import Frame
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

MAX_HEADER = 65_536
"""Bytes of a request's header, or of one packet in which it ends."""

MAX_FIELDS = 1_000
"""Fields of a header, and of what follows a chunked body."""

_SLICE = 2_048
"""Bytes of frames that are parsed at a time: some 300 of the smallest, in 1 ms."""

_PONG = b"\x8a"

_INVALID_DATA = 1007
"""The close code of RFC 6455, 7.4.1, for a text that is no UTF-8."""


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


class _Delayed:
    """A connection whose refusals may wait: see ``pace.py``."""

    __slots__ = ()
    _connections: OpenConnections
    _delay: asyncio.Future[None] | None
    app_state: dict[str, Any]
    transport: asyncio.Transport

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


class LimitedHttp(_Delayed, HttpProtocol):
    # The library's own attributes are as many as instances share the names of: with one more of
    # ours in the same place, each connection would have a table of its own.
    __slots__ = (
        "_connections",
        "_delay",
        "_header",
        "_is_extra",
        "_is_upgraded",
        "_receives",
        "looked",
    )

    config: LimitedConfig
    app: Any
    transport: asyncio.Transport
    cycle: Any
    """None before the first request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._connections = self.config.open_connections
        self.looked = Looked()
        self._delay = None
        # Each request has a copy.
        self.app_state = {**self.app_state, DELAYS: self.delay}
        self._is_extra = False
        self._header = 0
        """Bytes that came of a header that is not whole."""

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
        self._connections.closed(self)
        self.end_delay()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.looked.received_at = self.loop.time()
        if len(data) > MAX_HEADER and self._begins():
            if data.find(b"\r\n\r\n", 0, MAX_HEADER) < 0:
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)
        if self._is_upgraded or self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and self.scope is cycle.scope:
            self._header = 0
            if not cycle.more_body:
                # Whole.
                self._receives = False
                self.looked.late_at = None
                return
            is_large = len(self.headers) > MAX_FIELDS
        else:
            self._header += len(data)
            is_large = self._header > MAX_HEADER
        if is_large:
            self._refuse(b"431 Request Header Fields Too Large")
        elif not self._receives:
            self._receives = True
            self.looked.late_at = self.looked.received_at + self._connections.limits.receive_timeout

    def handle_websocket_upgrade(self, *arguments: Any) -> None:
        self._connections.closed(self)
        self.end_delay()
        self._is_upgraded = True
        if self._is_extra:
            self._refuse(b"503 Service Unavailable\r\nretry-after: %d" % RETRY_AFTER)
            return
        super().handle_websocket_upgrade(*arguments)

    def serve_only(self, paths: frozenset[str]) -> None:
        self._is_extra = True
        self.app = OnlyHealth(self.app, paths)

    def waits(self) -> bool:
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            return True
        return cycle.more_body and not cycle.response_started

    def is_stuck(self) -> bool:
        return self.flow.write_paused

    def give_up(self) -> bool:
        if not self.waits():
            return False
        cycle = self.cycle
        if self._header or (cycle is not None and not cycle.response_complete):
            self._refuse(b"408 Request Timeout")
            return True
        # There is nothing to answer: it was silent, or was answered before its body was here.
        self.transport.close()
        return self._receives

    def _begins(self) -> bool:
        cycle = self.cycle
        if cycle is None or self.scope is not cycle.scope:
            return True
        return cycle.response_complete and not cycle.more_body

    def _refuse(self, status: bytes) -> None:
        """Answer bytes that uvicorn does not take for a request, and close."""
        self.looked.late_at = None
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
        )
        self.transport.close()


class LimitedWebSocket(_Delayed, WebSocketsSansIOProtocol):
    """A WebSocket, within the bounds.

    Rules, in addition to those of ``open_connections.py``:

    1. Frames are parsed some at a time, of all WebSockets in turn.
    2. While the peer takes nothing only its last ping has an answer that waits (RFC 6455, 5.5.3).
    3. A message in many fragments takes no more than its bytes.
    """

    config: LimitedConfig
    app: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._connections = self.config.open_connections
        self.looked = Looked()
        self._delay = None
        self.app_state = {**self.app_state, DELAYS: self.delay}
        self._unparsed = bytearray()
        self._is_in_turn = False
        self._has_spoken = False
        self._pong = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.looked.received_at = self.loop.time()
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self.end_delay()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) <= _SLICE and not self._unparsed:
            self._parse(data)
            return
        self._unparsed += data
        # No more than this is read until it is parsed.
        self.transport.pause_reading()
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

    def give_up(self) -> bool:
        return False

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            # Its header is more than the library takes, which says so and makes no event of it.
            self.handshake_complete = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _take_turns(self) -> None:
        if not self._is_in_turn:
            self._is_in_turn = True
            self._connections.steps.add(self._step)

    def _step(self) -> bool:
        self._is_in_turn = False
        if self.transport.is_closing():
            self._unparsed.clear()
        elif not self.read_paused:
            piece = bytes(self._unparsed[:_SLICE])
            del self._unparsed[:_SLICE]
            try:
                self._parse(piece)
            except BaseException:
                # As the event loop does where it calls a protocol.
                self.transport.abort()
                raise
        if self.transport.is_closing() or self.read_paused:
            return False
        if self._unparsed:
            self._is_in_turn = True
            return True
        self.transport.resume_reading()
        return False
