"""Stand before the endpoint of a server that has no authentication of its own.

The SDK's middleware and routes do it, as they do for an ``MCPServer``: 401 and 403 with
``WWW-Authenticate``, and the metadata of RFC 9728. Two answers are added: 400 if a token is in the
query string, and 503 if the token cannot be verified for now.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mcp.server.auth.middleware.auth_context import AuthContextMiddleware
from mcp.server.auth.middleware.bearer_auth import (
    AuthenticatedUser,
    BearerAuthBackend,
    RequireAuthMiddleware,
)
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl
from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions import metrics
from mcp_sessions.authentication.credential import (
    ASKER,
    CannotVerify,
    Credential,
    NotAllowed,
    Verifier,
)
from mcp_sessions.authentication.pace import DELAYS, Pace
from mcp_sessions.core.addresses import address_of, text_of_address
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.upstream.sdk.http_application import Recheck, Unverified, principal_of

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

LONGEST: Final = 16_384
"""Characters of a token, at most. A longer one is refused before it is looked at."""

_RETRY: Final = 5.0
"""Seconds after which a client asks again if a verifier failed."""

_IN_QUERY: Final = "access_token"
"""RFC 6750, 2.3: the parameter for a token, which MCP forbids."""

MADE: Final = 1_000
"""Access tokens of the SDK that are kept, at most. Each holds its token."""

OnDenied = Callable[[str, str | None, Principal], None]
"""Takes the reason of a refusal, the client's address, and the owner of a credential that is good
and too weak.
"""


class Authentication:
    """The credentials with which a client reaches the endpoint.

    Args:
        verifier: The SDK's ``TokenVerifier``, or one of ours.
        scopes: The scopes that each token needs.
        resource: The URL by which clients know this server; None: there is no metadata.
        issuers: Authorization servers that the metadata names.
        checks_resource: Whether a token must be issued for ``resource``; see the SDK's
            ``AuthSettings.validate_token_resource``.
        place: Returns, for the path of an endpoint, its resource and the routes of an authorization
            server that is a part of this server, with the metadata. None: there is no such part.
    """

    def __init__(
        self,
        verifier: TokenVerifier,
        scopes: Sequence[str] = (),
        *,
        resource: AnyHttpUrl | None = None,
        issuers: Sequence[AnyHttpUrl] = (),
        checks_resource: bool = False,
        place: Callable[[str], tuple[AnyHttpUrl | None, Sequence[Route]]] | None = None,
    ) -> None:
        self._verifier = verifier
        self._scopes = list(scopes)
        self._resource = resource
        self._issuers = list(issuers)
        self._checks_resource = checks_resource
        self._place = place
        self._routes: Sequence[Route] | None = None
        self._backend = _Backend(
            verifier, resource_server_url=resource if checks_resource else None
        )
        self.still_valid = Recheck(self._backend)
        """Asks again whether the credential of a request is good."""

    def requiring(self, scopes: Sequence[str]) -> Authentication:
        return Authentication(
            self._verifier,
            list(dict.fromkeys([*self._scopes, *scopes])),
            resource=self._resource,
            issuers=self._issuers,
            checks_resource=self._checks_resource,
            place=self._place,
        )

    def at(self, path: str) -> Authentication:
        """Return the authentication of the endpoint on a path."""
        if self._place is None:
            return self
        placed = self.requiring(())
        placed._resource, placed._routes = self._place(path)
        return placed

    def around(self, endpoint: ASGIApp, denied: OnDenied) -> ASGIApp:
        metadata = build_resource_metadata_url(self._resource) if self._resource else None
        guarded = RequireAuthMiddleware(endpoint, self._scopes, metadata)
        noting = _Noting(guarded, frozenset(self._scopes), denied)
        inner = AuthContextMiddleware(noting)
        return AuthenticationMiddleware(inner, _Door(self._backend), partial(_refused, denied))

    def routes(self) -> list[Route]:
        """Return the routes that need no credential: the metadata, and where to get a token."""
        if self._routes is not None:
            return list(self._routes)
        if self._resource is None:
            return []
        return create_protected_resource_routes(self._resource, self._issuers, self._scopes or None)


def authentication_of(
    settings: AuthSettings | None, verifier: TokenVerifier | None
) -> Authentication | None:
    """Return what the SDK's arguments of these names ask for. None: nothing.

    Raises:
        ConfigurationError: One is missing, or there is a part of an authorization server.
    """
    if settings is None and verifier is None:
        return None
    if settings is None or verifier is None:
        raise ConfigurationError("auth and token_verifier go together, as in the SDK's MCPServer")
    registration, revocation = settings.client_registration_options, settings.revocation_options
    if (registration and registration.enabled) or (revocation and revocation.enabled):
        raise ConfigurationError("auth: the layer verifies tokens, and issues or revokes none")
    return Authentication(
        verifier,
        settings.required_scopes or (),
        resource=settings.resource_server_url,
        issuers=[settings.issuer_url],
        checks_resource=bool(settings.validate_token_resource),
    )


def resource_server(
    verifier: TokenVerifier, issuer: str, resource: str, scopes: Sequence[str]
) -> Authentication:
    """Return what stands before a server with tokens of one issuer. The verifier checks for which
    resource a token is.
    """
    # The settings keep each URL as it is written, which clients compare.
    settings = AuthSettings.model_validate(
        {
            "issuer_url": issuer,
            "resource_server_url": resource,
            "required_scopes": list(scopes),
            "validate_token_resource": False,
        }
    )
    return Authentication(
        verifier, scopes, resource=settings.resource_server_url, issuers=[settings.issuer_url]
    )


class SdkVerifier:
    """The SDK's ``TokenVerifier`` over verifiers of ours, each for tokens of its kind.

    Args:
        then: Is asked about a token that none of them accepts.
    """

    def __init__(self, verifiers: Sequence[Verifier], then: TokenVerifier | None = None) -> None:
        self._verifiers = tuple(verifiers)
        self._then = then
        self._made = Recent[int, tuple[Credential, AccessToken]](MADE)
        """The SDK's token of each credential, by the object's identity: a verifier returns the same
        object as long as the credential is good.
        """

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return what the first verifier that accepts the token says.

        Raises:
            CannotVerify: It is unknown for now whether the token is good.
        """
        for verifier in self._verifiers:
            found = await verifier.verify(token)
            if found is not None:
                made = self._made.get(id(found))
                if made is not None and made[0] is found and made[1].token == token:
                    return made[1]
                return self._make(found, token)
        return None if self._then is None else await self._then.verify_token(token)

    def _make(self, found: Credential, token: str) -> AccessToken:
        ends = found.expires_at
        made = AccessToken(
            token=token,
            client_id=found.client_id,
            scopes=list(found.scopes),
            expires_at=math.ceil(ends) if ends is not None else None,
            subject=found.subject,
            claims={"iss": found.issuer},
        )
        self._made.keep(id(found), (found, made))
        return made


