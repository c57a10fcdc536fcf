"""Streamable HTTP: one endpoint, two eras. Picks the era and guards the door; and the application
that leads straight to it where nothing else stands before it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.core.availability import Availability, not_running
from mcp_sessions.core.messages import encode, error_body
from mcp_sessions.core.nearness import BY_NAME
from mcp_sessions.errors import INTERNAL_ERROR, NotBegun, StoreUnavailable
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import stopping
from mcp_sessions.server.requests.outcome import store_error
from mcp_sessions_transports.credentials import (
    FRESH,
    CredentialEnded,
    CredentialLapsed,
    CredentialWatch,
)
from mcp_sessions_transports.http.handshake import HandshakeHttp
from mcp_sessions_transports.http.io import (
    Arrival,
    Headers,
    HttpCall,
    ServerDraining,
    send_json,
    send_text,
)
from mcp_sessions_transports.http.modern import ModernHttp
from mcp_sessions_transports.origin import Guards, OriginGuard
from mcp_sessions_transports.pages import AROUND, ASKED

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_SPACE = (b" ", b"\t")

_ARRIVED = "mcp_sessions.arrived"
"""In the scope of a request that came before what stands before the endpoint: see
:meth:`Arrivals.enter`."""

_LATE = 10.0
"""Seconds that a request has which comes when the server stops: it may be an answer to one that
runs.
"""

_CHALLENGE = (b"www-authenticate", b'Bearer error="invalid_token"')

RETRY_AFTER_STORE = 1.0
"""Seconds after which a client should ask again when the store was away."""


class Arrivals:
    """Requests on their way in: an HTTP POST from the first that is known of it until it runs or
    was answered. A request that arrived before a layer begins to stop is served, if it is soon
    authenticated, read and looked up. It is refused if its body does not come: the server of an
    application would wait for it.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        """Called once, when the first request comes."""

        self.inside: dict[Arrival, None] = {}
        """Those on their way."""

        self._on_none: Callable[[], None] | None = None

    def enter(self) -> Arrival | None:
        """Note an arriving request. None: it arrives too late."""
        if self.on_first is not None:
            on_first, self.on_first = self.on_first, None
            on_first()
        if self._on_none is not None:
            return None
        arrival = Arrival(asyncio.current_task())
        self.inside[arrival] = None
        return arrival

    def arrived(self, arrival: Arrival) -> None:
        """Note that a request runs, or was answered. To repeat it changes nothing."""
        self.inside.pop(arrival, None)
        if not self.inside:
            # The table of one that had many entries stays large.
            self.inside = {}
        if self._on_none is not None:
            self._notify()

    def close(self, on_none: Callable[[], None]) -> None:
        """Accept no more arrivals.

        Args:
            on_none: Called when nothing is on its way any more, now or later; in place of an
                earlier one.
        """
        self._on_none = on_none
        self._notify()

    def give_up(self) -> None:
        """Refuse those whose body is not there."""
        for arrival in self.inside:
            if arrival.task is not None and not (arrival.is_read or arrival.is_given_up):
                arrival.is_given_up = True
                arrival.task.cancel()

    def _notify(self) -> None:
        if self._on_none is not None and not self.inside:
            self._on_none()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arriving:
    """An application before the endpoint, which may delay requests on their way in."""

    _app: ASGIApp
    _arrivals: Arrivals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        arrival = self._arrivals.enter()
        try:
            await self._app({**scope, _ARRIVED: arrival}, receive, send)
        except asyncio.CancelledError:
            if arrival is None or not arrival.was_given_up():
                raise
            await _refuse(send, 0)
        finally:
            if arrival is not None and arrival in self._arrivals.inside:
                self._arrivals.arrived(arrival)


@dataclass(eq=False, repr=False)
class MountedApp:
    """The ASGI application: straight to the endpoint if nothing is before it.

    Args:
        inner: Everything else, and HTTP to the endpoint where something stands before.
        endpoint: HTTP to the endpoint, past ``inner`` if nothing stands before it.
        websocket: WebSocket to the endpoint; it authenticates by itself.
        path: The endpoint's. It is served with and without a slash at its end: a redirect
            would lose a credential, or send it in clear behind a proxy that ends TLS.
        guards: Decide by Host and Origin.
        extra_routes: Routes that nothing stands before.
    """

    _inner: Starlette
    _endpoint: ASGIApp
    _websocket: ASGIApp
    _path: str
    guards: Guards
    _extra_routes: Sequence[BaseRoute] = ()

    @property
    def lifespan(self) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """For the application that mounts this one: ``FastAPI(lifespan=app.lifespan)``."""
        return self._inner.router.lifespan_context

    @property
    def routes(self) -> list[BaseRoute]:
        return self._inner.routes

    @property
    def state(self) -> State:
        return self._inner.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind in ("http", "websocket") and self._is_here(scope):
            if kind == "websocket":
                await self._websocket(scope, receive, send)
                return
            if "app" in scope:
                scope[AROUND] = scope["app"]
            # As Starlette does: handlers may ask for ``request.app`` and ``request.url_for``.
            scope["app"], scope["router"] = self._inner, self._inner.router
            await self._endpoint(scope, receive, send)
        else:
            for route in self._extra_routes:
                match, more = route.matches(scope)
                if match is not Match.NONE:
                    await route.handle({**scope, **more}, receive, send)
                    return
            await self._inner(scope, receive, send)

    def _is_here(self, scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :]
        return path == self._path or path.rstrip("/") == self._path.rstrip("/")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AtPath:
    _app: ASGIApp
    _path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + self._path
        await self._app({**scope, "path": path}, receive, send)


