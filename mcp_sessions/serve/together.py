"""Several layers in one process: each on its own path, started and stopped together.

While they run, others may take their place: see :meth:`Together.serve`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.background import Background, stopped
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.serve.draining import Draining
from mcp_sessions.serve.endpoint import NotFound
from mcp_sessions.serve.health import Health, health_routes
from mcp_sessions.serve.lifespan import Lifespan
from mcp_sessions.serve.uvicorn_server import HttpSettings, Leaving, draining_server

logger = logging.getLogger(__name__)

_BASE = 0.5
"""Seconds until a store that is away is tried again, at most; later up to :data:`_CAP`."""

_CAP = 15.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Part:
    path: str
    app: ASGIApp
    lifespan: Lifespan
    draining: Draining
    health: Health
    extra_routes: Sequence[BaseRoute]
    """Routes at paths of their own. Parts may have the same."""


class _Running:
    """A part that runs, in a task of its own: the task that opened something closes it.

    Args:
        turn: Held while a part runs: one at a path.
        tries: Whether it waits for a store that is away.
    """

    def __init__(self, part: Part, turn: asyncio.Lock, *, tries: bool) -> None:
        self.part = part
        self.started = asyncio.Event()
        self._tries = tries
        self._ends = asyncio.Event()
        self._task = asyncio.create_task(self._run(turn))

    async def start(self) -> None:
        started = asyncio.create_task(self.started.wait())
        try:
            await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stopped(started)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        self._ends.set()
        if not self.started.is_set():
            await stopped(self._task)
            return
        await self._task

    async def _run(self, turn: asyncio.Lock) -> None:
        async with turn:
            if self._tries:
                await self._open_store()
            async with self.part.lifespan.run():
                self.started.set()
                await self._ends.wait()

    async def _open_store(self) -> None:
        backoff = Backoff(base=_BASE, cap=_CAP)
        while True:
            try:
                return await self.part.lifespan.open_store()
            except StoreUnavailable as failed:
                if not backoff.failures:
                    what = "%s: the store is away, and the changed server waits for it: %s"
                    logger.warning(what, self.part.path, failed)
                await asyncio.sleep(backoff.failed(random.random()))


class Together:
    """Serves all parts.

    Args:
        parts: Served from the start.
        delay: Seconds, see :class:`Leaving`.
        grace: See there.
    """

    def __init__(self, parts: Sequence[Part], delay: float, grace: float) -> None:
        self._first = parts
        self._delay = delay
        self._grace = grace
        self._served: dict[str, Part] = {part.path: part for part in parts}
        self._paths = list(self._served)
        self._checked = [part.health for part in parts]
        self._extra_routes: list[BaseRoute] = []
        """Routes of :meth:`app` that are under no path of a part."""

        self._running: dict[Part, _Running] = {}
        """Those that run, are about to, or end."""

        self._ending: set[Part] = set()
        self._starts: dict[Part, asyncio.Task[None]] = {}
        """Those that wait for their turn."""

        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._background = Background()

    def app(self, health: str | None) -> ASGIApp:
        """The application; a path that is nobody's is answered 404, which lists
        those of the servers.

        Args:
            health: What the checks, of all, are under; None: there are none.

        Raises:
            ConfigurationError: It does not begin with ``/``.
        """
        checks = health_routes(health, self._checked) if health else []
        rest = Starlette(routes=checks, lifespan=lambda _: self._lifespan())
        rest.router.redirect_slashes = False
        self._extra_routes = rest.router.routes
        self._extra_routes += [route for part in self._first for route in part.extra_routes]
        rest.router.default = NotFound(self._paths, rest.router.routes)

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            path = str(scope.get("path", "")).rstrip("/")
            part = self._served.get(path)
            await (part.app if part is not None else rest)(scope, receive, send)

        return application

    def leaving(self) -> Leaving:
        return Leaving(
            delay=self._delay,
            grace=self._grace,
            announce=self._announce,
            needs_listener=lambda: any(part.draining.needs_listener() for part in self._live()),
            drain=self._drain,
        )

    async def open_stores(self) -> None:
        for part in self._first:
            await part.lifespan.open_store()

    def holds(self, part: Part) -> bool:
        """Whether a part runs, or is about to. One that failed to start is gone for good."""
        return part in self._running or part in self._starts

    async def serve(self, parts: Sequence[Part]) -> None:
        """Serve these from now on. The others are drained in the background.

        A new part at the path of another one waits until that one has ended: both may have one
        store.

        Raises:
            ConfigurationError: A new part cannot be served. Nothing has changed.
            StoreUnavailable: The store of a new part is away. Nothing has changed.
        """
        gone = [part for part in self._running if part not in {*parts, *self._ending}]
        new = [part for part in parts if part not in self._running]
        free = [part for part in new if not self._turns[part.path].locked()]
        started: list[Part] = []
        try:
            for part in free:
                await self._start(part)
                started.append(part)
        except BaseException:
            for part in started:
                await self._stop(part)
            raise
        # From here on nothing fails: what waits for its turn also waits for its store.
        for part in free:
            self._route(part)
        for part in gone:
            self._ending.add(part)
            self._background.run("the end of a removed server", self._end(part))
        for part in new:
            if part not in started:
                work = self._follow(part)
                self._starts[part] = self._background.run("the start of a changed server", work)

    async def _follow(self, part: Part) -> None:
        try:
            await self._start(part, tries=True)
            self._route(part)
        finally:
            self._starts.pop(part, None)
            if part not in self._running:
                self._unroute_unless_used(part.path)

    async def _end(self, part: Part) -> None:
        starting = self._starts.get(part)
        if starting is not None:
            await stopped(starting)
        if part.health in self._checked:
            self._checked.remove(part.health)
        try:
            if part in self._live():
                await part.draining.drain(self._grace)
        finally:
            self._unroute_unless_used(part.path, but=part)
            await self._stop(part)
            self._ending.discard(part)

    def _route(self, part: Part) -> None:
        if part.path not in self._served:
            self._paths.append(part.path)
        self._unroute_extra(part.path)
        self._served[part.path] = part
        self._extra_routes += part.extra_routes
        self._checked.append(part.health)

    def _unroute_unless_used(self, path: str, *, but: Part | None = None) -> None:
        """Answer 404 at a path at which no other part drains, runs or waits for its turn."""
        if any(each.path == path for each in {*self._running, *self._starts} if each is not but):
            return
        self._unroute_extra(path)
        if self._served.pop(path, None) is not None:
            self._paths.remove(path)

    def _unroute_extra(self, path: str) -> None:
        part = self._served.get(path)
        for route in part.extra_routes if part is not None else ():
            self._extra_routes.remove(route)

    def _live(self) -> list[Part]:
        return [part for part, each in self._running.items() if each.started.is_set()]

    async def _start(self, part: Part, *, tries: bool = False) -> None:
        self._running[part] = _Running(part, self._turns[part.path], tries=tries)
        try:
            await self._running[part].start()
        except BaseException:
            await self._stop(part)
            raise

    async def _stop(self, part: Part) -> None:
        running = self._running.get(part)
        try:
            if running is not None:
                await running.stop()
        finally:
            self._running.pop(part, None)

    @asynccontextmanager
    async def _lifespan(self) -> AsyncGenerator[None]:
        try:
            for part in self._first:
                await self._start(part)
            yield
        finally:
            await self._background.close()
            await self._stop_all()

    async def _stop_all(self) -> None:
        async with AsyncExitStack() as stack:
            # One that fails keeps no other from being stopped.
            for part in list(self._running):
                stack.push_async_callback(self._stop, part)

    def _announce(self) -> None:
        for part in self._live():
            part.draining.announce()

    async def _drain(self, grace: float) -> None:
        # One that fails keeps no other from being drained.
        done = await asyncio.gather(
            *(part.draining.drain(grace) for part in self._live()), return_exceptions=True
        )
        for failed in done:
            if isinstance(failed, BaseException):
                raise failed


def run_together(
    together: Together,
    sock: socket.socket,
    on_started: Callable[[], None],
    settings: HttpSettings,
) -> None:
    """Serve them on one socket until SIGINT or SIGTERM, then drain.

    Errors are those of :meth:`~mcp_sessions.layer.SessionLayer.run`.
    """
    app, leaving = together.app(settings.health), together.leaving()
    server = draining_server(app, leaving, on_started, together.open_stores, settings)
    with sock:
        server.run(sockets=[sock])
    if server.interrupted:
        raise KeyboardInterrupt
