from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.background import Background, stopped
from mcp_sessions.core.proxies import Proxies, scheme_of
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.seldom import Seldom
from mcp_sessions.serve.access_log import AccessLog
from mcp_sessions.serve.garbage import Collections, set_aside_everything
from mcp_sessions.serve.health import health_paths
from mcp_sessions.serve.open_connections import ConnectionLimits, OpenConnections
from mcp_sessions.serve.protocols import LimitedConfig, LimitedHttp, LimitedWebSocket
from mcp_sessions.serve.reloading import Reloading
from mcp_sessions.serve.sockets import LISTEN_BACKLOG, accept_some
from mcp_sessions.serve.systemd import READY, STOPPING, notify
from mcp_sessions.serve.tls import Certificate, TlsListener

logger = logging.getLogger(__name__)
# uvicorn says there that a request cannot be read.
logging.getLogger("uvicorn.error").addFilter(Seldom())

RUN_IS_REFUSED: ContextVar[Callable[[], NoReturn] | None] = ContextVar(
    "run_is_refused", default=None
)
"""Set where the code that would run a server is only loaded: it raises."""


@dataclass(slots=True, eq=False, repr=False)
class ClosingResponses:
    """An application whose responses, once it is asked to, are the last on their connections.

    A client that keeps connections open, such as a reverse proxy, then sends its next request on
    another one, and never on one that is being closed.

    Args:
        app: Serves.
    """

    _app: ASGIApp
    _are_last: bool = False

    def close_from_now_on(self) -> None:
        self._are_last = True

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)

        def sending(message: Message) -> Awaitable[None]:
            # Also of a request that began before.
            if self._are_last and message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            return send(message)

        return self._app(scope, receive, sending)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BehindProxies:
    """An application that is told who its clients are behind proxies."""

    _app: ASGIApp
    _proxies: Proxies

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        peer, _ = scope.get("client") or (None, 0)
        if scope["type"] in ("http", "websocket") and self._proxies.have(peer):
            client = self._proxies.client_of(_values(scope, b"x-forwarded-for")) or peer
            if client is not None:
                # Without a port: its connection ends at the proxy.
                scope["client"] = (client, 0)
            scheme = scheme_of(_values(scope, b"x-forwarded-proto"))
            if scheme is not None:
                is_websocket, is_safe = scope["type"] == "websocket", scheme in ("https", "wss")
                scope["scheme"] = ("ws" if is_websocket else "http") + ("s" if is_safe else "")
        return self._app(scope, receive, send)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for each, value in scope["headers"] if each == name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """How a server stops, and what it serves until then. Durations are in seconds."""

    delay: float
    """How long it goes on as ever after it said that it will stop, so that whoever sends it
    requests learns of it. Not after SIGINT."""

    grace: float
    """Seconds that running calls have left."""

    announce: Callable[[], None]
    """Says that it will stop."""

    needs_listener: Callable[[], bool]
    """Whether what runs may need new connections, and is served first."""

    drain: Callable[[float], Awaitable[None]]
    """Serves the running requests, within the grace."""


