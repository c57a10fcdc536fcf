import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mcp_sessions_conformance.fault import Fault, Http
from mcp_sessions_conformance.faults.shared_faults import text_of, tool
from mcp_sessions_conformance.peer import MODERN_VERSION
from mcp_sessions_conformance.values import Json


class OtherServers:
    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._urls: list[str] = []
        self._home = ""
        """The proxy's own host and port."""

    def stand_before(self, message: Json, asked: Json | None) -> None:
        if tool(asked) == "beside" and text_of(message).startswith("http"):
            self._urls.append(text_of(message))
            url = f"http://{self._home}/beside/{len(self._urls) - 1}/mcp"
            message["result"]["content"][0]["text"] = url

    def arrive(self, scope: MutableMapping[str, Any]) -> str:
        self._home = dict(scope["headers"]).get(b"host", b"").decode() or self._home
        parts = scope["path"].split("/")
        return self._urls[int(parts[2])] if parts[1] == "beside" else self._upstream


def buffered(
    push: Callable[..., Awaitable[None]], tasks: set[asyncio.Task[None]]
) -> Callable[..., Awaitable[None]]:
    """Return a ``push`` that returns at once.

    Args:
        tasks: Holds the task that waits instead.
    """
    waiting: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    async def take() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while True:
                await push(*await waiting.get())

    task = asyncio.create_task(take())
    tasks.add(task)
    task.add_done_callback(tasks.discard)

    async def keep(*given: Any) -> None:
        waiting.put_nowait(given)

    return keep


def status_of(fault: Fault, exchange: Http, body: bytes) -> int:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return exchange.status
    if fault.swaps_eras and code in _MODERN_STATUS:
        is_modern = exchange.asked.get("mcp-protocol-version") == MODERN_VERSION
        usual, other = (_MODERN_STATUS[code], 200) if is_modern else (200, _MODERN_STATUS[code])
        return other if exchange.status == usual else exchange.status
    return fault.statuses.get(code, exchange.status)


_MODERN_STATUS = {-32600: 400, -32601: 404, -32602: 400}
