"""Running the application: the socket, the server, and an order of shutting down."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

RUN_IS_REFUSED: ContextVar[Callable[[], NoReturn] | None] = ContextVar(
    "run_is_refused", default=None
)
"""Set where the code that would run a server is only loaded: it raises."""


class MountedApp:
    """The ASGI application: straight to the endpoint where nothing stands before it."""

    def __init__(
        self,
        inner: Starlette,
        endpoint: ASGIApp | None,
        websocket: ASGIApp,
        path: str,
        beside: Sequence[BaseRoute] = (),
    ) -> None:
        """Take what it works with.

        Args:
            inner: Everything else, and HTTP to the endpoint where something stands before.
            endpoint: HTTP to the endpoint, if nothing stands before it.
            websocket: WebSocket to the endpoint; it authenticates by itself.
            path: The endpoint's.
            beside: Routes that nothing stands before.
        """
        self._inner = inner
        self._beside = beside
        self._endpoint = endpoint
        self._websocket = websocket
        self._path = path

    @property
    def lifespan(self) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """For the application that mounts this one: ``FastAPI(lifespan=app.lifespan)``."""
        return self._inner.router.lifespan_context

    @property
    def routes(self) -> list[BaseRoute]:
        """The server's own, with the endpoint's among them."""
        return self._inner.routes

    @property
    def state(self) -> State:
        """What handlers find as ``request.app.state``."""
        return self._inner.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or connection."""
        kind = scope["type"]
        if kind == "http" and self._endpoint is not None and self._is_here(scope):
            # As Starlette does: handlers may ask for ``request.app`` and ``request.url_for``.
            scope["app"], scope["router"] = self._inner, self._inner.router
            await self._endpoint(scope, receive, send)
        elif kind == "websocket" and self._is_here(scope):
            await self._websocket(scope, receive, send)
        else:
            for route in self._beside:
                match, more = route.matches(scope)
                if match is not Match.NONE:
                    await route.handle({**scope, **more}, receive, send)
                    return
            await self._inner(scope, receive, send)

    def _is_here(self, scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :]
        # Another spelling of the path is for the application to answer: it redirects. That
        # helps no WebSocket.
        return path == self._path or (
            scope["type"] == "websocket" and path.rstrip("/") == self._path.rstrip("/")
        )


class DrainingServer(uvicorn.Server):
    """uvicorn that drains the layer first, and only then waits for open streams."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[float], Awaitable[None]],
        grace: float,
        on_started: Callable[[], None] | None,
        before: Callable[[], Awaitable[None]],
    ) -> None:
        """Take what it works with.

        Args:
            before: Done before anything is served. What it raises comes out of ``run``,
                where uvicorn would log it, with its traceback, and only end.
        """
        super().__init__(config)
        self._before = before
        self._drain = drain
        self._grace = grace
        self._on_started = on_started
        self.ready = asyncio.Event()
        """Set when connections are taken, or never will be."""

        self.interrupted = False
        """SIGINT ended it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._before()
        await super().serve(sockets=sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        # What was made until now stays until the end: the collector need not look at it
        # again and again. Only here, where the process is ours.
        gc.collect()
        gc.freeze()
        self.ready.set()
        if self.started and self._on_started is not None:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain(self._grace)
        await super().shutdown(sockets=sockets)


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that takes connections.

    Raises:
        OSError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Said to be TCP: asyncio switches Nagle's delay off for such sockets only, and an answer
    # written in two steps would wait for it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
