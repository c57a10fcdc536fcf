"""Bound what clients without a credential may send to the routes of an identity provider.

Rules, owned by ``tests/server/upstream/sdk/test_open_routes.py``:

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

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.core.addresses import address_of
from mcp_sessions.core.buckets import Buckets

logger = logging.getLogger(__name__)

LARGEST_BODY: Final = 65_536
"""Bytes of a request, at most."""

LONGEST_QUERY: Final = 8_192

REGISTRATIONS: Final = 2.0
"""A second, from one address: of clients that register, and of users that sign in."""

REQUESTS: Final = 20.0
"""A second, from one address."""

_STORED: Final = ("/register", "/authorize")
_LOG_EVERY: Final = 60.0


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
        self._refused = 0
        self._said_at = -math.inf

    def wait(self, scope: Scope) -> float:
        """Count a request, or return the seconds after which it may come again."""
        now, path = self._clock(), str(scope["path"])
        stored = (each for end, each in self._stored.items() if path.endswith(end))
        buckets = next(stored, self._requests)
        wait = buckets.take(address_of(scope), now)
        if wait:
            self._say(path, buckets.rate, now)
        return wait

    def _say(self, path: str, rate: float, now: float) -> None:
        self._refused += 1
        if now - self._said_at >= _LOG_EVERY:
            logger.warning(
                "%d requests to sign in were refused; the last one: %s, of which one address may "
                "send %g a second",
                self._refused,
                path,
                rate,
            )
            self._said_at, self._refused = now, 0


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
