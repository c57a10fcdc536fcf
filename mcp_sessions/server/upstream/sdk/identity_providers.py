"""Serve with one of FastMCP's identity providers: ``serve --auth github``.

The provider is FastMCP's ``AuthProvider``. It has the routes of the authorization server, and
verifies the tokens that it issued. Each argument of a provider's class is a variable, such as
``FASTMCP_SERVER_AUTH_GITHUB_CLIENT_ID``.

Rules, owned by ``tests/cli/test_serve_with_providers.py``:

1. A missing part (the extra, a variable, the provider itself) is reported in one line, before
   anything runs.
2. The URL of the server (``BASE_URL``) is https, or of this machine.
3. No variable makes a provider weaker: users always see the page on which they consent.
4. Tokens of the provider for other servers are refused: what says which those are must be set.

Rules, owned by ``tests/server/upstream/sdk/test_provided.py``:

1. A user that is not allowed is answered 403. To sign in again would not help.
2. If the provider cannot be reached, it is unknown for now whether a token is good. See
   :mod:`mcp_sessions.authentication.identity_service`.
3. An answer counts for :data:`FRESH` seconds, and a refusal for :data:`REFUSED` seconds: providers
   ask their service about each token. Questions have the bounds of
   :mod:`mcp_sessions.authentication.verdicts`. A good token counts on while the provider is away.
4. A token without a subject is refused: its users would own the same sessions.
5. An API key is not shown to the provider.
6. The provider's routes need no credential. Their requests have bounds.
7. A token does not have the scope of an operator, though a client may ask for it: an API key can.

Rules of these bounds, owned by ``tests/server/upstream/sdk/test_open_routes.py``:

1. The body of a request has at most :data:`LARGEST_BODY` bytes, and its query
   :data:`LONGEST_QUERY` bytes.
2. From one address come at most :data:`REGISTRATIONS` registrations a second, as many requests to
   sign in, and :data:`REQUESTS` requests to all other routes together. One more is answered 429,
   with ``Retry-After``. The first two are stored, so there are fewer of them.
3. An address that was quiet may send the requests of ten seconds at once. The number of known
   addresses has a bound: see :mod:`mcp_sessions.core.buckets`.
4. The log says it at most once a minute.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.authentication.allowing import Allowed
from mcp_sessions.authentication.credential import (
    OPERATOR,
    CannotVerify,
    NotAllowed,
    Verifier,
)
from mcp_sessions.authentication.identity_service import IdentityService
from mcp_sessions.authentication.issuer_addresses import checked_url
from mcp_sessions.authentication.key_file import id_of
from mcp_sessions.authentication.tokens import RefusalLog
from mcp_sessions.authentication.verdicts import RETRY, WITHIN, Verdicts
from mcp_sessions.core.addresses import address_of
from mcp_sessions.core.buckets import Buckets
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.seldom import OnceAMinute
from mcp_sessions.server.upstream.sdk.authentication import Authentication, SdkVerifier

logger = logging.getLogger(__name__)

PROVIDERS: Final = {
    "auth0": ("providers.auth0", "Auth0Provider"),
    "authkit": ("providers.workos", "AuthKitProvider"),
    "aws": ("providers.aws", "AWSCognitoProvider"),
    "azure": ("providers.azure", "AzureProvider"),
    "clerk": ("providers.clerk", "ClerkProvider"),
    "descope": ("providers.descope", "DescopeProvider"),
    "discord": ("providers.discord", "DiscordProvider"),
    "github": ("providers.github", "GitHubProvider"),
    "google": ("providers.google", "GoogleProvider"),
    "huggingface": ("providers.huggingface", "HuggingFaceProvider"),
    "keycloak": ("providers.keycloak", "KeycloakAuthProvider"),
    "oci": ("providers.oci", "OCIProvider"),
    "oidc": ("oidc_proxy", "OIDCProxy"),
    "propelauth": ("providers.propelauth", "PropelAuthProvider"),
    "scalekit": ("providers.scalekit", "ScalekitProvider"),
    "supabase": ("providers.supabase", "SupabaseProvider"),
    "workos": ("providers.workos", "WorkOSProvider"),
}
"""The word of ``--auth`` → module and class in ``fastmcp.server.auth``."""

VERIFY_MAIL: Final = frozenset({"github"})
"""Providers that show only addresses of which they know that they belong to the user."""

_AUDIENCE: Final = {"keycloak": "audience", "propelauth": "resource"}
"""The argument without which a provider takes tokens that it issued for other servers."""

_WEAKER: Final = frozenset(
    {"require_authorization_consent", "ssrf_safe", "enable_cimd", "forward_pkce", "strict"}
)


def provider_of(
    name: str,
    environment: Mapping[str, str] = os.environ,
    service: IdentityService | None = None,
) -> Any:
    """Return FastMCP's ``AuthProvider`` of a name, made from its variables.

    Args:
        service: Notes whether the provider's own service answers its verifier.

    Raises:
        ConfigurationError: There is no such provider, FastMCP is not installed, or a variable is
            missing or wrong.
    """
    if name not in PROVIDERS:
        raise ConfigurationError(f"--auth {name}: must be one of {', '.join(PROVIDERS)}")
    made = _class_of(name)
    prefix = f"FASTMCP_SERVER_AUTH_{name.upper()}_"
    given, missing = dict[str, Any](), list[str]()
    for each in inspect.signature(made).parameters.values():
        variable = prefix + each.name.upper()
        read = _reader(each)
        if read is None or each.name in _WEAKER:
            continue
        if environment.get(variable):
            try:
                given[each.name] = read(environment[variable])
            except ValueError as wrong:
                raise ConfigurationError(f"--auth {name}: {variable}: {wrong}") from wrong
        elif each.default is each.empty or each.name == _AUDIENCE.get(name):
            missing.append(variable)
    if missing:
        raise ConfigurationError(f"--auth {name}: set {', '.join(missing)}")
    known = {prefix + each.upper() for each in given}
    unused = sorted({each for each in environment if each.startswith(prefix)} - known)
    if unused:
        raise ConfigurationError(f"--auth {name}: {unused[0]} sets nothing of this provider")
    for each in ("base_url", "resource_base_url", "issuer_url"):
        if each in given:
            checked_url(f"{prefix}{each.upper()}", given[each])
    client = service.client(given.get("timeout_seconds")) if service is not None else None
    try:
        provider = made(**given, **_taking(made, client))
    except Exception as failed:
        # The boundary to FastMCP, which may ask the provider for its configuration.
        said = " ".join(str(failed).split()) or type(failed).__name__
        raise ConfigurationError(f"--auth {name}: {said}") from failed
    verifier = verifier_of(provider)
    if getattr(verifier, "_http_client", client) is None:
        # The verifier takes a client, and its provider passes none on.
        verifier._http_client = client
    return provider


def verifier_of(provider: Any) -> Any:
    proxied = getattr(provider, "_token_validator", None)
    return proxied if proxied is not None else getattr(provider, "token_verifier", None)


def _taking(made: Any, client: Any) -> dict[str, Any]:
    parameters = inspect.signature(made).parameters
    if client is None:
        return {}
    if "http_client" in parameters:
        return {"http_client": client}
    if "token_introspection_overrides" in parameters:
        return {"token_introspection_overrides": {"http_client": client}}
    return {}


def _class_of(name: str) -> Any:
    from importlib import import_module

    module, attribute = PROVIDERS[name]
    try:
        return getattr(import_module(f"fastmcp.server.auth.{module}"), attribute)
    except ImportError as failed:
        raise ConfigurationError(
            f"--auth {name} needs FastMCP: pip install 'mcp-sessions[fastmcp]' ({failed})"
        ) from failed


def _reader(parameter: inspect.Parameter) -> Any | None:
    kind = str(parameter.annotation).replace("pydantic.networks.", "")
    kinds = {each.strip() for each in kind.split("|")} - {"None"}
    if "<class 'bool'>" in kinds or kinds == {"bool"}:
        return _flag
    if "list[str]" in kinds:
        return _words
    if kinds & {"int", "<class 'int'>"}:
        return int
    if kinds & {"str", "<class 'str'>"} or "AnyHttpUrl" in kind or kind.startswith("Literal["):
        return str
    return None


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _flag(text: str) -> bool:
    if text.lower() not in ("1", "0", "true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() in ("1", "true")


FRESH: Final = 60.0
"""Seconds for which a user counts as signed in and allowed."""

REFUSED: Final = 10.0
"""Seconds for which a token that was refused is not asked about again."""


def provided(
    provider: Any,
    name: str,
    allowed: Allowed,
    clock: Callable[[], float],
    keys: Verifier | None = None,
    service: IdentityService | None = None,
) -> Authentication:
    """Return what stands before the endpoint.

    Args:
        provider: FastMCP's ``AuthProvider``.
        name: Its name, in principals.
        keys: Verifies credentials that are not the provider's.
        service: The one that the provider's verifier asks.
    """

    def at(path: str) -> tuple[Any, list[Route]]:
        # It computes what its tokens are for.
        routes: list[Route] = provider.get_routes(mcp_path=path)
        bounded(routes, time.monotonic)
        return provider._get_resource_url(path), routes

    verifier: TokenVerifier = ProvidedVerifier(
        provider, name, allowed, clock=clock, service=service
    )
    return Authentication(
        SdkVerifier([keys], verifier) if keys is not None else verifier,
        provider.required_scopes,
        place=at,
    )


class ProvidedVerifier:
    def __init__(
        self,
        provider: Any,
        name: str,
        allowed: Allowed,
        *,
        clock: Callable[[], float],
        service: IdentityService | None = None,
    ) -> None:
        self._provider = provider
        self._service = service or IdentityService(clock)
        self._issuer = f"urn:mcp-sessions:auth:{name}"
        self._allowed = allowed
        self._clock = clock
        self._verdicts = Verdicts[AccessToken](
            self._ask,
            lambda: self._note_away(f"no answer within {WITHIN:g} s"),
            lambda found: found.expires_at,
            clock=clock,
            fresh=FRESH,
            refused=REFUSED,
        )
        self._log = RefusalLog()
        self._is_away = False

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the owner of the token. None: it is not good.

        Raises:
            CannotVerify: The provider cannot be reached.
            NotAllowed: The user may not use the server.
        """
        if id_of(token) is not None:
            return None
        return await self._verdicts.verdict_on(token)

    async def _ask(self, token: str) -> AccessToken | None:
        found = await self._verified(token)
        if found is None:
            return None
        claims: dict[str, Any] = found.claims or {}
        subject = found.subject or claims.get("sub")
        if not isinstance(subject, str) or not subject:
            self._log.say("it names no user", self._clock())
            return None
        if not self._allowed.has(claims):
            raise NotAllowed
        issuer = claims.get("iss") or self._issuer
        update: dict[str, Any] = {"subject": subject, "claims": {**claims, "iss": issuer}}
        # Some providers grant each scope that a client asks for.
        update["scopes"] = [each for each in found.scopes if each != OPERATOR]
        return found.model_copy(update=update)

    async def _verified(self, token: str) -> AccessToken | None:
        with self._service.asking() as question:
            try:
                found = await self._provider.verify_token(token)
            except Exception as failed:
                # The boundary to the provider. No failure there says anything about the token.
                self._note_away(question.why or type(failed).__name__)
                raise CannotVerify(RETRY) from failed
        why = self._service.failure(question) if found is None else ""
        if why:
            self._note_away(why)
            raise CannotVerify(RETRY)
        if self._is_away:
            logger.info("the identity provider answers again")
        self._is_away = False
        return found

    def _note_away(self, why: str) -> None:
        if not self._is_away:
            logger.error("the identity provider does not answer: %s", why)
        self._is_away = True


