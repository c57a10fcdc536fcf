"""What an application holds: a wrapped server with sessions.

layer = SessionLayer(mcp)
app = layer.asgi_app()          # or layer.run("http"), or layer.routes() to mount
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.core.messages import EXTENSION
from mcp_sessions.errors import ConfigurationError, Detached, StoreUnavailable
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity, mint_process
from mcp_sessions.server.admin import Sessions
from mcp_sessions.server.changes import Changes
from mcp_sessions.server.connection import TransportConnection
from mcp_sessions.server.detached import tell_detached
from mcp_sessions.server.gates import Gates
from mcp_sessions.server.host import Host
from mcp_sessions.server.hub import Hub
from mcp_sessions.server.publisher import Publisher
from mcp_sessions.server.reaper import Reaper
from mcp_sessions.server.replicas import Replicas
from mcp_sessions.server.router import Router
from mcp_sessions.server.sdk.http import (
    HttpShell,
    http_shell,
    principal_of,
    security_settings,
)
from mcp_sessions.server.sdk.kernel import HANDSHAKE_VERSIONS, SdkUpstream, primes_streams
from mcp_sessions.server.sdk.modern import SdkModernRules
from mcp_sessions.server.session_methods import SessionMethods
from mcp_sessions.serving import DrainingServer, MountedApp, listen_on
from mcp_sessions.stores.base import SessionStore
from mcp_sessions.stores.stateless import Stateless
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.credentials import CredentialWatch, StillValid
from mcp_sessions_transports.doorkeeper import Doorkeeper
from mcp_sessions_transports.duplex import DuplexConnection
from mcp_sessions_transports.http_connection import HttpConnection
from mcp_sessions_transports.http_handshake import HandshakeHttp
from mcp_sessions_transports.http_modern import ModernHttp
from mcp_sessions_transports.http_sessions import TransportSessions
from mcp_sessions_transports.origin import OriginGuard, SecuritySettings
from mcp_sessions_transports.served import Served
from mcp_sessions_transports.stdio import StdioBinding, standard_streams
from mcp_sessions_transports.streamable_http import StreamableHttp
from mcp_sessions_transports.websocket import WebSocketBinding

logger = logging.getLogger(__name__)

DEFAULT_PATH = "/mcp"
MAX_BODY = 4 * 1024 * 1024
"""Bytes of one HTTP request body; a larger one is answered 413."""

_LAST_WORDS = 2.0
"""Seconds that WebSockets and pipes have, at the end, to take what waits for them."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class SessionLayer:
    """Sessions for one MCP server.

    It runs inside :meth:`lifespan`, which :meth:`asgi_app` and :meth:`run` enter by
    themselves; an application that mounts :meth:`routes` passes it on. It runs once.
    """

    def __init__(
        self,
        server: object,
        *,
        store: SessionStore | str | None = "memory://",
        policy: SessionPolicy | None = None,
        security: SessionSecurity | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take what it works with.

        Args:
            server: An ``MCPServer`` or lowlevel ``Server`` of the SDK, or a ``FastMCP``.
            store: Where sessions are remembered, or its URL. None: nowhere; then
                ``sessions/create`` with ``state`` is all there is, and nothing is revoked.
            policy: Every limit; the defaults if None.
            security: The keys that seal ``state``. None: those of ``MCP_SESSIONS_KEYS`` if
                it is set, else keys that end with this process.
            clock: Seconds since 1970.

        Raises:
            ConfigurationError: The server cannot be wrapped, or the URL names no store.
        """
        self.policy = policy if policy is not None else SessionPolicy()
        self._clock = clock
        self._upstream = SdkUpstream(server)
        self.security = (security or SessionSecurity.default()).bound_to(self._upstream.name)
        if store is None:
            self.store: SessionStore = Stateless(self.security)
            self._upstream.adds_subscriptions = False
        else:
            self.store = open_store(store) if isinstance(store, str) else store
        self._hub = Hub(self.store, clock)
        self._publisher = Publisher(self.store, self._hub, self.policy, clock)
        self._changes = Changes(self.store, self._hub, self._publisher, self.policy, clock)
        self._host = Host(
            self.store,
            self._hub,
            self._publisher,
            self._changes,
            self.policy,
            clock,
            process=mint_process(),
            stamp=lambda result, record: self._methods.stamp(result, record),
        )
        self._methods = SessionMethods(self.store, self._hub, self._host, clock, self.security)
        self._gates = Gates()
        self.sessions = Sessions(self.store, clock, self._methods.finish)
        """Lists and ends sessions."""

        self._reaper = Reaper(self.store, self._host, self.policy, clock, self._forget)
        self._methods.make_room = self._make_room
        self._router = Router(
            store=self.store,
            hub=self._hub,
            publisher=self._publisher,
            host=self._host,
            upstream=self._upstream,
            methods=self._methods,
            gates=self._gates,
            advertise=self._advertise,
            clock=clock,
        )
        self._replicas: Replicas | None = None
        exchange = self.store.exchange
        if exchange is not None:
            self._replicas = Replicas(self.store, exchange, self._host.process, clock)
            self._hub.replicas = self._replicas
            self._methods.telling = self._router.share(
                self._replicas, self._changes, self._upstream.echo
            )
        self._endpoints: list[StreamableHttp] = []
        self._bindings: list[HandshakeHttp] = []
        self._state: Literal["new", "running", "over"] = "new"
        self._store_is_open = False

    # --- serving -------------------------------------------------------------------------

    def asgi_app(
        self,
        path: str = DEFAULT_PATH,
        *,
        host: str = "127.0.0.1",
        security: SecuritySettings | None = None,
        max_body: int = MAX_BODY,
    ) -> ASGIApp:
        """An ASGI application that serves Streamable HTTP on ``path``.

        What the server's own HTTP application has beside and before its MCP endpoint
        (authentication, custom routes, middleware) is in it.

        Args:
            path: Where clients connect.
            host: Where it will listen. On a loopback host, Host and Origin are checked even
                without ``security``; for a FastMCP server, its own setting decides.
            security: The SDK's ``TransportSecuritySettings``: allowed hosts and origins.
            max_body: Bytes of one request body.

        Raises:
            ConfigurationError: Authentication was set up that cannot be taken over.
        """
        endpoint, shell, served, guard = self._endpoint(path, host, security, max_body)
        inner = Starlette(
            routes=shell.routes,
            middleware=shell.middleware,
            lifespan=lambda _: self.lifespan(),
        )
        for name, value in shell.state.items():
            setattr(inner.state, name, value)
        websocket = self._websocket(endpoint, inner, served, guard)
        return MountedApp(inner, endpoint if shell.is_bare else None, websocket, path)

    def routes(
        self,
        path: str = DEFAULT_PATH,
        *,
        host: str = "127.0.0.1",
        security: SecuritySettings | None = None,
        max_body: int = MAX_BODY,
    ) -> list[BaseRoute]:
        """The same as routes, to mount in a Starlette or FastAPI application.

        The application must run the layer: ``Starlette(lifespan=layer.lifespan, …)``.
        Arguments and errors are those of :meth:`asgi_app`.
        """
        endpoint, shell, served, guard = self._endpoint(path, host, security, max_body)
        for route in shell.routes:
            if isinstance(route, (Route, Mount)):
                for entry in reversed(shell.middleware):
                    route.app = entry.cls(route.app, *entry.args, **entry.kwargs)
        door = Starlette(routes=shell.routes)
        for name, value in shell.state.items():
            setattr(door.state, name, value)
        websocket = self._websocket(endpoint, door, served, guard, at=path)
        return [*shell.routes, WebSocketRoute(path, endpoint=websocket)]

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """Everything the layer does happens inside; an ASGI lifespan.

        Args:
            app: Ignored: frameworks pass themselves.

        Raises:
            ConfigurationError: The layer runs, or ran, already.
        """
        return self._run()

    def run(
        self,
        transport: Literal["http", "stdio"] = "http",
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        path: str = DEFAULT_PATH,
        security: SecuritySettings | None = None,
        max_body: int = MAX_BODY,
        sock: socket.socket | None = None,
        on_started: Callable[[], None] | None = None,
        grace: float = 10,
        log_level: str = "warning",
    ) -> None:
        """Serve until SIGINT or SIGTERM, or until the end of standard input, then drain.

        Args:
            transport: ``http``: Streamable HTTP and WebSocket. ``stdio``: the client at the
                other end of standard input and output; with a ``port`` or a ``sock``, HTTP
                and WebSocket as well, on the same sessions.
            port: 8000 if None, for ``http``.
            sock: Listen on this bound socket instead of on ``host`` and ``port``.
            on_started: Called once when connections are taken.
            grace: Seconds that running calls get at the end.
            log_level: uvicorn's.

        Raises:
            ConfigurationError: The transport is unknown, or the store cannot be opened; or see
                :meth:`asgi_app`.
            StoreUnavailable: The store is away.
            OSError: The address cannot be listened on.
            KeyboardInterrupt: SIGINT ended an HTTP server, which has drained.
        """
        if transport not in ("http", "stdio"):
            raise ConfigurationError(f"unknown transport {transport!r}: 'http' or 'stdio'")
        app = self.asgi_app(path, host=host, security=security, max_body=max_body)
        if transport == "stdio" and port is None and sock is None:
            asyncio.run(self._serve_stdio(None, grace))
            return
        listener = sock if sock is not None else listen_on(host, port or 8000)
        config = uvicorn.Config(
            app,
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=5,
            lifespan="on",
            server_header=False,
            log_config=None,
            ws="websockets-sansio",
            ws_max_size=self.policy.max_message,
            ws_ping_interval=20,
            ws_ping_timeout=20,
            ws_per_message_deflate=False,
        )
        server = DrainingServer(config, self.drain, grace, on_started, self._open_store)
        with listener:
            if transport == "stdio":
                asyncio.run(self._serve_stdio((server, listener), grace))
            else:
                server.run(sockets=[listener])
        if server.interrupted:
            # uvicorn raises the signal again, and a process that was started with SIGINT
            # ignored (a shell's background job) would not notice that.
            raise KeyboardInterrupt

    async def _serve_stdio(
        self, beside: tuple[DrainingServer, socket.socket] | None, grace: float
    ) -> None:
        """Serve standard input and output until the input ends.

        Args:
            beside: A server, and the socket it listens on, that serves the same layer.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        if beside is None:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
        with standard_streams() as (wire_in, wire_out):
            async with contextlib.AsyncExitStack() as stack:
                serving: asyncio.Task[None] | None = None
                if beside is None:
                    await stack.enter_async_context(self.lifespan())
                else:
                    await self._open_store()
                    server, listener = beside
                    serving = asyncio.create_task(server.serve(sockets=[listener]))
                    await server.ready.wait()
                served = self._served_at(MAX_BODY, None)
                binding = StdioBinding(served, SdkModernRules(self._upstream))
                piped = asyncio.create_task(binding.serve(wire_in, wire_out))
                stopped = asyncio.create_task(stop.wait())
                waiting: set[asyncio.Task[Any]] = {piped, stopped}
                if serving is not None:
                    waiting.add(serving)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                await self.drain(grace)
                if not piped.done():
                    await asyncio.wait({piped}, timeout=2)
                    piped.cancel()
                await asyncio.gather(piped, return_exceptions=True)
                if serving is not None and beside is not None:
                    beside[0].should_exit = True
                    await serving

    async def drain(self, grace: float = 10) -> None:
        """Stop taking requests, tell clients to come back, let what runs finish.

        New HTTP requests are answered 503 with ``Retry-After``; clients that declared our
        extension hear ``notifications/sessions/detached`` with reason ``draining``; what
        still runs after ``grace`` seconds is cancelled and answered -31012. Sessions stay
        in the store. Calling it again changes nothing.
        """
        first = all(endpoint.retry_after is None for endpoint in self._endpoints)
        for endpoint in self._endpoints:
            endpoint.retry_after = self.policy.reconnect_spread
        if first:
            for connection in self._hub.connections():
                await self._tell_draining(connection)
        left = await self._host.drain(grace)
        if self._replicas is not None:
            # Not before: until then it answers what others wait for.
            await self._replicas.leave()
        if left:
            logger.warning("%d requests were cancelled at shutdown", left)
        closing: list[asyncio.Task[Any]] = []
        for connection in self._hub.connections():
            connection.close()
            if isinstance(connection, DuplexConnection):
                closing.append(asyncio.create_task(connection.over.wait()))
        if closing:
            # The server that runs us closes every WebSocket next, whatever waits there.
            await asyncio.wait(closing, timeout=_LAST_WORDS)
            for task in closing:
                task.cancel()

    async def _tell_draining(self, connection: TransportConnection) -> None:
        sessions = list(connection.attached)
        if isinstance(connection, HttpConnection):
            if self._replicas is not None and not connection.is_streaming:
                # Other replicas serve it on, and nothing here is in its way.
                return
            # Stock clients, too, come back one by one. Alone, this process needs a moment to
            # be there again, and some of them give up for ever when they find nobody twice.
            least = 0.5 if self._replicas is None else 0.1
            connection.come_back_after(random.uniform(least, 1) * self.policy.reconnect_spread)
            record = await self.store.load(connection.session_id, now=0)
            sessions.extend(record.carried if record is not None else ())
        for session_id in sessions:
            await tell_detached(
                connection,
                session_id,
                Detached.DRAINING,
                retry_after=self.policy.reconnect_spread,
            )

    def require_session(self, *, tools: Iterable[str] = (), methods: Iterable[str] = ()) -> None:
        """Serve these only inside a session; outside of one they answer -31044.

        Args:
            tools: Names of tools.
            methods: JSON-RPC methods, such as ``resources/read``.
        """
        self._gates.add(tools=tools, methods=methods)

    # --- changes ---------------------------------------------------------------------------

    async def notify_resource_updated(self, uri: str) -> None:
        """Tell every session that subscribed to ``uri`` that it changed.

        Returns when the change is stored for each of them.
        """
        await self._change("notifications/resources/updated", {"uri": str(uri)})

    async def notify_tools_changed(self) -> None:
        """Tell every session that the list of tools changed."""
        await self._change("notifications/tools/list_changed", None)

    async def notify_prompts_changed(self) -> None:
        """Tell every session that the list of prompts changed."""
        await self._change("notifications/prompts/list_changed", None)

    async def notify_resources_changed(self) -> None:
        """Tell every session that the list of resources changed."""
        await self._change("notifications/resources/list_changed", None)

    async def _change(self, method: str, params: Mapping[str, Any] | None) -> None:
        if self._state != "running":
            raise ConfigurationError(_NOT_RUNNING)
        # On the server's own bus, if it has one, so that its modern-era listeners hear it;
        # it comes back to the hub from there.
        if not await self._upstream.publish(method, params):
            self._changes.announce(method, params)
        await self._changes.settle()

    # --- inside --------------------------------------------------------------------------------

    async def _open_store(self) -> None:
        """Open the store, if it is not open yet."""
        if not self._store_is_open:
            await self.store.open(self.policy)
            self._store_is_open = True

    @asynccontextmanager
    async def _run(self) -> AsyncGenerator[None]:
        if self._state != "new":
            raise ConfigurationError("a SessionLayer runs once; make another one")
        self._state = "running"
        await self._open_store()
        if self.security.is_ephemeral and self.store.survives_process:
            logger.warning(
                "sessions outlive this process, but the keys that seal their state do not: "
                "set MCP_SESSIONS_KEYS"
            )
        try:
            async with self._upstream.lifespan():
                stop = self._upstream.on_change(self._changes.announce)
                if self._replicas is not None:
                    await self._replicas.join()
                tasks = [asyncio.create_task(self._reaper.run())]
                if self._replicas is not None:
                    tasks.append(asyncio.create_task(self._replicas.run()))
                try:
                    yield
                finally:
                    stop()
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    await self._stop()
        finally:
            self._state = "over"
            await self.store.close()

    async def _stop(self) -> None:
        try:
            await self.drain(grace=0)
            for binding in self._bindings:
                await binding.close()
            for connection in self._hub.connections():
                if isinstance(connection, HttpConnection):
                    # It is in the store, and goes on there with what is attached to it.
                    await self._hub.let_go(connection)
                else:
                    await self._hub.remove(connection)
        except StoreUnavailable:
            # What it remembers of this process's connections is seen to be dead by others.
            logger.warning("the store is away while the server stops")
        finally:
            if self._replicas is not None:
                await self._replicas.close()

    def _endpoint(
        self, path: str, host: str, security: SecuritySettings | None, max_body: int
    ) -> tuple[StreamableHttp, HttpShell, Served, OriginGuard]:
        settings = security_settings(self._upstream, host, security)
        endpoint: StreamableHttp | None = None

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if endpoint is None:
                raise AssertionError("the endpoint is made before anything is served")
            await endpoint(scope, receive, send)

        shell = http_shell(self._upstream, serve, path=path, host=host, security=settings)
        served = self._served_at(max_body, shell.still_valid)
        guard = OriginGuard(settings)
        sessions = TransportSessions(served)
        self._hub.revive = sessions.revive
        handshake = HandshakeHttp(served, sessions)
        endpoint = StreamableHttp(
            handshake=handshake,
            modern=ModernHttp(served, SdkModernRules(self._upstream), guard),
            handshake_versions=HANDSHAKE_VERSIONS,
            guard=guard,
            principal_of=principal_of,
            ready=self._check_running,
        )
        self._endpoints.append(endpoint)
        self._bindings.append(handshake)
        return endpoint, shell, served, guard

    def _served_at(self, max_body: int, still_valid: StillValid | None) -> Served:
        """What a binding serves, and with what."""
        return Served(
            router=self._router,
            hub=self._hub,
            host=self._host,
            methods=self._methods,
            upstream=self._upstream,
            store=self.store,
            policy=self.policy,
            clock=self._clock,
            primes=primes_streams,
            max_body=max_body,
            credentials=CredentialWatch(still_valid, self.policy.credential_check, self._clock),
            replicas=self._replicas,
        )

    def _websocket(
        self,
        endpoint: StreamableHttp,
        door: ASGIApp,
        served: Served,
        guard: OriginGuard,
        at: str | None = None,
    ) -> ASGIApp:
        """The WebSocket endpoint.

        Args:
            endpoint: Where HTTP requests are served.
            door: What HTTP requests to the endpoint go through.
            at: The endpoint's path behind the door, if the connection's is another.
        """
        doorkeeper = Doorkeeper(_at(door, at), principal_of)
        rules = SdkModernRules(self._upstream)
        binding = WebSocketBinding(served, rules, guard, doorkeeper, lambda: endpoint.retry_after)

        return _Ready(self._check_running, binding.serve)

    def _check_running(self) -> None:
        if self._state != "running":
            raise ConfigurationError(_NOT_RUNNING)

    async def _forget(self, record: Any) -> None:
        await self._methods.forget(record)

    async def _make_room(self) -> None:
        await self._reaper.round()

    def _advertise(self, result: dict[str, Any]) -> None:
        """Our capabilities, in an ``initialize`` result. Raw: the SDK's models drop them."""
        capabilities = result.setdefault("capabilities", {})
        capabilities["sessions"] = {}
        extensions = capabilities.setdefault("extensions", {})
        policy = self.policy
        if not self.store.remembers:
            extensions[EXTENSION] = {
                "transports": ["streamable-http", "websocket", "stdio"],
                "features": ["create", "delete", "state"],
            }
            return
        extensions[EXTENSION] = {
            "window": {
                "maxEvents": policy.max_events,
                "maxBytes": policy.max_bytes,
                "maxAge": policy.max_age,
            },
            "requestKeys": {
                "lifetime": policy.request_key_lifetime,
                "maxBytes": policy.request_key_bytes,
            },
            "transports": ["streamable-http", "websocket", "stdio"],
            "features": ["start", "resume", "end", "create", "delete", "state", "requestKey"],
        }


class _Ready:
    """An ASGI application that is served while the layer runs. A class: Starlette's routes
    take a plain function for something else.
    """

    def __init__(self, ready: Callable[[], None], app: ASGIApp) -> None:
        self._ready = ready
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._ready()
        await self._app(scope, receive, send)


def _at(app: ASGIApp, path: str | None) -> ASGIApp:
    """``app``, asked as if the request were for ``path``."""
    if path is None:
        return app

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "path": path, "root_path": ""}, receive, send)

    return asked


_NOT_RUNNING = (
    "the SessionLayer does not run: pass layer.lifespan to the application that mounts it"
)