@dataclass(slots=True, eq=False, repr=False)
class StreamableHttp:
    """The ASGI endpoint.

    Args:
        modern: Serves every request whose version is not of the handshake era.
        handshake_versions: Those that are, as in a header. None: no header.
        principal_of: Returns the sender of a request, from the values that authentication left in
            the scope.
    """

    _handshake: HandshakeHttp
    _modern: ModernHttp
    _handshake_versions: frozenset[bytes | None]
    _guard: OriginGuard
    _principal_of: Callable[[Scope], Principal]
    _availability: Availability
    _arrivals: Arrivals
    _credentials: CredentialWatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope.get(ASKED)
        if asked is not None:
            await asked(scope, send)
            return
        if not self._availability.is_running:
            raise not_running()
        arrivals = self._arrivals
        arrival = scope.get(_ARRIVED) or arrivals.enter()
        if arrival is None:
            try:
                async with asyncio.timeout(_LATE):
                    await self._serve(scope, receive, send)
            except TimeoutError:
                await self._refuse(send)
            return
        if scope["method"] != "POST":
            # A stream ends with the server, whenever it came.
            arrivals.arrived(arrival)
        try:
            await self._serve(scope, receive, send, arrival)
        except asyncio.CancelledError:
            if not arrival.was_given_up():
                raise
            await self._refuse(send)
        finally:
            if arrival in arrivals.inside:
                arrivals.arrived(arrival)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, arrival: Arrival | None = None
    ) -> None:
        """Serve one request of a server that runs.

        Args:
            arrival: None: the server stops, and it came too late.
        """
        fields = scope["headers"]
        for _, value in fields:
            if value[:1] in _SPACE or value[-1:] in _SPACE:
                # RFC 9110, 5.5: white space around a value is no part of it. Not every HTTP
                # server takes it off.
                fields = [(name, padded.strip(b" \t")) for name, padded in fields]
                scope = {**scope, "headers": fields}
                break
        if self._guard.is_by_name:
            scope = {**scope, BY_NAME: True}
        # If a field is there twice, the first counts, as for the SDK.
        headers: Headers = dict(reversed(fields))
        is_modern = headers.get(b"mcp-protocol-version") not in self._handshake_versions
        if arrival is None and (is_modern or scope["method"] != "POST"):
            await self._refuse(send)
            return
        if b"origin" in headers:
            await self._guard.learn(scope, headers)
        refused = None
        if not is_modern:
            refused = self._guard.verdicts[headers.get(b"host"), headers.get(b"origin")]
        if refused is not None:
            status, text = refused
            await send_text(send, status, text)
            return
        # Without authentication there is no user: most servers have none.
        principal, fresh_until = ANONYMOUS, None
        if "user" in scope:
            principal = self._principal_of(scope)
            fresh_until = self._credentials.clock() + FRESH
        watch = partial(self._credentials.watch, scope, principal)
        header = headers.get(b"mcp-session-id")
        call = HttpCall(
            scope,
            receive,
            send,
            headers,
            principal,
            watch,
            partial(self._arrivals.arrived, arrival) if arrival is not None else _late,
            session_header=header.decode("latin-1") if header is not None else None,
            fresh_until=fresh_until,
            clock=self._credentials.clock,
            arrival=arrival,
        )
        try:
            if is_modern:
                await self._modern.serve(call)
            else:
                await self._handshake.serve(call, draining=arrival is None)
        except CredentialEnded:
            # Its response has ended.
            pass
        except CredentialLapsed:
            body = encode(
                {"error": "invalid_token", "error_description": "Authentication required"}
            )
            await send_json(send, body, status=401, headers=[_CHALLENGE])
        except ServerDraining:
            await self._refuse(send)
        except StoreUnavailable as failed:
            # A line for each request, not a traceback: what is wrong is not in this program.
            logger.error("the session store failed: %s", failed)
            error = error_body(INTERNAL_ERROR, failed.client_text)
            if isinstance(failed, NotBegun):
                error = store_error(failed)
            await _unavailable(send, error, RETRY_AFTER_STORE)

    async def _refuse(self, send: Send) -> None:
        await _refuse(send, self._availability.retry_after or 0)


def _late() -> None:
    """Used after shutdown began: there is no arrival to release."""


async def _refuse(send: Send, retry_after: float) -> None:
    await _unavailable(send, stopping().error or {}, retry_after)


async def _unavailable(send: Send, error: Mapping[str, Any], retry_after: float) -> None:
    body = encode({"jsonrpc": "2.0", "id": None, "error": error})
    headers = [(b"retry-after", str(math.ceil(retry_after)).encode())]
    await send_json(send, body, status=503, headers=headers)
