"""Several layers in one process: each on its own path, started and stopped together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.serve.draining import Draining
from mcp_sessions.serve.health import Health, health_routes
from mcp_sessions.serve.http import Leaving, draining_server
from mcp_sessions.serve.lifetime import Lifetime
from mcp_sessions.serve.not_found import NotFound
from mcp_sessions.serve.open_connections import ConnectionLimits
from mcp_sessions.serve.tls import Certificate


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Part:
    path: str
    app: ASGIApp
    lifetime: Lifetime
    draining: Draining
    health: Health
    beside: Sequence[BaseRoute]
    """Routes at paths of their own. Parts may have the same."""


@dataclass(slots=True, eq=False, repr=False)
class Together:
    """All of them.

    Args:
        delay: Seconds, see :class:`Leaving`.
        grace: See there.
    """

    _parts: Sequence[Part]
    _delay: float
    _grace: float

    def app(self, health: str | None) -> ASGIApp:
        """The application; a path that is nobody's is answered 404, which lists
        those of the servers.

        Args:
            health: What the checks, of all, are under; None: there are none.

        Raises:
            ConfigurationError: It does not begin with ``/``.
        """
        checks = health_routes(health, [p.health for p in self._parts]) if health else []
        beside = [route for part in self._parts for route in part.beside]
        rest = Starlette(routes=[*checks, *beside], lifespan=lambda _: self._lifespan())
        rest.router.default = NotFound([part.path for part in self._parts])
        by_path = {part.path: part.app for part in self._parts}

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            path = str(scope.get("path", "")).rstrip("/")
            await by_path.get(path, rest)(scope, receive, send)

        return application

    def leaving(self) -> Leaving:
        """How they stop."""
        return Leaving(
            delay=self._delay,
            grace=self._grace,
            announce=self._announce,
            needs_listener=lambda: any(part.draining.needs_listener() for part in self._parts),
            drain=self._drain,
        )

    async def open_stores(self) -> None:
        for part in self._parts:
            await part.lifetime.open_store()

    @asynccontextmanager
    async def _lifespan(self) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for part in self._parts:
                await stack.enter_async_context(part.lifetime.run())
            yield

    def _announce(self) -> None:
        for part in self._parts:
            part.draining.announce()

    async def _drain(self, grace: float) -> None:
        # One that fails keeps no other from being drained.
        done = await asyncio.gather(
            *(part.draining.drain(grace) for part in self._parts), return_exceptions=True
        )
        for failed in done:
            if isinstance(failed, BaseException):
                raise failed


def run_together(
    parts: Sequence[Part],
    sock: socket.socket,
    *,
    on_started: Callable[[], None],
    grace: float,
    drain_delay: float,
    health: str | None,
    limits: ConnectionLimits,
    access_log: bool,
    forwarded_allow_ips: str | None,
    certificate: Certificate | None,
) -> None:
    """Serve them on one socket until SIGINT or SIGTERM, then drain.

    Arguments and errors are those of :meth:`~mcp_sessions.layer.SessionLayer.run`.
    """
    together = Together(parts, drain_delay, grace)
    server = draining_server(
        together.app(health),
        together.leaving(),
        on_started,
        together.open_stores,
        log_level="warning",
        limits=limits,
        health=health,
        access_log=access_log,
        forwarded_allow_ips=forwarded_allow_ips,
        certificate=certificate,
    )
    with sock:
        server.run(sockets=[sock])
    if server.interrupted:
        raise KeyboardInterrupt
