"""What an application holds: a wrapped server with sessions.

layer = SessionLayer(mcp)
app = layer.asgi_app()          # or layer.run("http"), or layer.routes() to mount
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from mcp_sessions.access_log import AccessLog
from mcp_sessions.background import Background
from mcp_sessions.draining import Draining
from mcp_sessions.endpoint import Endpoint
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.health import Health
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity, mint_process
from mcp_sessions.server.cluster.bus import ClusterBus, LocalBus
from mcp_sessions.server.cluster.handlers import ClusterHandlers
from mcp_sessions.server.cluster.shared_bus import SharedBus
from mcp_sessions.server.delivery.announced import noting
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.delivery.streams import Streams
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.admin import Sessions
from mcp_sessions.server.dispatch.capabilities import advertise
from mcp_sessions.server.dispatch.gates import Gates
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.dispatch.reaper import Reaper
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.dispatch.session_methods import SessionMethods
from mcp_sessions.server.requests.outcomes import Outcomes
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, primes_streams
from mcp_sessions.server.upstream.sdk.modern import SdkModernRules
from mcp_sessions.serving import (
    RUN_IS_REFUSED,
    ClosingResponses,
    DrainingServer,
    Leaving,
    MountedApp,
    listen_on,
)
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Peer
from mcp_sessions.stores.stateless import Stateless
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.credentials import CredentialWatch, StillValid
from mcp_sessions_transports.http.cluster import ClusterStreams
from mcp_sessions_transports.http.transport import HttpTransport
from mcp_sessions_transports.origin import SecuritySettings
from mcp_sessions_transports.served import Served
from mcp_sessions_transports.stdio.server import StdioBinding, standard_streams

logger = logging.getLogger(__name__)

DEFAULT_PATH = "/mcp"
MAX_BODY = 4 * 1024 * 1024
"""Bytes of one HTTP request body; a larger one is answered 413."""

DRAIN_DELAY = 3.0
"""Seconds in which a proxy's idle connections to this process come to an end, so that none is
closed just when a request is sent on it."""

KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients and proxies keep theirs. Who
closes it first is then never the one that may get a request on it."""

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
        process, exchange = mint_process(), self.store.exchange
        self._bus: ClusterBus = LocalBus(process)
        if exchange is not None:
            self._bus = SharedBus(self.store, exchange, process)
        self._owed = Owed()
        self._questions = PendingQuestions(process if self._bus.is_shared else None)
        self._hub = Hub(self.store, clock, self._owed, self._bus, self._questions)
        self._publisher = Publisher(
            self.store, self._hub, self.policy, clock, self._bus, self._questions
        )
        self._broadcaster = ChangeBroadcaster(
            self.store, self._hub, self._publisher, self.policy, clock, self._bus
        )
        outcomes = Outcomes(
            self.store,
            self.policy,
            clock,
            self._owed,
            stamp=lambda result, record: self._methods.stamp(result, record),
        )
        self._runner = RequestRunner(outcomes, self._questions, self.policy, clock, process=process)
        self._methods = SessionMethods(
            self.store, self._hub, self._runner, clock, self.security, self._owed, self._bus
        )
        self._gates = Gates()
        self.sessions = Sessions(self.store, clock, self._methods.finish)
        """Lists and ends sessions."""

        self._reaper = Reaper(
            self.store, self._runner, self._hub, self.policy, clock, self._methods.forget
        )
        self._methods.make_room = self._reaper.make_room
        streams = Streams(self.store, clock)

        def new_transport(session_id: SessionId, peer: Peer) -> HttpTransport:
            return HttpTransport(
                session_id,
                streams,
                self.policy,
                primes=primes_streams(peer.protocol_version),
                is_shared=self._bus.is_shared,
            )

        self._transport_sessions = TransportSessions(
            self.store,
            self._hub,
            clock,
            self._bus,
            held=lambda: self._runner.held,
            listed=self._upstream.listed,
            new_transport=new_transport,
        )
        self._hub.revive = self._transport_sessions.revive
        self._router = Router(
            store=self.store,
            hub=self._hub,
            publisher=self._publisher,
            runner=self._runner,
            questions=self._questions,
            upstream=self._upstream,
            methods=self._methods,
            gates=self._gates,
            policy=self.policy,
            advertise=lambda result: advertise(result, self.policy, remembers=self.store.remembers),
            clock=clock,
            bus=self._bus,
        )
        self._handlers = ClusterHandlers(
            self._bus,
            self.store,
            self._hub,
            self._publisher,
            self._broadcaster,
            self._questions,
            self._runner,
            self._router.joining,
            ClusterStreams(
                self._hub,
                self._runner,
                self._bus,
                self._transport_sessions,
                self.policy,
                clock,
            ),
            forget=self._methods.forget_here,
            publish=self._upstream.echo,
        )
        self._endpoints: list[Endpoint] = []
        self._draining = Draining(
            self._endpoints,
            self.store,
            self._hub,
            self._runner,
            self._owed,
            self.policy,
            self._bus,
        )
        self._health = Health(
            self.store,
            clock,
            is_running=lambda: self._state == "running",
            is_leaving=lambda: self._draining.is_leaving,
        )
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
        health: str | None = None,
        application: Callable[[], ASGIApp] | None = None,
    ) -> MountedApp:
        """An ASGI application that serves Streamable HTTP on ``path``.

        What the server's own HTTP application has beside and before its MCP endpoint
        (authentication, custom routes, middleware) is in it. An application that mounts it
        runs its ``lifespan``: ``FastAPI(lifespan=app.lifespan)``.

        Args:
            path: Where clients connect.
            host: Where it will listen. On a loopback host, Host and Origin are checked even
                without ``security``; for a FastMCP server, its own setting decides.
            security: The SDK's ``TransportSecuritySettings``: allowed hosts and origins.
            max_body: Bytes of one request body.
            health: What ``healthz`` and ``readyz`` are under; None: they are not served. See
                :meth:`health_routes`.
            application: Answers with the application that the HTTP server calls, if something
                stands around this one. The handshake of a WebSocket is put through that as a
                GET, so that what lets HTTP requests in (an API key, a rate limit) lets in
                WebSockets, too. None: it is found by itself; where it cannot be, WebSockets are
                refused, and the log says so.

        Raises:
            ConfigurationError: Authentication was set up that cannot be taken over.
        """
        beside = self.health_routes(health) if health is not None else ()
        endpoint = self._endpoint(path, host, security, max_body, application)
        return endpoint.app(self.lifespan, beside)

    def health_routes(self, path: str = "/") -> list[BaseRoute]:
        """What an orchestrator asks, for an application that mounts :meth:`routes`.

        ``healthz`` answers 200 as long as the process serves. ``readyz`` answers 200 while it
        may be sent new requests, else 503: it does not run yet, it is draining, or its store
        does not answer. Neither asks for a credential or an allowed Host.

        Args:
            path: What they are under.

        Raises:
            ConfigurationError: The path does not begin with ``/``.
        """
        return self._health.routes(path)

    def routes(
        self,
        path: str = DEFAULT_PATH,
        *,
        host: str = "127.0.0.1",
        security: SecuritySettings | None = None,
        max_body: int = MAX_BODY,
        application: Callable[[], ASGIApp] | None = None,
    ) -> list[BaseRoute]:
        """The same as routes, to mount in a Starlette or FastAPI application.

        The application must run the layer: ``Starlette(lifespan=layer.lifespan, …)``. What
        guards these routes there guards WebSockets, too. Arguments and errors are those of
        :meth:`asgi_app`.
        """
        return self._endpoint(path, host, security, max_body, application).routes()

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """Everything the layer does happens inside; an ASGI lifespan.

        Args:
            app: Ignored: frameworks pass themselves.

        Raises:
            ConfigurationError: The layer runs, or ran, already; or there is no event loop of
                asyncio.
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
        drain_delay: float | None = None,
        log_level: str = "warning",
        health: str | None = None,
        access_log: bool = False,
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
            drain_delay: Seconds after SIGTERM in which everything is served as before, but
                ``readyz`` is not ready and each response the last on its connection; then
                the listener is closed, and the grace begins. None: 3 where other processes
                share the store, else 0. SIGINT has no delay.
            log_level: uvicorn's.
            health: See :meth:`asgi_app`.
            access_log: Log a line for each request (``mcp_sessions.access``).

        Raises:
            ConfigurationError: The transport is unknown, or the store cannot be opened; or see
                :meth:`asgi_app`.
            StoreUnavailable: The store is away.
            OSError: The address cannot be listened on.
            KeyboardInterrupt: SIGINT ended an HTTP server, which has drained.
        """
        if transport not in ("http", "stdio"):
            raise ConfigurationError(f"unknown transport {transport!r}: 'http' or 'stdio'")
        refuse = RUN_IS_REFUSED.get()
        if refuse is not None:
            refuse()
        app = self.asgi_app(path, host=host, security=security, max_body=max_body, health=health)
        if transport == "stdio" and port is None and sock is None:
            asyncio.run(self._serve_stdio(None, grace))
            return
        listener = sock if sock is not None else listen_on(host, port or 8000)
        if drain_delay is None:
            is_alone = not self._bus.is_shared or transport == "stdio"
            drain_delay = 0 if is_alone else DRAIN_DELAY
        responses = ClosingResponses(app)
        config = uvicorn.Config(
            AccessLog(responses) if access_log else responses,
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=KEEP_ALIVE,
            lifespan="on",
            server_header=False,
            log_config=None,
            ws="websockets-sansio",
            ws_max_size=self.policy.max_message,
            ws_ping_interval=20,
            ws_ping_timeout=20,
            ws_per_message_deflate=False,
        )
        leaving = Leaving(
            delay=drain_delay,
            grace=grace,
            announce=self._draining.announce,
            needs_listener=self._draining.needs_listener,
            drain=self.drain,
        )
        server = DrainingServer(config, responses, leaving, on_started, self._open_store)
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
        await self._draining.drain(grace)

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

        Raises:
            StoreUnavailable: The store failed before it was. The change is kept, and told to
                the rest when the store is back: it need not be announced again. If the
                process ends before that it is lost, which is a line in the log; if 10,000
                others wait (or 4 MiB of them) it is lost as well, and every session is made
                to read again what it follows.
            ConfigurationError: The layer does not run.
        """
        await self._change("notifications/resources/updated", {"uri": str(uri)})

    async def notify_tools_changed(self) -> None:
        """Tell every session that the list of tools changed.

        Returns and raises as :meth:`notify_resource_updated`.
        """
        await self._change("notifications/tools/list_changed", None)

    async def notify_prompts_changed(self) -> None:
        """Tell every session that the list of prompts changed.

        Returns and raises as :meth:`notify_resource_updated`.
        """
        await self._change("notifications/prompts/list_changed", None)

    async def notify_resources_changed(self) -> None:
        """Tell every session that the list of resources changed.

        Returns and raises as :meth:`notify_resource_updated`.
        """
        await self._change("notifications/resources/list_changed", None)

    async def _change(self, method: str, params: Mapping[str, Any] | None) -> None:
        if self._state != "running":
            raise ConfigurationError(_NOT_RUNNING)
        # On the server's own bus, if it has one, so that its modern-era listeners hear it;
        # it comes back to the hub from there.
        with noting() as announced:
            if not await self._upstream.publish(method, params):
                self._broadcaster.announce(method, params)
        failed = await announced.settled()
        if failed is not None:
            raise StoreUnavailable(
                f"the change is kept, and told to the rest when the store is back: {failed}"
            )

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
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError("a SessionLayer runs on asyncio, not on trio") from None
        self._state = "running"
        await self._open_store()
        if self.security.is_ephemeral and self.store.survives_process:
            logger.warning(
                "sessions outlive this process, but the keys that seal their state do not: "
                "set MCP_SESSIONS_KEYS"
            )
        is_lasting = self.store.remembers and self.store.survives_process
        if (self._bus.is_shared or is_lasting) and self._upstream.keeps_state_in_memory:
            logger.warning(
                "FastMCP keeps what ctx.set_state stores in the memory of this process: other "
                "replicas do not see it, and after a restart it is gone while its session lives. "
                "Write FastMCP(..., session_state_store=STORE) with an AsyncKeyValue store that "
                "all share, such as key_value.aio.stores.redis.RedisStore(url=...) of "
                "py-key-value-aio[redis]; or keep it in current_session().data"
            )
        try:
            async with self._upstream.lifespan():
                stop = self._upstream.on_change(self._broadcaster.announce)
                await self._bus.join(self._handlers)
                background = Background()
                background.loop("the rounds over expired sessions", self._reaper.run)
                background.loop("the rounds over watched streams", self._bus.run)
                try:
                    yield
                finally:
                    stop()
                    await background.close()
                    await self._broadcaster.close()
                    await self._draining.stop()
        finally:
            self._state = "over"
            await self.store.close()

    def _endpoint(
        self,
        path: str,
        host: str,
        security: SecuritySettings | None,
        max_body: int,
        application: Callable[[], ASGIApp] | None,
    ) -> Endpoint:
        endpoint = Endpoint(
            self._upstream,
            path=path,
            host=host,
            security=security,
            served_with=lambda still_valid: self._served_at(max_body, still_valid),
            ready=self._check_running,
            application=application,
        )
        self._endpoints.append(endpoint)
        return endpoint

    def _served_at(self, max_body: int, still_valid: StillValid | None) -> Served:
        """What a binding serves, and with what."""
        return Served(
            router=self._router,
            hub=self._hub,
            runner=self._runner,
            methods=self._methods,
            listening=Listening(self.store, self._hub, self._router, self._methods, self._upstream),
            transport_sessions=self._transport_sessions,
            policy=self.policy,
            remembers=self.store.remembers,
            primes=primes_streams,
            max_body=max_body,
            credentials=CredentialWatch(still_valid, self.policy.credential_check, self._clock),
            bus=self._bus,
        )

    def _check_running(self) -> None:
        if self._state != "running":
            raise ConfigurationError(_NOT_RUNNING)


_NOT_RUNNING = (
    "the SessionLayer does not run: pass layer.lifespan to the application that mounts it"
)
