"""Pages that follow the sessions: how many, what a slow browser costs, and nothing without one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from starlette.types import ASGIApp

from mcp_sessions.dashboard import snapshots
from mcp_sessions.dashboard.application import MOST_STREAMS, Dashboard
from mcp_sessions.stores.memory import MemoryStore
from tests.dashboard.pages import Pages, made, opened, pages_of
from tests.support.persistent_clients import until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot follows the other at once."""
    monkeypatch.setattr(snapshots, "EVERY", 0.01)
    monkeypatch.setattr(snapshots, "_FRESH", 0.0)


@dataclass
class Stream:
    """A browser that reads the changes of a view, or that takes nothing after the first part."""

    app: ASGIApp
    path: str = "/live/sessions"
    is_slow: bool = False
    status: int = 0
    parts: list[bytes] = field(default_factory=list[bytes])
    leaves: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": self.path, "raw_path": self.path.encode(), "root_path": "",
            "query_string": b"", "headers": [], "server": ("localhost", 80),
            "client": ("127.0.0.1", 4711),
        }  # fmt: skip
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if message.get("body"):
            self.parts.append(message["body"])
        if self.is_slow:
            await self.leaves.wait()

    async def has(self, text: str) -> None:
        await until(lambda: any(text.encode() in each for each in self.parts), text)


def app_of(pages: Pages) -> ASGIApp:
    return Dashboard(pages.snapshots, title="the store").app()


async def test_one_page_too_many_is_refused_and_has_room_when_another_is_closed() -> None:
    """All ask at once, so none is counted when the others are looked at."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        app = app_of(pages)
        streams = [Stream(app) for _ in range(MOST_STREAMS + 3)]
        async with anyio.create_task_group() as tasks:
            for each in streams:
                tasks.start_soon(each.run)
            await until(lambda: all(each.parts for each in streams), "each page has an answer")
            statuses = [each.status for each in streams]
            assert statuses.count(200) == MOST_STREAMS == 32 and statuses.count(503) == 3
            refused = streams[statuses.index(503)]
            assert refused.parts == [b"too many pages are open\n"]
            streams[statuses.index(200)].leaves.set()
            await _let_in(app)
            for each in streams:
                each.leaves.set()


async def _let_in(app: ASGIApp) -> None:
    """A page is let in as soon as there is room."""
    with anyio.fail_after(20):
        while True:
            another = Stream(app)
            another.leaves.set()
            await another.run()
            if another.status == 200:
                return
            await anyio.sleep(0.01)


async def test_a_browser_that_takes_nothing_costs_one_part() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        app = app_of(pages)
        slow, quick = Stream(app, is_slow=True), Stream(app)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow.run)
            tasks.start_soon(quick.run)
            await slow.has("0 of 0 sessions")
            for count in range(1, 6):
                await made(store)
                await quick.has(f"{count} of {count} sessions")

            assert len(slow.parts) == 1 and len(quick.parts) >= 6
            slow.leaves.set()
            quick.leaves.set()


async def test_nothing_polls_when_the_last_page_is_closed() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        before = asyncio.all_tasks()
        stream = Stream(app_of(pages))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.run)
            await stream.has("0 of 0 sessions")
            assert pages.snapshots.watchers == 1
            stream.leaves.set()

        await until(lambda: not asyncio.all_tasks() - before, "no task of the page is left")
        assert pages.snapshots.watchers == 0