class _TokenInQuery(AuthenticationError):
    """A token in the query string gets into logs and histories."""


class _Unknown(Unverified):
    def __init__(self, retry_after: float) -> None:
        super().__init__("the credential cannot be verified for now")
        self.retry_after = retry_after


class _Forbidden(AuthenticationError):
    """The owner of the credential may not use the server."""


@dataclass(frozen=True, slots=True)
class _Bare:
    headers: Mapping[str, str]


class _Backend(BearerAuthBackend):
    async def authenticate(self, conn: HTTPConnection) -> Any:
        """Return the user of a request. None: there is no good token.

        Raises:
            AuthenticationError: The token is in the query string, or cannot be verified for now, or
                its owner may not use the server.
        """
        scope = conn.scope
        if scope.get("query_string") and _IN_QUERY in conn.query_params:
            raise _TokenInQuery
        given = next((field for field in scope["headers"] if field[0] == b"authorization"), None)
        if given is None or len(given[1]) > LONGEST:
            return None
        asker = ASKER.set(scope)
        try:
            # The SDK reads nothing else of a request, and each header that it gets.
            bare: Any = _Bare({"authorization": given[1].decode("latin-1")})
            return await super().authenticate(bare)
        except CannotVerify as unknown:
            raise _Unknown(unknown.retry_after) from unknown
        except NotAllowed as refused:
            raise _Forbidden from refused
        except Exception as failed:
            # The boundary to the application's verifier. It has not said that the token is bad.
            logger.error("a token verifier failed: %s", type(failed).__name__)
            raise _Unknown(_RETRY) from failed
        finally:
            ASKER.reset(asker)


class _Door(AuthenticationBackend):
    """The backend for requests that arrive. Their refusals wait while there are too many."""

    def __init__(self, backend: AuthenticationBackend) -> None:
        self._backend = backend
        self._pace = Pace()

    async def authenticate(self, conn: HTTPConnection) -> Any:
        try:
            found = await self._backend.authenticate(conn)
        except AuthenticationError:
            await self._wait(conn.scope)
            raise
        if found is None:
            await self._wait(conn.scope)
        return found

    async def _wait(self, scope: Scope) -> None:
        state: dict[str, Any] = scope.get("state") or {}
        await self._pace.wait(state.get(DELAYS), address_of(scope))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Noting:
    _app: ASGIApp
    _scopes: frozenset[str]
    _denied: OnDenied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        user = scope.get("user")
        if not isinstance(user, AuthenticatedUser):
            is_given = any(name == b"authorization" for name, _ in scope["headers"])
            _note(self._denied, "bad_token" if is_given else "no_token", scope, ANONYMOUS)
        elif not self._scopes.issubset(user.scopes):
            _note(self._denied, "insufficient_scope", scope, principal_of(scope))
        await self._app(scope, receive, send)


def _note(denied: OnDenied, reason: str, scope: Scope, principal: Principal) -> None:
    metrics.denied(reason)
    denied(reason, text_of_address(scope), principal)


_REASONS: Final[Mapping[type, str]] = {
    _Unknown: "unavailable",
    _Forbidden: "not_allowed",
    _TokenInQuery: "token_in_query",
}


def _refused(denied: OnDenied, conn: HTTPConnection, failed: AuthenticationError) -> Response:
    _note(denied, _REASONS[type(failed)], conn.scope, ANONYMOUS)
    if isinstance(failed, _Forbidden):
        said = "This user may not use the server"
        return JSONResponse({"error": "access_denied", "error_description": said}, 403)
    if isinstance(failed, _Unknown):
        body = {"error": "temporarily_unavailable", "error_description": str(failed)}
        return JSONResponse(body, 503, {"Retry-After": str(math.ceil(failed.retry_after))})
    said = "A token must not be in the query string"
    header = f'Bearer error="invalid_request", error_description="{said}"'
    body = {"error": "invalid_request", "error_description": said}
    return JSONResponse(body, 400, {"WWW-Authenticate": header})
