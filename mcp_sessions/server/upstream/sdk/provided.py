"""Protect an endpoint with an identity provider of FastMCP.

The provider is FastMCP's ``AuthProvider``. It has the routes of the authorization server, and
verifies the tokens that it issued.

Rules, owned by ``tests/server/upstream/sdk/test_provided.py``:

1. A user that is not allowed is answered 403. To sign in again would not help.
2. If the provider cannot be reached, it is unknown for now whether a token is good. See
   :mod:`mcp_sessions.authentication.identity_service`.
3. An answer counts for :data:`FRESH` seconds, and a refusal for :data:`REFUSED` seconds: providers
   ask their service about each token. Questions have the bounds of
   :mod:`mcp_sessions.authentication.verdicts`. A good token counts on while the provider is away.
4. A token without a subject is refused: its users would own the same sessions.
5. An API key is not shown to the provider.
6. The provider's routes need no credential. Their requests have bounds: see
   :mod:`mcp_sessions.server.upstream.sdk.open_routes`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from mcp.server.auth.provider import AccessToken, TokenVerifier
from starlette.routing import Route

from mcp_sessions.authentication.allowing import Allowed
from mcp_sessions.authentication.credential import CannotVerify, NotAllowed, Verifier
from mcp_sessions.authentication.identity_service import IdentityService
from mcp_sessions.authentication.key_file import id_of
from mcp_sessions.authentication.tokens import RefusalLog
from mcp_sessions.authentication.verdicts import RETRY, WITHIN, Verdicts
from mcp_sessions.server.upstream.sdk.authentication import Authentication, SdkVerifier
from mcp_sessions.server.upstream.sdk.open_routes import bounded

logger = logging.getLogger(__name__)

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
        return found.model_copy(update={"subject": subject, "claims": {**claims, "iss": issuer}})

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
