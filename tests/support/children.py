"""Worlds whose wrapped server is `child_server.py`, and what is left of its processes."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp_sessions import StdioServer
from tests.support.world import World, world

CHILD = str(Path(__file__).with_name("child_server.py"))
MODERN_CHILD = str(Path(__file__).with_name("modern_child.py"))


def child(*arguments: str, **options: Any) -> StdioServer:
    return StdioServer(sys.executable, "-S", CHILD, *arguments, **options)


def modern_child(*arguments: str, **options: Any) -> StdioServer:
    """The same of the era of 2026-07-28 only (`modern_child.py`)."""
    return StdioServer(sys.executable, "-S", MODERN_CHILD, *arguments, **options)


@asynccontextmanager
async def child_world(
    *arguments: str, options: dict[str, Any] | None = None, **limits: Any
) -> AsyncGenerator[World]:
    """A layer over the child server; afterwards none of its processes is left."""
    async with world(server=child(*arguments, **(options or {})), **limits) as running:
        before = set(children_of(os.getpid()))
        yield running
        during = set(children_of(os.getpid())) - before
    for pid in during:
        assert not is_alive(pid), f"process {pid} is left"


def children_of(pid: int) -> list[int]:
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and _stat(int(name))[1:2] == [str(pid)]
    ]


def is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"])


def _stat(pid: int) -> list[str]:
    try:
        # After the name, which may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


async def until(look: Callable[[], object], what: str, seconds: float = 10) -> None:
    """Wait until ``look()`` holds: another process sends no signal."""
    async with asyncio.timeout(seconds):
        while not look():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
