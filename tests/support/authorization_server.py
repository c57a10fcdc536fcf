"""An authorization server that runs in the test: registration, consent, PKCE, JWTs, refresh.

The routes are the SDK's, and the codes and refresh tokens are FastMCP's. Its access tokens are
JWTs. A browser names its user by a cookie, and the user consents at once.
"""

import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from fastmcp.server.auth.providers.in_memory import InMemoryOAuthProvider
from mcp.server.auth.provider import AuthorizationCode, AuthorizationParams, RefreshToken
from mcp.server.auth.routes import create_auth_routes
from mcp.server.auth.settings import ClientRegistrationOptions
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from mcp_sessions.authentication.tokens import LEEWAY
from tests.support.duplex import listening
from tests.support.issuers import Json, Login, jwk
from tests.support.world import Clock

FIRST_LASTS = 5
"""Seconds for which a server accepts the first token of a user."""

CLIENT_KEEPS = 2
"""Seconds for which the client is notified that the first token is good."""

LASTS = 3_600

_user: ContextVar[str] = ContextVar("user of the browser")


class AuthorizationServer(InMemoryOAuthProvider):
    """What it did is counted, and what it issued is kept."""

    def __init__(self, url: str) -> None:
        super().__init__(base_url=url)
        self.url = url
        self.issuer = f"{url}/"
        """As the SDK writes it."""

        self.counts: Counter[str] = Counter()
        """Path → answered requests."""

        self.challenges: list[str] = []
        """What clients sent for PKCE."""

        self.resources: list[str | None] = []
        """What clients asked tokens for (RFC 8707)."""

        self.tokens: dict[str, list[str]] = {}
        """User → access tokens, the newest last."""

        self._owners: dict[str, tuple[str, str | None]] = {}
        self._router = Router(
            [
                *create_auth_routes(
                    self,
                    AnyHttpUrl(self.issuer),
                    client_registration_options=ClientRegistrationOptions(enabled=True),
                ),
                Route("/.well-known/openid-configuration", self._document),
                Route("/keys", self._keys),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope)
        self.counts[request.url.path] += 1
        cookie = SimpleCookie(request.headers.get("cookie", "")).get("user")
        _user.set(cookie.value if cookie is not None else "nobody")
        await self._router(scope, receive, send)

    async def authorize(
        self, client: OAuthClientInformationFull, params: AuthorizationParams
    ) -> str:
        """The user of the browser consents."""
        back = await super().authorize(client, params)
        self.challenges.append(params.code_challenge)
        self.resources.append(params.resource)
        self._owners[parse_qs(urlsplit(back).query)["code"][0]] = _user.get(), params.resource
        return back

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        """The first token, which does not last."""
        issued = await super().exchange_authorization_code(client, authorization_code)
        owner = self._owners.pop(authorization_code.code)
        self.counts["authorization_code"] += 1
        # A server adds its leeway.
        return self._signed(client, issued, owner, FIRST_LASTS - LEEWAY, CLIENT_KEEPS)

    async def exchange_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: RefreshToken, scopes: list[str]
    ) -> OAuthToken:
        """The next token."""
        issued = await super().exchange_refresh_token(client, refresh_token, scopes)
        self.counts["refresh_token"] += 1
        return self._signed(client, issued, self._owners.pop(refresh_token.token), LASTS, LASTS)

    def _signed(
        self,
        client: OAuthClientInformationFull,
        issued: OAuthToken,
        owner: tuple[str, str | None],
        lasts: float,
        expires_in: int,
    ) -> OAuthToken:
        user, resource = owner
        now = time.time()
        access_token = Login(Clock(now)).token(
            "P-256",
            iss=self.issuer,
            aud=resource,
            sub=user,
            client_id=client.client_id,
            scope=issued.scope,
            exp=int(now + lasts),
            jti=str(self.counts.total()),
        )
        self.tokens.setdefault(user, []).append(access_token)
        assert issued.refresh_token is not None
        self._owners[issued.refresh_token] = owner
        return issued.model_copy(update={"access_token": access_token, "expires_in": expires_in})

    async def _document(self, request: Request) -> JSONResponse:
        del request
        return JSONResponse({"issuer": self.issuer, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, request: Request) -> JSONResponse:
        del request
        keys: list[Json] = [jwk("P-256", "one")]
        return JSONResponse({"keys": keys})


@asynccontextmanager
async def authorization_server() -> AsyncGenerator[AuthorizationServer]:
    """One on a port of its own."""
    server: list[AuthorizationServer] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await server[0](scope, receive, send)

    async with listening(app) as port:
        server.append(AuthorizationServer(f"http://127.0.0.1:{port}"))
        yield server[0]


async def browse(url: str, user: str) -> dict[str, str]:
    """Open the page for consent as a user; return what the client gets back."""
    async with httpx2.AsyncClient(cookies={"user": user}) as browser:
        answer = await browser.get(url)
    assert answer.status_code == 302, answer.text
    query: Any = parse_qs(urlsplit(answer.headers["location"]).query)
    return {name: values[0] for name, values in query.items()}