class DrainingServer(uvicorn.Server):
    """Runs uvicorn, and answers every request before it stops.

    SIGTERM: it announces that, and continues for ``delay`` seconds; each response is then the last
    on its connection. Then the listener is closed: a new connection is refused, and its client may
    safely try another server. Open connections are served. A connection that is idle, or that had
    no request for a second, is closed. Then the layer drains.

    SIGINT: without the delay. A second one ends everything that still runs at once.

    A program that handles SIGTERM itself gets it at the end. Any other one has then exited with 0:
    threads of its tools may still run, and nobody waits for them.

    Args:
        responses: The application of ``config``, or a part of it.
        leaving: How it stops.
        on_started: Called once when connections are taken.
        before: Runs before the first request. Its exception comes out of ``run``. Uvicorn
            would only log it, with its traceback, and end.
        reloading: Asked at SIGHUP; None: nothing can be reloaded, and SIGHUP ends the process.
    """

    config: LimitedConfig

    def __init__(
        self,
        config: LimitedConfig,
        responses: ClosingResponses,
        leaving: Leaving,
        *,
        on_started: Callable[[], None] | None,
        before: Callable[[], Awaitable[None]],
        reloading: Reloading | None,
    ) -> None:
        super().__init__(config)
        self._reloading = reloading
        self._background = Background()
        self._connections = config.open_connections
        self._responses = responses
        self._leaving = leaving
        self._on_started = on_started
        self._before = before
        self._leaves_at: float | None = None
        self._collections = Collections()
        self.ready = asyncio.Event()
        """Set when connections are taken, or never will be."""

        self.interrupted = False
        """SIGINT ended it."""

        self._is_stopping = self._is_announced = False
        self._is_urged = asyncio.Event()
        self._exits_at_sigterm = self._is_terminated = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._loop is not None:
            # uvicorn raises each that it learns of again, at the end: the first is enough.
            if sig == signal.SIGINT:
                if self.interrupted or self._is_stopping:
                    # A signal by itself ends no wait.
                    self._loop.call_soon_threadsafe(self._is_urged.set)
                # Otherwise it ends the delay.
                self.interrupted = True
            return
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if sig == signal.SIGTERM and self._exits_at_sigterm:
            self._is_terminated = self.should_exit = True
        else:
            # uvicorn raises it again at the end.
            super().handle_exit(sig, frame)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await self._before()
        self._exits_at_sigterm = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        await super().serve(sockets=sockets)
        if self._is_terminated:
            _exit()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = sockets if self.config.ssl is not None else None
        await super().startup(sockets=sockets if tls is None else [])
        if tls is not None and self.started:
            listeners = [TlsListener(each, self._protocol, self.config) for each in tls]
            self.servers += cast("list[asyncio.Server]", listeners)
        # Only here, where the process is ours.
        set_aside_everything()
        self.ready.set()
        if self.started:
            self._reload_when_asked()
            if self._on_started is not None:
                self._on_started()
            notify(READY)

    def _reload_when_asked(self) -> None:
        reloading = self._reloading
        if reloading is None or threading.current_thread() is not threading.main_thread():
            return
        reloading.ask_at_signal()
        self._background.loop("reading the files again", reloading.run)

    async def on_tick(self, counter: int) -> bool:
        self._collections.look()
        self._connections.look(asyncio.get_running_loop().time())
        if not await super().on_tick(counter):
            return False
        now = asyncio.get_running_loop().time()
        if self._leaves_at is None:
            self._announce()
            self._leaves_at = now + self._leaving.delay
        return self.interrupted or self.force_exit or now >= self._leaves_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_stopping = True
        self._announce()
        await self._background.close()
        drains_first = self._leaving.needs_listener()
        if drains_first:
            await self._drain()
        await self._close_listeners(sockets or [])
        await self._close_idle()
        if not drains_first:
            await self._drain()
        self._connections.give_up()
        ending = asyncio.create_task(self._end_tls())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            await stopped(ending)
        logger.info("stopped: every connection is closed")

    async def _drain(self) -> None:
        draining = asyncio.ensure_future(self._leaving.drain(self._leaving.grace))
        urged = asyncio.create_task(self._is_urged.wait())
        try:
            await asyncio.wait({draining, urged}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                logger.warning("interrupted again: running calls are cancelled now")
                await stopped(draining)
                await self._leaving.drain(0)
            else:
                await draining
        finally:
            await stopped(draining, urged)

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            why = "SIGINT" if self.interrupted else "SIGTERM"
            logger.info(
                "draining after %s: new connections are accepted for %g s, calls may run for %g s",
                why,
                0 if self.interrupted else self._leaving.delay,
                self._leaving.grace,
            )
            notify(STOPPING)
        self._leaving.announce()
        self._responses.close_from_now_on()

    async def _close_listeners(self, sockets: Sequence[socket.socket]) -> None:
        """Stop listening, and serve every connection that the system has accepted already."""
        # A descriptor of our own holds what waits until the others are closed.
        try:
            waiting = [listener.dup() for listener in sockets]
        except OSError as failed:
            logger.warning("waiting connections are not served: %s", failed)
            waiting = []
        for server in self.servers:
            server.close()
        for listener in sockets:
            listener.close()
        # An event loop may close what it was given in its next turn.
        await asyncio.sleep(0)
        accepted: list[socket.socket] = []
        for listener in waiting:
            more, failed = accept_some(listener)
            if failed is not None:
                logger.warning("waiting connections are not served: %s", failed)
            accepted += more
            listener.close()
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        within = FIRST_REQUEST if tls is not None else None
        made = (
            loop.connect_accepted_socket(
                self._protocol, connection, ssl=tls, ssl_handshake_timeout=within
            )
            for connection in accepted
        )
        for failed in await asyncio.gather(*made, return_exceptions=True):
            # A client that does not complete its handshake is gone.
            if isinstance(failed, BaseException) and not isinstance(failed, OSError):
                raise failed

    def _protocol(self) -> asyncio.Protocol:
        make = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def _close_idle(self) -> None:
        """Close every connection that waits for a request, the others after their response. A
        new one gets :data:`FIRST_REQUEST` seconds for what it was made for.
        """
        # Requests that have arrived are read first.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        until = loop.time() + FIRST_REQUEST
        while True:
            new = 0
            for connection in list(self.server_state.connections):
                # A connection without a cycle of requests and responses is a WebSocket. The layer
                # drains these.
                cycle = getattr(connection, "cycle", _NO_CYCLES)
                if cycle is None and loop.time() < until:
                    new += 1
                elif cycle is not _NO_CYCLES:
                    connection.shutdown()
            if not new:
                return
            await asyncio.sleep(0.02)

    async def _end_tls(self) -> None:
        """Wait no longer than :data:`TLS_END` for clients to say that their TLS ends, too. Many
        read nothing while they have no request.
        """
        while self.config.ssl is not None:
            await asyncio.sleep(TLS_END)
            for connection in list(self.server_state.connections):
                transport = cast("Any", connection).transport
                if transport.is_closing() and not transport.get_write_buffer_size():
                    transport.abort()


def _exit() -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients and proxies keep theirs. So this
side never closes a connection on which a request may be on its way.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How HTTP and WebSocket are served; see :meth:`~mcp_sessions.layer.SessionLayer.run`."""

    limits: ConnectionLimits
    health: str | None = None
    log_level: str = "warning"
    access_log: bool = False
    forwarded_allow_ips: str | None = None
    certificate: Certificate | None = None
    """None: connections are not encrypted."""

    reloading: Reloading | None = None
    """Reads files again. None: there are none."""


def http_config(app: ASGIApp, settings: HttpSettings) -> LimitedConfig:
    certificate = settings.certificate
    return LimitedConfig(
        app,
        OpenConnections(settings.limits, health_paths(settings.health)),
        certificate.context if certificate is not None else None,
        http=LimitedHttp,
        interface="asgi3",
        log_level=settings.log_level,
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=KEEP_ALIVE,
        # Without it some clients, such as fetch of Node.js, close theirs after 4 seconds.
        headers=[("keep-alive", f"timeout={KEEP_ALIVE}")],
        lifespan="on",
        backlog=LISTEN_BACKLOG,
        server_header=False,
        log_config=None,
        ws=LimitedWebSocket,
        ws_max_size=settings.limits.max_message,
        ws_ping_interval=20,
        ws_ping_timeout=20,
        ws_per_message_deflate=False,
    )


def _proxies(named: str | None) -> Proxies | None:
    source = "forwarded_allow_ips" if named is not None else "FORWARDED_ALLOW_IPS"
    # uvicorn's own variable. Without it uvicorn believes 127.0.0.1, which nobody named.
    text = named if named is not None else os.environ.get(source)
    try:
        return Proxies(text) if text is not None else None
    except ConfigurationError as wrong:
        raise ConfigurationError(f"{source}: {wrong}") from None


def draining_server(
    app: ASGIApp,
    leaving: Leaving,
    on_started: Callable[[], None] | None,
    before: Callable[[], Awaitable[None]],
    settings: HttpSettings,
) -> DrainingServer:
    """Serves an application; see :class:`DrainingServer` and :func:`http_config`."""
    responses = ClosingResponses(app)
    served: ASGIApp = AccessLog(responses) if settings.access_log else responses
    proxies = _proxies(settings.forwarded_allow_ips)
    if proxies is not None:
        served = BehindProxies(served, proxies)
    config = http_config(served, settings)
    return DrainingServer(
        config,
        responses,
        leaving,
        on_started=on_started,
        before=before,
        reloading=settings.reloading,
    )


TLS_END = 1.0
"""Seconds in which a client answers that a connection over TLS is closed."""

FIRST_REQUEST = 1.0
"""Seconds in which a request arrives on a connection that was made for it."""

_NO_CYCLES = object()
