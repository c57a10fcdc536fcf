import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@asynccontextmanager
async def listening(app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> AsyncGenerator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=64 * 1024 * 1024,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=1,
    )
    runner = _Runner(config)
    task = asyncio.create_task(runner.serve([listener]))
    try:
        await runner.has_started()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        runner.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.shield(task)
        task.cancel()
        await asyncio.wait([task], timeout=1)
        listener.close()


class _Runner(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._has_started.set()

    async def has_started(self) -> None:
        async with asyncio.timeout(10):
            await self._has_started.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
