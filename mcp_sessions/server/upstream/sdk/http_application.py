"""Take over everything that the server's own HTTP application has around its MCP endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mcp.server import MCPServer
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import principal_components
from mcp.server.lowlevel.server import Server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Scope

from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream


def security_settings(host: str, security: Any) -> TransportSecuritySettings | None:
    """Return the allowed Hosts and Origins. For a loopback host they are the SDK's own defaults,
    and the host itself.

    Args:
        host: The address that the server will listen on.
        security: The application's settings. None: ``host`` decides.
    """
    if security is not None or not is_loopback(host):
        return cast("TransportSecuritySettings | None", security)
    named = f"[{host}]" if ":" in host else host
    return allowing(() if named in LOCAL_HOSTS else (named,), ())


LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_FASTMCPS_GUARD = "HostOriginGuardMiddleware"
_LOCAL_ORIGINS = [f"{scheme}://{host}:*" for scheme in ("http", "https") for host in LOCAL_HOSTS]


def allowing(hosts: Sequence[str], origins: Sequence[str]) -> TransportSecuritySettings:
    """Make settings that allow these.

    Args:
        hosts: Names. Without a port a name is allowed with any port and with none. With a port,
            only that one. Loopback names are allowed as well.
        origins: Such as ``https://app.example``. Empty: the origins of loopback pages.
    """
    allowed = [f"{host}:*" for host in LOCAL_HOSTS]
    for host in hosts:
        # The colons of an IPv6 address are in brackets.
        has_port = ":" in host.rpartition("]")[2]
        allowed.append(host if has_port else f"{host}:*")
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=allowed,
        allowed_origins=list(origins) or _LOCAL_ORIGINS,
    )


def principal_of(scope: Scope) -> Principal:
    user = scope.get("user")
    if not isinstance(user, AuthenticatedUser):
        return ANONYMOUS
    client_id, issuer, subject = principal_components(user.access_token)
    expires_at = user.access_token.expires_at
    return Principal(
        client_id,
        issuer,
        subject,
        frozenset(user.scopes),
        float(expires_at) if expires_at is not None else None,
    )


@dataclass(frozen=True, slots=True)
class HttpShell:
    routes: list[BaseRoute]
    """The MCP endpoint's route, which now leads to ours, and every other route."""

    middleware: list[Middleware]
    is_bare: bool
    """Whether nothing stands before the endpoint: no authentication, no middleware."""

    is_guarded: bool
    """Whether the application checks Host and Origin itself: FastMCP does if it is set to."""

    state: dict[str, Any]
    """Content of the application's ``app.state``."""

    still_valid: Callable[[Scope, Principal], Awaitable[bool]] | None
    """Asks the server's authentication again whether a request's credential is valid. None: it has
    no authentication.
    """


class _Endpoint:
    def __init__(self, app: ASGIApp) -> None:
        self.asgi_app = app
        self.handle_request = app


def http_shell(
    upstream: SdkUpstream,
    endpoint: ASGIApp,
    *,
    path: str,
    host: str,
    security: TransportSecuritySettings | None,
) -> HttpShell:
    """Return the server's own HTTP application, with our endpoint in place of its MCP endpoint.

    Authentication, scopes, OAuth and metadata routes, custom routes and middleware stay as the
    server set them up, because they are its own.

    Raises:
        ConfigurationError: The application has no such endpoint, so that nothing around it could be
            kept.
    """
    server = upstream.server
    if isinstance(server, MCPServer):
        app: Starlette = cast("MCPServer[Any]", server).streamable_http_app(
            streamable_http_path=path, host=host, transport_security=security
        )
    elif isinstance(server, Server):
        app = upstream.lowlevel.streamable_http_app(
            streamable_http_path=path, host=host, transport_security=security
        )
    else:
        app = cast("Any", server).http_app(path=path)
    slot = _find_slot(app.routes, path)
    if slot is None:
        raise ConfigurationError(
            "the server's HTTP application has no MCP endpoint that could be taken over; "
            "it is not served, because its authentication could be lost"
        )
    route, holder = slot
    holder.session_manager = _Endpoint(endpoint)
    if route.methods is not None:
        # This is FastMCP's own table of methods. The list of a stateless server lacks methods that
        # we serve.
        route.methods |= {"GET", "HEAD", "POST", "DELETE"}
    bare = route.endpoint is holder and not app.user_middleware
    state: dict[str, Any] = dict(app.state._state)  # pyright: ignore[reportPrivateUsage]
    middleware = list(app.user_middleware)
    guarded = any(getattr(each.cls, "__name__", "") == _FASTMCPS_GUARD for each in middleware)
    return HttpShell(list(app.routes), middleware, bare, guarded, state, _still_valid(middleware))


def _still_valid(
    middleware: list[Middleware],
) -> Callable[[Scope, Principal], Awaitable[bool]] | None:
    for entry in middleware:
        backend = entry.kwargs.get("backend")
        if entry.cls is AuthenticationMiddleware and isinstance(backend, AuthenticationBackend):
            return Recheck(backend)
    return None


class Unverified(AuthenticationError):
    """It is unknown for now whether a credential is good."""


class Recheck:
    def __init__(self, backend: AuthenticationBackend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, principal: Principal) -> bool:
        """Ask.

        Raises:
            Unverified: It is unknown for now.
        """
        try:
            authenticated = await self._backend.authenticate(HTTPConnection(scope))
        except Unverified:
            raise
        except AuthenticationError:
            return False
        if authenticated is None:
            return False
        credentials, user = authenticated
        again = principal_of({"user": user})
        return again == principal and frozenset(credentials.scopes) >= principal.scopes


def _find_slot(routes: list[BaseRoute], path: str) -> tuple[Route, Any] | None:
    for route in routes:
        if isinstance(route, Route) and route.path == path:
            app: Any = route.endpoint
            # RequireAuthMiddleware and similar classes keep the guarded application in ``app``.
            while app is not None and not hasattr(app, "session_manager"):
                app = getattr(app, "app", None)
            if app is not None:
                return route, app
    return None
