"""Real servers on real sockets, for a module of tests.

`serve(app)` runs an ASGI app under uvicorn on a free port of 127.0.0.1, in a thread of its
own, and stops it again. Both are bounded, and say what hung.
"""

import concurrent.futures
import functools
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread
import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.types import ASGIApp

from tests.support.wire import Wire

T = TypeVar("T")


class RunningServer:
    """A server that runs, and the way into its event loop."""

    def __init__(self, host: str, port: int, portal: BlockingPortal, wire: Wire) -> None:
        self.host = host
        self.port = port
        self.wire = wire
        """What went over the wire so far."""
        self._portal = portal

    def url(self, path: str = "/mcp", *, scheme: str = "http") -> str:
        return f"{scheme}://{self.host}:{self.port}{path}"

    async def call(
        self, function: Callable[..., Awaitable[T]], *args: object, within: float = 30.0
    ) -> T:
        """Await ``function(*args)`` in the server's event loop and return what it returns.

        Raises:
            TimeoutError: It took longer than ``within`` seconds.
        """
        bounded = functools.partial(_bounded, function, args, within)
        return await anyio.to_thread.run_sync(self._portal.call, bounded)


async def _bounded(
    function: Callable[..., Awaitable[T]], args: tuple[object, ...], within: float
) -> T:
    with anyio.fail_after(within):
        return await function(*args)


class _Server(uvicorn.Server):
    """A uvicorn server that says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set_result(None)


@contextmanager
def serve(
    app: ASGIApp, *, port: int = 0, uvloop: bool = False, within: float = 30.0
) -> Generator[RunningServer]:
    """Run ``app`` until the block ends.

    Args:
        app: With a lifespan or without one.
        port: To listen on; 0: a free one. Give the port of an earlier server to bring it
            back where its clients look for it.
        uvloop: Run on uvloop instead of asyncio's own event loop.
        within: Seconds to start, and again to stop.

    Raises:
        AssertionError: It did not start, or it did not stop.
    """
    listener = socket.create_server(("127.0.0.1", port))
    # Inherited by what it accepts. asyncio sets it only on sockets that name their protocol,
    # and without it each answer in two writes takes the 40 ms of a delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound_port: int = listener.getsockname()[1]
    wire = Wire(app)
    config = uvicorn.Config(
        wire,
        host="127.0.0.1",
        port=bound_port,
        ws="websockets-sansio",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    with start_blocking_portal("asyncio", {"use_uvloop": uvloop}) as portal:
        serving = portal.start_task_soon(server.serve, [listener])
        done, _ = concurrent.futures.wait(
            [server.has_started, serving],
            timeout=within,
            return_when=concurrent.futures.FIRST_COMPLETED,
        )
        if server.has_started not in done:
            # uvicorn answers a failed lifespan with SystemExit; that must not end pytest.
            cause = serving.exception() if serving in done else None
            serving.cancel()
            listener.close()
            raise AssertionError(f"the server did not start within {within:g} s") from cause
        try:
            yield RunningServer("127.0.0.1", bound_port, portal, wire)
        finally:
            server.should_exit = True
            try:
                serving.result(timeout=within)
            except concurrent.futures.TimeoutError:
                server.force_exit = True
                serving.cancel()
                unfinished = [e for e in wire.exchanges if not e.is_finished]
                raise AssertionError(
                    f"the server did not stop within {within:g} s; unfinished:\n"
                    + "\n".join(str(exchange) for exchange in unfinished)
                ) from None
            finally:
                listener.close()
            # uvicorn only logs it.
            assert not getattr(server.lifespan, "shutdown_failed", False), (
                "the app's lifespan failed at shutdown; the log says how"
            )