LARGEST_BODY: Final = 65_536
"""Bytes of a request, at most."""

LONGEST_QUERY: Final = 8_192

REGISTRATIONS: Final = 2.0
"""A second, from one address: of clients that register, and of users that sign in."""

REQUESTS: Final = 20.0
"""A second, from one address."""

_STORED: Final = ("/register", "/authorize")


def bounded(routes: Sequence[Route], clock: Callable[[], float]) -> None:
    """Bound what reaches these routes.

    Args:
        clock: Seconds, on a clock that never goes back.
    """
    limits = _Limits(clock)
    for route in routes:
        route.app = _Bounded(RequestBodyLimitMiddleware(route.app, LARGEST_BODY), limits)


class _Limits:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stored = {path: Buckets(REGISTRATIONS) for path in _STORED}
        self._requests = Buckets(REQUESTS)
        self._refused = OnceAMinute()

    def wait(self, scope: Scope) -> float:
        """Count a request, or return the seconds after which it may come again."""
        now, path = self._clock(), str(scope["path"])
        stored = (each for end, each in self._stored.items() if path.endswith(end))
        buckets = next(stored, self._requests)
        wait = buckets.take(address_of(scope), now)
        if wait and (refused := self._refused.due(now)):
            logger.warning(
                "%d requests to sign in were refused; the last one: %s, of which one address may "
                "send %g a second",
                refused,
                path,
                buckets.rate,
            )
        return wait


class _Bounded:
    def __init__(self, app: ASGIApp, limits: _Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(scope["query_string"]) > LONGEST_QUERY:
            await PlainTextResponse("The query is too long", 414)(scope, receive, send)
            return
        wait = self._limits.wait(scope)
        if not wait:
            await self._app(scope, receive, send)
            return
        said = "Too many requests from this address"
        body = {"error": "temporarily_unavailable", "error_description": said}
        refusal = JSONResponse(body, 429, {"Retry-After": str(math.ceil(wait))})
        await refusal(scope, receive, send)
