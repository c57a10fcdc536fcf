"""Wrap a server with sessions, as a part of an application.

layer = SessionLayer(mcp)
app = layer.asgi_app()          # or layer.run("http"), or layer.routes() to mount
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from mcp_sessions import method_names
from mcp_sessions.access import Access, in_python
from mcp_sessions.argument_types import checked
from mcp_sessions.assembly import DRAIN_DELAY, Assembly
from mcp_sessions.conversations import Conversations
from mcp_sessions.core.addresses import is_own_path
from mcp_sessions.core.availability import not_running
from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError, StoreUnavailable
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.layer_settings import REPLACED, LayerSettings
from mcp_sessions.policy import DEFAULT_GRACE, SessionPolicy, TaskPolicy
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.security import SessionSecurity
from mcp_sessions.serve.endpoint import EndpointSettings
from mcp_sessions.serve.open_connections import connection_limits
from mcp_sessions.serve.reloading import Reloading
from mcp_sessions.serve.sockets import listen_on
from mcp_sessions.serve.stdio import serve_stdio
from mcp_sessions.serve.tls import certificate_of
from mcp_sessions.serve.uvicorn_server import (
    RUN_IS_REFUSED,
    HttpSettings,
    Leaving,
    draining_server,
)
from mcp_sessions.server.delivery.broadcaster import noting
from mcp_sessions.server.upstream.port import note_store_failure
from mcp_sessions.server.upstream.sdk.authentication import (
    Authentication,
    AuthSettings,
    TokenVerifier,
    authentication_of,
)
from mcp_sessions.server.upstream.sdk.kernel import SdkServer
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions_transports.http.endpoint import MountedApp
from mcp_sessions_transports.origin import SecuritySettings

DEFAULT_PATH = "/mcp"


class SessionLayer:
    """Sessions for one MCP server.

    It runs inside :meth:`lifespan`, which :meth:`asgi_app` and :meth:`run` enter by
    themselves; an application that mounts :meth:`routes` passes it on. It runs once.
    """

    _clock: Callable[[], float] = time.time
    """Seconds since 1970. Only a test has another one (:mod:`mcp_sessions.testing.timed_layer`)."""

    @checked(
        "server",
        store='a store, such as "sqlite:///sessions.db", or a path',
    )
    def __init__(
        self,
        server: SdkServer | ExternalServer,
        *,
        store: SessionStore | str | os.PathLike[str] | None = "memory://",
        policy: SessionPolicy | None = None,
        security: SessionSecurity | None = None,
        encrypt_store: bool = False,
        conversations: Conversations | None = None,
        hidden: Collection[str] = (),
        auth: AuthSettings | Authentication | str | None = None,
        token_verifier: TokenVerifier | None = None,
        tasks: TaskPolicy | None = None,
        eras: Eras = "both",
        request_keys: Sequence[str] = (),
        audit_key_names: bool = False,
        api_keys: str | os.PathLike[str] | None = None,
        allow: Sequence[str] = (),
        auth_issuer: str | None = None,
        auth_audience: str | None = None,
        auth_introspect: str | None = None,
        auth_scope: Sequence[str] = (),
    ) -> None:
        """Wrap a server.

        Args:
            server: An ``MCPServer`` or lowlevel ``Server`` of the SDK, a ``FastMCP``, a
                ``StdioServer``, or an ``HTTPServer``.
            store: Where sessions are remembered, or its URL, or the path of a SQLite file. None:
                nowhere; then ``sessions/create`` with ``state`` is all there is, and nothing is
                revoked.
            policy: Every limit; the defaults if None.
            security: The keys that seal ``state``. None: those of ``MCP_SESSIONS_KEYS`` if
                it is set, else those beside a SQLite file, which are made if they are not there,
                else keys that end with this process.
            encrypt_store: Encrypt events, answers and data in the store, with the keys of
                ``security``.
            conversations: Sessions for hosts that start none. None: such requests have none.
            hidden: Names of tools and prompts, and URIs of resources, that nobody sees but a
                session that they were revealed to (:meth:`SessionHandle.reveal`); or patterns, in
                which ``*`` is any text: ``{"admin_*", "secret://*"}``.
            auth: The SDK's ``AuthSettings``, for a server without authentication of its own, such
                as a ``StdioServer``: each HTTP request and WebSocket needs a token. Or the name of
                a provider at which users sign in, such as ``"github"``; see ``allow``.
            token_verifier: The SDK's ``TokenVerifier``, which goes with ``auth``.
            tasks: Which calls become tasks, for clients of 2026-07-28 that declare the extension
                ``io.modelcontextprotocol/tasks``. None: no call does.
            eras: The eras that are spoken: ``2025`` (with a handshake), ``2026`` or ``both``. With
                ``2025`` hosts of both begin with a handshake. With ``2026`` a command or a URL of
                both is spoken to in the 2026 era.
            request_keys: Places in which hosts send the key of a request that must not run twice:
                ``"header:Idempotency-Key"``, ``"meta:claudecode/toolUseId"``. The first that is
                there counts. Outside of sessions, only keys of authenticated clients and of
                conversations do.
            audit_key_names: The audit names each API key (``enduser.id``), in addition to the
                digest of its owner.
            api_keys: The file of ``mcp-sessions keys``: each HTTP request and WebSocket needs a
                key of it, or a token.
            allow: The users of the provider that may use the server: ``"*@example.com"``,
                ``"login:NAME"``, ``"group:NAME"``.
            auth_issuer: The URL of an authorization server, whose tokens are accepted.
            auth_audience: The URL of this server in these tokens.
            auth_introspect: The URL at which the authorization server says whether a token is good.
                The client is the one of the variables ``MCP_SESSIONS_INTROSPECT_CLIENT_ID`` and
                ``MCP_SESSIONS_INTROSPECT_CLIENT_SECRET``.
            auth_scope: Scopes that each key and token needs.

        Raises:
            ConfigurationError: The server cannot be wrapped, or the URL names no store; or there
                are ``conversations``, ``tasks`` or ``request_keys``, and no store; or conversations
                and a store that outlives keys of this process; or ``encrypt_store`` and a store
                that does not last, or no keys that do; or ``auth`` lacks its verifier, or
                the server has authentication of its own; or a place of request keys is none.
        """
        settings = LayerSettings(
            store=store,
            policy=policy if policy is not None else SessionPolicy(),
            security=security,
            encrypt_store=encrypt_store,
            conversations=conversations,
            hidden=hidden,
            tasks=tasks,
            eras=eras,
            request_keys=request_keys,
            audit_key_names=audit_key_names,
            authentication=partial(
                _authentication,
                auth,
                token_verifier,
                api_keys=os.fspath(api_keys) if api_keys is not None else None,
                allow=allow,
                auth_issuer=auth_issuer,
                auth_audience=auth_audience,
                auth_introspect=auth_introspect,
                auth_scope=auth_scope,
            ),
        )
        if (replaced := REPLACED.get()) is not None:
            settings = replaced(settings)
        self._assembly = Assembly(server, settings, clock=self._clock)
        self.eras: Eras = self._assembly.eras
        """The eras that are spoken."""

        self.policy = self._assembly.policy
        self.security = self._assembly.security
        self.store = self._assembly.store
        self.sessions = self._assembly.sessions
        """Lists and ends sessions."""

    @property
    def authenticates(self) -> bool:
        """Whether the layer knows that each HTTP request and WebSocket needs a credential."""
        return self._assembly.authenticates

    # --- serving -------------------------------------------------------------------------

    @checked()
    def asgi_app(
        self,
        path: str = DEFAULT_PATH,
        *,
        host: str = "127.0.0.1",
        security: SecuritySettings | None = None,
        max_body: int | None = None,
        health: str | None = None,
        application: Callable[[], ASGIApp] | None = None,
        dashboard: str | None = None,
        dashboard_actions: bool = False,
    ) -> MountedApp:
        """Return an ASGI application that serves Streamable HTTP on ``path``.

        It contains the other routes of the server's own HTTP application (authentication, custom
        routes, middleware). An application that mounts it runs its ``lifespan``:
        ``FastAPI(lifespan=app.lifespan)``.

        Args:
            path: Where clients connect.
            host: Where it will listen. On a loopback host, Host and Origin are checked even
                without ``security``. For a FastMCP server, its own setting decides; a WebSocket
                from a page of another machine is refused in any case.
            security: The SDK's ``TransportSecuritySettings``: allowed hosts and origins.
            max_body: Bytes of one request body; None: ``SessionPolicy.max_message``.
            health: The prefix of ``healthz`` and ``readyz``; None: they are not served. See
                :meth:`health_routes`.
            application: Returns the application that the HTTP server calls, if another one wraps
                this one. The handshake of a WebSocket passes through it as a GET, so that its
                checks for HTTP requests (an API key, a rate limit) apply to WebSockets, too. None:
                the layer finds the application. If it cannot, it refuses WebSockets and logs that.
            dashboard: Where :meth:`dashboard` is; None: it is not served.
            dashboard_actions: Its ``actions``.

        Raises:
            ConfigurationError: The layer cannot take over the server's authentication; or others
                can reach the page of ``dashboard``, and nothing authenticates them; or it has no
                path of its own.
        """
        extra_routes = self.health_routes(health) if health is not None else []
        if dashboard is not None:
            if not is_loopback(host) and not self.authenticates:
                raise ConfigurationError(
                    f"dashboard: others can reach this page on {host}, so it needs authentication, "
                    "such as api_keys"
                )
            where = dashboard.rstrip("/")
            if not is_own_path(dashboard, path):
                raise ConfigurationError(
                    f"dashboard {dashboard!r}: choose a path of its own, such as /sessions"
                )
            page = self.dashboard(actions=dashboard_actions)
            from mcp_sessions.dashboard.access_control import SecurityHeaders

            # A browser finds the parts of a page from the slash on.
            here = SecurityHeaders(RedirectResponse(f"{where.rpartition('/')[2]}/"))
            there = Route(where, here)
            extra_routes = [*extra_routes, there, Mount(where, page)]
        settings = EndpointSettings(
            path=path, host=host, security=security, max_body=max_body, application=application
        )
        app = self._assembly.endpoint(settings).app(self.lifespan, extra_routes)
        app.state.mcp_sessions_layer = self
        return app

    @checked()
    def health_routes(self, path: str = "/") -> list[BaseRoute]:
        """Return health checks for an application that mounts :meth:`routes`.

        ``healthz`` answers 200 as long as the process serves. ``readyz`` answers 200 while it
        may be sent new requests, else 503: it does not run yet, it is draining, or its store
        does not answer. Neither asks for a credential or an allowed Host.

        Args:
            path: What they are under.

        Raises:
            ConfigurationError: The path does not begin with ``/``.
        """
        return self._assembly.health.routes(path)

    def dashboard(
        self, *, auth: Callable[[Request], Any] | None = None, actions: bool = False
    ) -> ASGIApp:
        """Return a page that shows the sessions, live, as an ASGI application to mount:
        ``Mount("/sessions", layer.dashboard())``. It needs the extra ``dashboard``.

        Args:
            auth: Says whether the sender of a request may see the page:
                ``lambda request: request.user.is_admin``. It may be async. None: whose API key or
                token has the scope ``mcp-sessions:operator`` and is good for the endpoint. It is
                the password that a browser asks for. If the endpoint needs no credential, only
                browsers on this machine see the page.
            actions: Who sees the page may also end a session, drain a replica, and stop a process
                of the wrapped server.

        Raises:
            ConfigurationError: Jinja2 is not installed, the layer has no store, or its server has
                authentication of its own and there is no ``auth``.
        """
        from mcp_sessions.dashboard.layer_dashboard import dashboard_of

        return dashboard_of(self._assembly, auth, actions=actions)

    @checked()
    def routes(
        self,
        path: str = DEFAULT_PATH,
        *,
        host: str = "127.0.0.1",
        security: SecuritySettings | None = None,
        max_body: int | None = None,
        application: Callable[[], ASGIApp] | None = None,
    ) -> list[BaseRoute]:
        """Return the same as routes, to mount in a Starlette or FastAPI application.

        The application must run the layer: ``Starlette(lifespan=layer.lifespan, …)``. Its guards of
        these routes also guard WebSockets. Arguments and errors are those of :meth:`asgi_app`.
        """
        settings = EndpointSettings(
            path=path, host=host, security=security, max_body=max_body, application=application
        )
        return self._assembly.endpoint(settings).routes()

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """Everything the layer does happens inside; an ASGI lifespan.

        Args:
            app: Ignored: frameworks pass themselves.

        Raises:
            ConfigurationError: The layer runs, or ran, already; or there is no event loop of
                asyncio.
        """
        return self._assembly.lifespan.run()

    @checked("transport")
    def run(
        self,
        transport: Literal["http", "stdio"] = "http",
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        path: str = DEFAULT_PATH,
        security: SecuritySettings | None = None,
        max_body: int | None = None,
        sock: socket.socket | None = None,
        on_started: Callable[[], None] | None = None,
        grace: float = DEFAULT_GRACE,
        drain_delay: float | None = None,
        log_level: str = "warning",
        health: str | None = None,
        access_log: bool = False,
        dashboard: str | None = None,
        dashboard_actions: bool = False,
        forwarded_allow_ips: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
    ) -> None:
        """Serve until SIGINT or SIGTERM, or until the end of standard input, then drain.

        Args:
            transport: ``http``: Streamable HTTP and WebSocket. ``stdio``: the client at the
                other end of standard input and output; with a ``port`` or a ``sock``, HTTP
                and WebSocket as well, on the same sessions.
            port: 8000 if None, for ``http``; 0: any free one.
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
            dashboard: See :meth:`asgi_app`.
            dashboard_actions: See :meth:`asgi_app`.
            forwarded_allow_ips: Proxies whose ``X-Forwarded-For`` names the client: addresses and
                networks, separated by commas, or ``*``. None: those of the variable
                ``FORWARDED_ALLOW_IPS``, and else nobody.
            ssl_certfile: A certificate in PEM format, for HTTPS. None: the connections are not
                encrypted. SIGHUP reads it again, for new connections.
            ssl_keyfile: Its key. None: it is in ``ssl_certfile``. The password of an encrypted key
                is the variable ``MCP_SESSIONS_SSL_KEYFILE_PASSWORD``.

        Raises:
            ConfigurationError: The transport is unknown, the store cannot be opened, or the
                certificate cannot be used; or see :meth:`asgi_app`.
            StoreUnavailable: The store is away.
            OSError: The address cannot be listened on.
            KeyboardInterrupt: SIGINT ended an HTTP server, which has drained.
        """
        if transport not in ("http", "stdio"):
            raise ConfigurationError(f"unknown transport {transport!r}: 'http' or 'stdio'")
        refuse = RUN_IS_REFUSED.get()
        if refuse is not None:
            refuse()
        app = self.asgi_app(
            path,
            host=host,
            security=security,
            max_body=max_body,
            health=health,
            dashboard=dashboard,
            dashboard_actions=dashboard_actions,
        )
        parts = self._assembly
        serve_pipe = partial(serve_stdio, parts, parts.lifespan, parts.draining, grace)
        try:
            if transport == "stdio" and port is None and sock is None:
                asyncio.run(serve_pipe())
                return
            certificate = certificate_of(ssl_certfile, ssl_keyfile)
            listener = sock if sock is not None else listen_on(host, 8000 if port is None else port)
            if drain_delay is None:
                is_alone = not parts.bus.is_shared or transport == "stdio"
                drain_delay = 0 if is_alone else DRAIN_DELAY
            leaving = Leaving(
                delay=drain_delay,
                grace=grace,
                announce=parts.draining.announce,
                needs_listener=parts.draining.needs_listener,
                drain=self.drain,
            )
            settings = HttpSettings(
                limits=connection_limits([self.policy]),
                health=health,
                log_level=log_level,
                access_log=access_log,
                forwarded_allow_ips=forwarded_allow_ips,
                certificate=certificate,
                reloading=Reloading(certificate.reload) if certificate is not None else None,
            )
            server = draining_server(app, leaving, on_started, parts.lifespan.open_store, settings)
            with listener:
                if transport == "stdio":
                    asyncio.run(serve_pipe((server, listener)))
                else:
                    server.run(sockets=[listener])
        except StoreUnavailable as failed:
            # Its text says all. A traceback of ours, of asyncio's and of uvicorn's would hide it.
            raise failed.with_traceback(None) from None
        if server.interrupted:
            # uvicorn raises the signal again, and a process that was started with SIGINT
            # ignored (a shell's background job) would not notice that.
            raise KeyboardInterrupt

    async def drain(self, grace: float = DEFAULT_GRACE) -> None:
        """Stop taking requests, tell clients to come back, let what runs finish.

        New HTTP requests are answered 503 with ``Retry-After``; one that came before is served,
        also if it is still being authenticated, read or looked up, which has 5 seconds; clients
        that declared our extension receive ``notifications/sessions/detached`` with reason
        ``draining``; what still runs after ``grace`` seconds is cancelled and answered -31012.
        Sessions stay in the store. Calling it again changes nothing.
        """
        await self._assembly.draining.drain(grace)

    @checked()
    def require_session(self, *, tools: Iterable[str] = (), methods: Iterable[str] = ()) -> None:
        """Serve these only inside a session; outside of one they answer -31044.

        Args:
            tools: Names of tools.
            methods: JSON-RPC methods, such as ``resources/read``.
        """
        self._assembly.router.gate(tools=tools, methods=methods)

    # --- changes ---------------------------------------------------------------------------

    async def notify_resource_updated(self, uri: str) -> None:
        """Send every session that subscribed to ``uri`` an update.

        Returns when the change is stored for each of them.

        Raises:
            StoreUnavailable: The store failed before that. The layer keeps the change, and sends it
                to the rest when the store is back: do not announce it again. The change is lost if
                the process ends before that, which is a line in the log. It is also lost if 10,000
                others wait (or 4 MiB of them). Then every session is made to read its resources
                and lists again.
            ConfigurationError: The layer does not run.
        """
        await self._change(method_names.RESOURCE_UPDATED, {"uri": str(uri)})

    async def notify_tools_changed(self) -> None:
        """Tell every session that the list of tools changed.

        Returns and raises as :meth:`notify_resource_updated`.
        """
        await self._change(method_names.TOOLS_CHANGED, None)

    async def notify_prompts_changed(self) -> None:
        """Tell every session that the list of prompts changed.

        Returns and raises as :meth:`notify_resource_updated`.
        """
        await self._change(method_names.PROMPTS_CHANGED, None)

    async def notify_resources_changed(self) -> None:
        """Tell every session that the list of resources changed.

        Returns and raises as :meth:`notify_resource_updated`.
        """
        await self._change(method_names.RESOURCES_CHANGED, None)

    async def _change(self, method: str, params: Mapping[str, Any] | None) -> None:
        if not self._assembly.availability.is_running:
            raise not_running()
        # On the server's own bus, if it has one, so that its modern-era listeners receive it;
        # it comes back from there.
        with noting() as announced:
            if not await self._assembly.upstream.publish(method, params):
                self._assembly.broadcaster.announce(method, params)
        failed = await announced.settled()
        if failed is not None:
            unreported = StoreUnavailable(
                "the server keeps the change, and sends it to the other sessions when the store "
                f"is back: {failed}"
            )
            note_store_failure(unreported)
            raise unreported


def _authentication(
    auth: AuthSettings | Authentication | str | None,
    token_verifier: TokenVerifier | None,
    **fields: Any,
) -> Authentication | None:
    """Return what stands before the endpoint of a layer. None: only what the server has itself.

    Raises:
        ConfigurationError: The arguments do not go together, or cannot be used.
    """
    provider, own = (auth, None) if isinstance(auth, str) else (None, auth)
    try:
        access = Access(auth=provider, **fields)
        if access.asks_by is None:
            if isinstance(own, Authentication):
                return own
            return authentication_of(own, token_verifier)
        if token_verifier is not None or own is not None:
            raise ConfigurationError(
                f"a token verifier cannot be used with {access.asks_by}: leave out one of them"
            )
        return access.authenticating()("")
    except ConfigurationError as error:
        raise in_python(error) from error
