from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from starlette.types import Message, Scope, Send

from mcp_sessions.background import Background
from mcp_sessions.principal import Principal
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

StillValid = Callable[[Scope, Principal], Awaitable[bool]]

_ANSWER = 10.0
"""Seconds within which the application has to say whether a credential is good."""

_PATIENCE = 1.0
"""Seconds for which a message waits for that."""

FRESH = 1.0
"""Seconds for which an answer counts where messages are sent."""

_NOTHING: list[tuple[bytes, bytes]] = [(b"content-type", b"text/event-stream")]


class CredentialEnded(ConnectionResetError):
    """The credential of a response ended. The client got its end, and nothing of it."""


class CredentialLapsed(Exception):
    """The credential of a request ended while the request came. Nothing ran."""


@dataclass(slots=True, eq=False, repr=False)
class CredentialWatch:
    """Ends a stream when its credential expires, or is not accepted any more.

    Args:
        still_valid: Asks the server's own authentication again; None: it has none.
        interval: Seconds between two questions while nothing is sent.
    """

    _still_valid: StillValid | None
    interval: float
    clock: Callable[[], float]

    @asynccontextmanager
    async def watch(
        self, scope: Scope, principal: Principal, end: Callable[[], None]
    ) -> AsyncGenerator[Watched]:
        """Watch while the block runs.

        Args:
            end: Ends the stream at once, before another event.
        """
        can_end = self._still_valid is not None or principal.expires_at is not None
        watched = Watched(self, scope, principal, end, can_end)
        if not can_end:
            yield watched
            return
        if self.has_expired(principal):
            # While what it asked for was being made ready.
            end()
        background = Background()
        background.run("watching a credential", watched.follow())
        try:
            yield watched
        finally:
            await background.close()

    def has_expired(self, principal: Principal) -> bool:
        return principal.expires_at is not None and self.clock() >= principal.expires_at

    async def asked(self, scope: Scope, principal: Principal, within: float) -> bool:
        """Ask whether a credential is good. Whatever is raised: that is unknown."""
        if self.has_expired(principal):
            return False
        if self._still_valid is None:
            # Something else than the server's own application authenticated it, and said until
            # when.
            return True
        async with asyncio.timeout(within):
            return await self._still_valid(scope, principal)


@dataclass(slots=True, eq=False, repr=False)
class Watched:
    """The credential of one response or connection, while it is watched."""

    _watch: CredentialWatch
    _scope: Scope
    _principal: Principal
    _end: Callable[[], None]
    can_end: bool
    """False: nothing is asked."""

    _asked_at: float = -math.inf
    _is_over: bool = False

    async def is_good(self) -> bool:
        """Ask before a message is sent or taken. If that cannot be known now, the watch decides."""
        watch, principal = self._watch, self._principal
        now = asyncio.get_running_loop().time()
        is_due = now - self._asked_at >= FRESH or watch.has_expired(principal)
        if is_due and not self._is_over:
            try:
                is_good = await watch.asked(self._scope, principal, _PATIENCE)
            except Exception as failed:
                # The boundary to the application's token verifier. Its text may hold the token.
                logger.debug("a credential could not be checked: %s", type(failed).__name__)
                is_good = True
            self._asked_at = now
            if not is_good:
                self._over()
        return not self._is_over

    def guarding(self, send: Send) -> Send:
        """Return what sends the messages of a response while the credential is good. Then it ends
        the response, and raises :class:`CredentialEnded`.
        """
        if not self.can_end:
            return send

        async def sending(message: Message) -> None:
            # A comment that keeps a stream open says nothing.
            if message.get("body", b"").startswith(b":") or await self.is_good():
                await send(message)
                return
            # Not 401: the request has run perhaps, and clients send it again after that.
            if message["type"] == "http.response.start":
                await send({**message, "status": 200, "headers": _NOTHING})
            if message["type"].startswith("http."):
                await send({"type": "http.response.body", "body": b""})
            raise CredentialEnded

        return sending

    async def follow(self) -> None:
        """End the stream when its credential ends, also if nothing is sent."""
        try:
            await self._follow()
        except Exception:
            # Nobody watches any more, and a stream must not outlive its credential.
            self._end()
            raise

    async def _follow(self) -> None:
        watch, principal = self._watch, self._principal
        while not self._is_over:
            wait = watch.interval
            if principal.expires_at is not None:
                wait = min(wait, max(0.0, principal.expires_at - watch.clock()))
            await asyncio.sleep(wait)
            if not await self._is_accepted():
                self._over()

    async def _is_accepted(self) -> bool:
        watch = self._watch
        try:
            return await watch.asked(self._scope, self._principal, min(_ANSWER, watch.interval))
        except Exception as failed:
            # The boundary to the application's token verifier. One that fails has not said
            # yes, and a stream must not outlive its credential because of that.
            # Its text may hold the token.
            logger.error(
                "a credential could not be checked again, and its stream ends: %s",
                type(failed).__name__,
            )
            return False

    def _over(self) -> None:
        if not self._is_over:
            self._is_over = True
            logger.info("a stream ended with its credential")
            self._end()


def no_stream() -> None:
    """There is no stream to end."""


WatchCredential = Callable[[Callable[[], None]], AbstractAsyncContextManager[Watched]]
"""Watches a credential while a block runs; it is given what ends the block's stream."""
