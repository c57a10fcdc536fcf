"""The two sides of the demo: one cut for a client of the SDK alone, and for one with the layer.

Both servers serve ``examples/notes_server.py``. The left one is the file's ``MCPServer`` as it is.
The right one is the same behind the layer. Nothing here decides what a client gets: the panes show
what the two clients return and raise.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

from demo_checks import ROOT
from demo_move import returned
from demo_picture import Recorder
from demo_screen import Pane, Screen
from demo_stage import NOTES as FOLDER
from demo_stage import Relay, bare_server, notes_server
from mcp import Client, MCPError
from mcp.client.subscriptions import ResourceUpdated, SubscriptionLost
from plain_client import PlainClient

from mcp_sessions import ConnectionLost, ResumeOutcome, resumable

SERVER = str(ROOT / "examples" / "notes_server.py")
WATCHED = ("plan", "ideas", "tasks")
NOTES = (*WATCHED, *(f"page-{number:02}" for number in range(1, 18)))
REST = 0.3
"""Seconds that the call rests after each note."""
CUT_AT = 7
"""The step of the call at which both lines are cut."""
AWAY = 1.2
"""Seconds without a network, after the changes."""
CHANGES = 30
LONGEST = 60.0
"""Seconds that the panes may take. They take about eight."""


class Side:
    def __init__(self, pane: Pane, screen: Screen, *, has_layer: bool) -> None:
        self.pane = pane
        self.has_layer = has_layer
        self.is_connected = asyncio.Event()
        self.is_at_cut = asyncio.Event()
        self.is_decided = asyncio.Event()
        """Whether the call has an answer or an error."""
        self._has_heard_all = asyncio.Event()
        self._screen = screen
        self._go = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, stack: AsyncExitStack, directory: Path) -> None:
        """Start the server, write its notes, and connect the client."""
        write_notes(directory)
        serve = notes_server if self.has_layer else bare_server
        port = await stack.enter_async_context(serve(SERVER, directory))
        self.relay = await stack.enter_async_context(Relay(port).listening())
        url = f"http://127.0.0.1:{port}/mcp"
        self._other = await stack.enter_async_context(PlainClient(url))
        await self._other.initialize()
        self.pane.notes = dict.fromkeys(WATCHED, True)
        self._tasks.append(asyncio.create_task(self._live()))
        await self.is_connected.wait()

    def call(self) -> None:
        self._go.set()

    async def change(self, name: str) -> None:
        """Let somebody else change a note."""
        self._heard(name, is_heard=False)
        await self._other.call_tool("append_note", name=name, text="Changed.")

    async def change_often(self) -> None:
        for number in range(CHANGES):
            await self.change(WATCHED[number % len(WATCHED)])

    async def judge(self) -> None:
        """Say what the server did, and what the client does not know."""
        if "word-index" not in await self._other.call_tool("list_notes"):
            self._screen.say(self.pane, "the server stopped it, too", "bad")
        stale = sum(not is_heard for is_heard in self.pane.notes.values())
        if stale:
            self._screen.say(self.pane, f"{stale} notes are out of date", "bad")
        else:
            self._screen.say(self.pane, "knows every change", "good")

    def cut(self) -> None:
        self.pane.line = ("cut", "bad")
        self.relay.cut()
        self._screen.say(self.pane, "the connection is cut", "busy")

    def lost(self) -> str:
        """Return in words what the client does not have."""
        call = "" if self.pane.answer[1] == "good" else "call"
        changes = "" if all(self.pane.notes.values()) else "changes"
        return " and ".join(filter(None, (call, changes))) + (" lost" if call or changes else "")

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def finished(self) -> None:
        """Wait for the end of the call and, if it has an answer, for the changes."""
        await self.is_decided.wait()
        if self.pane.answer[1] == "good":
            await self._has_heard_all.wait()

    async def _live(self) -> None:
        url = f"http://127.0.0.1:{self.relay.port}/mcp"
        try:
            if self.has_layer:
                transport = resumable(url, on_lost=self._on_lost, on_resume=self._on_resume)
                async with Client(transport) as client:
                    await self._act(client)
            else:
                async with Client(url) as client:
                    await self._act(client)
        except Exception as error:
            self.pane.line = ("the client ended", "bad")
            self._screen.say(self.pane, f"the client ends: {described(innermost(error))}", "bad")

    async def _act(self, client: Client) -> None:
        watching = asyncio.create_task(self._watch(client))
        try:
            await self._go.wait()
            await self._call(client)
            await asyncio.Event().wait()
        finally:
            watching.cancel()

    async def _watch(self, client: Client) -> None:
        try:
            uris = [f"note://{name}" for name in WATCHED]
            async with client.listen(resource_subscriptions=uris) as changes:
                self.pane.line = ("connected", "good")
                self.is_connected.set()
                async for change in changes:
                    if isinstance(change, ResourceUpdated):
                        self._heard(change.uri.removeprefix("note://"), is_heard=True)
        except SubscriptionLost:
            self._screen.say(self.pane, "the subscription is lost", "bad")

    async def _call(self, client: Client) -> None:
        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            self.pane.done, self.pane.total = int(progress), int(total or 0)
            if progress >= CUT_AT:
                self.is_at_cut.set()
            self._screen.changed()

        self._screen.say(self.pane, "calls index_notes")
        self.pane.answer = ("waiting", "busy")
        try:
            result = await client.call_tool(
                "index_notes", {"pause": REST}, progress_callback=on_progress
            )
        except MCPError as error:
            self.pane.answer = ("lost", "bad")
            self._screen.say(self.pane, f"lost: {described(error)}", "bad")
        else:
            text = str(returned(result)).partition(",")[0]
            self.pane.answer = (text, "good")
            self._screen.say(self.pane, f"answer: {text}", "good")
        self.is_decided.set()

    def _heard(self, name: str, *, is_heard: bool) -> None:
        if self.pane.notes.get(name) is not is_heard:
            self.pane.notes[name] = is_heard
            if is_heard and self.pane.line[1] != "bad":
                self._screen.say(self.pane, f"{name} has changed")
        if all(self.pane.notes.values()):
            self._has_heard_all.set()
        else:
            self._has_heard_all.clear()
        self._screen.changed()

    def _on_lost(self, lost: ConnectionLost) -> None:
        self.pane.line = ("reconnecting", "busy")
        self._screen.changed()

    def _on_resume(self, outcome: ResumeOutcome) -> None:
        self.pane.line = ("connected", "good")
        self._screen.say(
            self.pane, "back in its session" if outcome.recovered else "in a new session", "good"
        )


async def play(
    screen: Screen, recorder: Recorder, directory: Path, ready: Callable[[], None]
) -> tuple[bool, bool]:
    """Play both sides at once. For each, whether its client has the answer and all changes."""
    sides = (
        Side(screen.panes[0], screen, has_layer=False),
        Side(screen.panes[1], screen, has_layer=True),
    )
    async with asyncio.timeout(LONGEST), AsyncExitStack() as stack:
        await asyncio.gather(
            *(side.start(stack, directory / str(number)) for number, side in enumerate(sides))
        )
        for side in sides:
            # Before its line and its server end.
            stack.push_async_callback(side.end)
        ready()
        screen.begin()
        recorder.begin()
        screen.announce("1  Both clients make the same call. Both watch three notes.")
        for side in sides:
            side.call()
        await asyncio.gather(*(side.change("ideas") for side in sides))
        await asyncio.gather(*(side.is_at_cut.wait() for side in sides))
        screen.announce(f"2  Both are cut off. Meanwhile the notes change {CHANGES} times.", "bad")
        for side in sides:
            side.cut()
        await asyncio.gather(*(side.change_often() for side in sides))
        await asyncio.sleep(AWAY)
        screen.announce("3  The network is back.")
        for side in sides:
            side.relay.mend()
        await asyncio.gather(*(side.finished() for side in sides))
        for side in sides:
            await side.judge()
        ends = "; ".join(f"{side.pane.title}: {side.lost() or 'nothing lost'}" for side in sides)
        screen.announce(f"4  {ends}.", "bad" if sides[1].lost() else "good")
        recorder.end()
    return not sides[0].lost(), not sides[1].lost()


def write_notes(directory: Path) -> None:
    folder = directory / FOLDER
    folder.mkdir(parents=True)
    for name in NOTES:
        (folder / f"{name}.md").write_text(f"The {name}.")


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def described(error: BaseException) -> str:
    if isinstance(error, MCPError):
        return f"{error.error.message} ({error.error.code})"
    return f"{type(error).__name__} {error}".strip()
