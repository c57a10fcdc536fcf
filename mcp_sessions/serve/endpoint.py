"""Serve clients over HTTP and WebSocket: one path of an ASGI application.

The server's own HTTP application keeps its routes around the MCP endpoint (authentication, custom
routes, middleware). This module replaces the endpoint itself. A WebSocket does not pass through the
HTTP application and its middleware. An authorizer asks them first whether it may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.server.upstream.sdk.authentication import Authentication, OnDenied
from mcp_sessions.server.upstream.sdk.http_application import (
    http_shell,
    principal_of,
    security_settings,
)
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream
from mcp_sessions_transports.credentials import CredentialWatch
from mcp_sessions_transports.http.endpoint import (
    Arrivals,
    Arriving,
    AtPath,
    MountedApp,
    StreamableHttp,
)
from mcp_sessions_transports.http.handshake import HandshakeHttp
from mcp_sessions_transports.http.modern import ModernHttp
from mcp_sessions_transports.origin import (
    Guards,
    OriginGuard,
    SecuritySettings,
)
from mcp_sessions_transports.pages import pages_of_application, readable_by_pages
from mcp_sessions_transports.served import Served
from mcp_sessions_transports.websocket.authorizer import HandshakeAuthorizer
from mcp_sessions_transports.websocket.websocket_server import WebSocketBinding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NotFound:
    """An application that answers 404, and refuses a WebSocket.

    A client that ends a path with a slash, or leaves one out, is redirected to the route. It stays
    at the scheme and the host that it used: a proxy that ends TLS does not always pass them on.

    Args:
        paths: The paths of the endpoints, without the path under which their application is
            mounted.
        routes: Those of the router whose default this is. It redirects nothing itself.
    """

    _paths: Sequence[str]
    _routes: Sequence[BaseRoute]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        root = scope.get("root_path", "")
        paths = ", ".join(f"{root}{path}" for path in self._paths)
        text = f"Not Found. This server speaks MCP at {paths}\n"
        answer: Response = PlainTextResponse(text, status_code=404)
        other = other_end(scope["path"])
        there = {**scope, "path": other}
        # What begins with two slashes is the address of another host.
        if other.strip("/") and not other.startswith("//"):
            if any(route.matches(there)[0] is not Match.NONE for route in self._routes):
                query = scope.get("query_string", b"").decode("latin-1")
                answer = RedirectResponse(f"{other}?{query}" if query else other)
        await answer(scope, receive, send)


def other_end(path: str) -> str:
    """Return a path with a slash at its end, or without one."""
    return path.rstrip("/") if path.endswith("/") else f"{path}/"


_METADATA = "/.well-known/"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    path: str
    """Clients connect to this path."""

    host: str
    """The address on which it will listen."""

    security: SecuritySettings | None
    """Allowed hosts and origins; None: on a loopback host, loopback ones. Pages of origins that are
    named here can read the answers (CORS)."""

    max_body: int | None = None
    """Bytes of one HTTP request body; a larger one is answered 413. None: those of a message."""

    application: Callable[[], ASGIApp] | None = None
    """Answers with what the HTTP server calls; None: it is found."""


class Endpoint:
    """One endpoint of a layer. Served either as an application or as routes, once.

    Args:
        upstream: The server.
        served: The port that the bindings call.
        arrivals: The requests that the layer is about to serve.
        clock: Seconds since 1970.
        authentication: Stands before it; None: only what the server has itself.
        denied: Takes note of each request that it refuses.

    Raises:
        ConfigurationError: Authentication was set up that cannot be taken over.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        upstream: SdkUpstream,
        served: Served,
        *,
        arrivals: Arrivals,
        clock: Callable[[], float],
        authentication: Authentication | None,
        denied: OnDenied,
    ) -> None:
        path, host = settings.path, settings.host
        authentication = authentication.at(path) if authentication is not None else None
        security = security_settings(host, settings.security)
        max_body = served.policy.max_message if settings.max_body is None else settings.max_body
        self._served, self._arrivals = served, arrivals
        self._path = path
        self._security = settings.security
        self._application = settings.application
        self._authentication = authentication
        self._guarded = (
            self._serve if authentication is None else authentication.around(self._serve, denied)
        )
        self._shell = http_shell(upstream, self._guarded, path=path, host=host, security=security)
        recheck = self._shell.still_valid if authentication is None else authentication.still_valid
        interval = served.policy.credential_check
        self._credentials = CredentialWatch(recheck, interval, clock)
        # FastMCP decides for HTTP. It has no WebSocket, which a page of any origin could open.
        is_fastmcps = upstream.kind == "fastmcp" and settings.security is None
        # The pages that an operator names are all there are.
        is_named = settings.security is not None and settings.security.allowed_origins
        pages = None if is_named else pages_of_application(settings.application)
        guard = OriginGuard(None if is_fastmcps else security, pages)
        is_guarded = self._shell.is_guarded or not is_fastmcps
        of_websockets = guard if is_guarded else OriginGuard(security, pages, any_host=True)
        self.guards = Guards(guard, of_websockets, self._shell.is_guarded)
        is_public = guard.is_by_name or not is_loopback(host)
        self._is_open = is_public and not (upstream.authenticates or authentication)
        self.handshake = HandshakeHttp(served, max_body)
        spoken = served.rules.handshake_versions
        self.http = StreamableHttp(
            self.handshake,
            ModernHttp(served, guard, max_body),
            # A request of the handshake era may name no version.
            frozenset({None, *map(str.encode, spoken)} if spoken else ()),
            guard,
            principal_of,
            served.availability,
            arrivals,
            self._credentials,
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.http(scope, receive, send)

    def app(
        self,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        extra_routes: Sequence[BaseRoute] = (),
    ) -> MountedApp:
        """An application of its own.

        Args:
            lifespan: Entered by it.
            extra_routes: Served before everything else, with nothing before them.
        """
        if self._is_open:
            logger.warning(
                "every client that reaches this server can call its tools: nothing authenticates "
                "it. See 'Who may come in' in docs/security.md"
            )
        shell = self._shell
        inner = Starlette(
            routes=[*shell.routes, *_with_other_end(shell.routes), *self.metadata()],
            middleware=shell.middleware,
            lifespan=lambda _: lifespan(),
        )
        inner.router.redirect_slashes = False
        inner.router.default = NotFound([self._path], inner.router.routes)
        for name, value in shell.state.items():
            setattr(inner.state, name, value)
        door = AtPath(inner, self._path)
        arriving = Arriving(self._guarded if shell.is_bare else door, self._arrivals)
        is_bare = shell.is_bare and self._authentication is None
        http = readable_by_pages(self.http if is_bare else arriving, self._security)
        return MountedApp(inner, http, self._websocket(door), self._path, self.guards, extra_routes)

    def routes(self) -> list[BaseRoute]:
        """Routes for the application of somebody else. The endpoint has two: its path, and the
        same with the other end (a slash, or none), which a router would redirect.
        """
        shell, others = self._shell, list[BaseRoute]()
        for route in shell.routes:
            if not isinstance(route, (Route, Mount)):
                continue
            for entry in reversed(shell.middleware):
                route.app = entry.cls(route.app, *entry.args, **entry.kwargs)
            if isinstance(route, Route) and route.path == self._path:
                arriving = Arriving(route.app, self._arrivals)
                route.app = readable_by_pages(arriving, self._security)
                if route.methods is not None and route.app is not arriving:
                    route.methods.add("OPTIONS")
                others += [
                    Route(path, route.app, methods=route.methods) for path in self._other_paths()
                ]
        websocket = self._websocket(None)
        paths = (self._path, *self._other_paths())
        sockets = [WebSocketRoute(path, endpoint=websocket) for path in paths]
        served = [*shell.routes, *_with_other_end(shell.routes)]
        return [*served, *self.metadata(), *others, *sockets]

    def metadata(self) -> list[Route]:
        routes = self._authentication.routes() if self._authentication is not None else []
        return [*routes, *_with_other_end(routes)]

    def _other_paths(self) -> Sequence[str]:
        bare = self._path.rstrip("/")
        return [path for path in (bare, f"{bare}/") if path and path != self._path]

    def _websocket(self, door: ASGIApp | None) -> ASGIApp:
        """The WebSocket endpoint.

        Args:
            door: The application that HTTP requests to the endpoint pass first; None: the endpoint
                is mounted.
        """
        return WebSocketBinding(
            self._served,
            self.guards.websocket,
            HandshakeAuthorizer(door, principal_of, self._application),
            self._credentials,
        )


def _with_other_end(routes: Sequence[BaseRoute]) -> list[Route]:
    """The metadata of these routes once more, with a slash at the end of its path. A router would
    redirect it, to ``http`` behind a proxy that ends TLS.
    """
    made: list[Route] = []
    for each in routes:
        if isinstance(each, Route) and each.path.startswith(_METADATA):
            route = Route(other_end(each.path), each.endpoint, methods=each.methods)
            route.app = each.app
            made.append(route)
    return made
