"""Answer health checks: is this process alive, and may it get requests?

The checks need no credential and no allowed Host, because an orchestrator knows only an address.
Their answers name no session and no store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from mcp_sessions.core.availability import Availability
from mcp_sessions.errors import ConfigurationError, StoreRefused, StoreUnavailable
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.probe import probe

STORE_WITHIN = 2.0
"""Seconds in which the store answers, or it is away."""

FRESH = 1.0
"""Seconds for which its answer counts: however many ask, the store is asked this seldom."""


@dataclass(slots=True, eq=False, repr=False)
class Health:
    """``healthz``: this process serves. ``readyz``: it may be sent new requests.

    Args:
        clock: Seconds since 1970.
        availability: The layer's.
    """

    _store: SessionStore
    _clock: Callable[[], float]
    _availability: Availability
    _asked: asyncio.Task[str | None] | None = None
    _asked_at: float = 0.0

    def routes(self, path: str) -> list[BaseRoute]:
        """Both, for GET and HEAD.

        Args:
            path: What they are under: ``/`` for ``/healthz`` and ``/readyz``.

        Raises:
            ConfigurationError: It does not begin with ``/``.
        """
        return health_routes(path, [self])

    async def not_ready(self) -> str | None:
        if not self._availability.is_running:
            return "not running"
        if self._availability.is_leaving:
            return "draining"
        return await self._refusal_of_store()

    async def _refusal_of_store(self) -> str | None:
        now = asyncio.get_running_loop().time()
        if self._asked is None or (self._asked.done() and now - self._asked_at >= FRESH):
            self._asked_at = now
            self._asked = asyncio.create_task(self._ask_store())
        # The first caller may leave: the others still wait for the answer.
        return await asyncio.shield(self._asked)

    async def _ask_store(self) -> str | None:
        if not self._store.remembers:
            return None
        try:
            async with asyncio.timeout(STORE_WITHIN):
                await probe(self._store, now=self._clock())
        except StoreRefused:
            return "the session store refuses requests: see the log"
        except (StoreUnavailable, TimeoutError):
            return "the session store is away"
        return None


def health_paths(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    under = path.rstrip("/")
    return f"{under}/healthz", f"{under}/readyz"


def health_routes(path: str, layers: Sequence[Health]) -> list[BaseRoute]:
    if not path.startswith("/"):
        raise ConfigurationError(f"the path of the health checks begins with '/', not {path!r}")
    alive, ready = health_paths(path)

    async def healthz(request: Request) -> Response:
        del request
        return _said(200, "alive")

    async def readyz(request: Request) -> Response:
        del request
        for reason in await asyncio.gather(*(layer.not_ready() for layer in layers)):
            if reason is not None:
                return _said(503, reason)
        return _said(200, "ready")

    return [
        Route(alive, healthz, methods=["GET"]),
        Route(ready, readyz, methods=["GET"]),
    ]


def _said(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status, headers={"Cache-Control": "no-store"})
