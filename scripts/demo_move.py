"""The demo's second act: the SDK's own client, and a call that moves with its session.

``demo.py`` imports this while its server starts: the SDK takes a second to load.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from demo_checks import INDEX, UPDATED, Move, said  # which makes plain_client be found
from demo_stage import Relay, chapter, line
from mcp import Client
from mcp.client.subscriptions import ResourceUpdated, Subscription
from mcp_types import CallToolResult
from plain_client import PlainClient
from rich.console import Console

from mcp_sessions import resumable

REST = 0.25
"""Seconds that the second act's call rests after each note."""
BEFORE, MEANWHILE, AFTER = "groceries", "ideas", "journal"
"""The notes that somebody changes before, during and after the move."""


async def move(
    seen: Move, console: Console, other: PlainClient, *, http: Relay, websocket: Relay
) -> None:
    to_url = f"ws://127.0.0.1:{websocket.port}/mcp"
    transport = resumable(f"http://127.0.0.1:{http.port}/mcp", to_url)
    notes = [f"note://{name}" for name in (BEFORE, MEANWHILE, AFTER)]
    async with (
        PlainClient(other.url) as watcher,
        Client(transport) as client,
        client.listen(resource_subscriptions=notes) as changes,
        asyncio.TaskGroup() as tasks,
    ):
        # A client of its own, which learns of every index that the server writes.
        await watcher.initialize()
        await watcher.request("resources/subscribe", {"uri": f"note://{INDEX}"})
        await watcher.open_stream()
        receiving = tasks.create_task(receive(changes, seen))
        await client.call_tool("open_note", {"name": BEFORE})
        began = time.monotonic()
        call = tasks.create_task(index(client, seen))
        await change(seen, other, BEFORE)
        await until(lambda: seen.steps != [] and seen.received != [], "a step of the call")
        chapter(console, "6. Second act: the SDK's own client, and a call that takes a while")
        seen.lines_before = http.open, websocket.open
        line(console, f"Client(resumable(HTTP, WS)) -> TCP connections: {tcp(seen.lines_before)}")
        line(console, f"tools/call index_notes      -> at note {seen.steps[-1]} of {seen.length}")
        line(console, f"subscriptions/listen        -> {seen.received[0]} changed, live")

        seen.steps_before = len(seen.steps)
        moving = tasks.create_task(transport.move_to(to_url))
        await change(seen, other, MEANWHILE)
        outcome = await moving
        seen.moved_to, seen.was_recovered = outcome.connected_to, outcome.recovered
        seen.was_answered_before = call.done()
        http.cut()
        cut_after = time.monotonic() - began
        chapter(console, "7. It moves to WebSocket while the call runs; then HTTP is cut")
        line(console, f'move_to("ws://...")         -> recovered {outcome.recovered}')
        line(console, "From here on HTTP is cut off: what still comes, comes over WebSocket.")
        await change(seen, other, AFTER)
        seen.answer = await call
        seen.lines_after = http.open, websocket.open
        seen.recent = returned(await client.call_tool("recent_notes"))
        # A second run, had the move or the cut begun one, would end this much after the first.
        await asyncio.sleep(cut_after + REST)
        await until(lambda: len(seen.received) >= len(seen.changes), "the changes")
        receiving.cancel()
        seen.written = [said(message) for message in watcher.received]
        line(console, f"the call's progress         -> {', '.join(map(str, seen.steps))}")
        line(console, f"the call's answer           -> {seen.answer}")
        line(console, f"when it came                -> TCP connections: {tcp(seen.lines_after)}")
        line(
            console,
            f"index written on the server -> {seen.written.count((UPDATED, INDEX))} time(s)",
        )
        line(console, f"subscriptions/listen        -> {', '.join(seen.received[1:])} changed")
        line(console, f"the session's data          -> opened last: {', '.join(seen.recent)}")
    http.mend()


async def index(client: Client, seen: Move) -> str:
    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.steps.append(int(progress))
        seen.length = int(total or 0)

    result = await client.call_tool("index_notes", {"pause": REST}, progress_callback=on_progress)
    return returned(result)


def returned(result: CallToolResult) -> Any:
    content: dict[str, Any] = result.structured_content or {}
    return content["result"]


def tcp(connections: tuple[int, int]) -> str:
    return f"HTTP {connections[0]}, WebSocket {connections[1]}"


async def receive(changes: Subscription, seen: Move) -> None:
    async for change in changes:
        if isinstance(change, ResourceUpdated):
            seen.received.append(change.uri.removeprefix("note://"))


async def change(seen: Move, other: PlainClient, name: str) -> None:
    await other.call_tool("append_note", name=name, text="Moved.")
    seen.changes.append(name)


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after 10 s, still missing: {what}")
        await asyncio.sleep(0.01)
