from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from starlette.types import Scope

from mcp_sessions.background import Background
from mcp_sessions.principal import Principal

logger = logging.getLogger(__name__)

StillValid = Callable[[Scope, Principal], Awaitable[bool]]
WatchCredential = Callable[[Callable[[], None]], AbstractAsyncContextManager[None]]
"""Watches a credential while a block runs; it is given what ends the block's stream."""

_ANSWER = 10.0
"""Seconds within which the application has to say whether a credential is good."""


@dataclass(slots=True, eq=False, repr=False)
class CredentialWatch:
    """Ends a stream when its credential expires, or is not accepted any more.

    Args:
        still_valid: Asks the server's own authentication again; None: it has none.
        interval: Seconds between two questions.
    """

    _still_valid: StillValid | None
    _interval: float
    _clock: Callable[[], float]

    @asynccontextmanager
    async def watch(
        self, scope: Scope, principal: Principal, end: Callable[[], None]
    ) -> AsyncGenerator[None]:
        """Watch while the block runs.

        Args:
            end: Ends the stream at once, before another event.
        """
        if self._still_valid is None and principal.expires_at is None:
            yield
            return
        if self._has_expired(principal):
            # While what it asked for was being made ready.
            end()
        background = Background()
        background.run("watching a credential", self._watched(scope, principal, end))
        try:
            yield
        finally:
            await background.close()

    async def _watched(self, scope: Scope, principal: Principal, end: Callable[[], None]) -> None:
        try:
            await self._watch(scope, principal, end)
        except Exception:
            # Nobody watches any more, and a stream must not outlive its credential.
            end()
            raise

    async def _watch(self, scope: Scope, principal: Principal, end: Callable[[], None]) -> None:
        while True:
            wait = self._interval
            if principal.expires_at is not None:
                wait = min(wait, max(0.0, principal.expires_at - self._clock()))
            await asyncio.sleep(wait)
            if self._has_expired(principal) or not await self._accepted(scope, principal):
                logger.info("a stream ended with its credential")
                end()
                return

    def _has_expired(self, principal: Principal) -> bool:
        return principal.expires_at is not None and self._clock() >= principal.expires_at

    async def _accepted(self, scope: Scope, principal: Principal) -> bool:
        if self._still_valid is None:
            # Something else than the server's own application authenticated it, and said until
            # when.
            return True
        try:
            async with asyncio.timeout(min(_ANSWER, self._interval)):
                return await self._still_valid(scope, principal)
        except Exception as failed:
            # The boundary to the application's token verifier. One that fails has not said
            # yes, and a stream must not outlive its credential because of that.
            # Its text may hold the token.
            logger.error(
                "a credential could not be checked again, and its stream ends: %s",
                type(failed).__name__,
            )
            return False
