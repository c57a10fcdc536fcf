"""From each transport to each, with the cut in each place: nothing twice, nothing lost.

In every cell each event arrives once and in order, each call ran exactly once, and
each caller got its answer or ``-31012``. ATT6, REQ4, KEY3.
"""

from typing import Literal

import anyio
import pytest
from anyio.abc import TaskStatus
from mcp import MCPError

from mcp_sessions.client.sdk import is_outcome_unknown
from tests.support.proxy import Side
from tests.support.resuming import Connected, connected, subscribe

Scheme = Literal["http", "ws"]
SCHEMES: tuple[Scheme, ...] = ("http", "ws")
POSITIONS = ("before it is read", "while it runs", "after it was answered", "during the replay")
URIS = [f"note://{number}" for number in range(1, 13)]


class Watcher:
    """The application's changes of resources, in each era."""

    def __init__(self, it: Connected, mode: str) -> None:
        self.it, self.mode = it, mode
        self.listened: list[str] = []

    @property
    def seen(self) -> list[str]:
        return self.it.received.updates if self.mode == "legacy" else self.listened

    async def watch(self, *, task_status: TaskStatus[None]) -> None:
        if self.mode == "legacy":
            for uri in URIS:
                await subscribe(self.it.client, uri)
            task_status.started()
            return
        async with self.it.client.listen(resource_subscriptions=URIS) as changes:
            task_status.started()
            async for change in changes:
                self.listened.append(str(getattr(change, "uri", change)))
                self.it.received.board.announce()

    async def has(self, count: int) -> None:
        await self.it.received.has(lambda: len(self.seen) >= count, f"{count} of {self.seen}")


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("moves", [False, True], ids=["back", "over"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_cell(mode: str, scheme: Scheme, moves: bool, position: str) -> None:
    """The connection is cut at one point; the client comes back there, or moves to another
    address.
    """
    other: Scheme = "ws" if scheme == "http" else "http"
    async with connected(mode, scheme) as it, anyio.create_task_group() as tasks:
        watcher = Watcher(it, mode)
        await tasks.start(watcher.watch)
        await it.change_from_another(URIS[0])
        await watcher.has(1)
        answers: list[str] = []

        async def call() -> None:
            try:
                answers.append(await it.call("slow", steps=1, gate="g"))
            except MCPError as error:
                assert is_outcome_unknown(error)
                answers.append("unknown")
            it.received.board.announce()

        async def lose_the_connection() -> None:
            it.proxy.cut_all()
            if not moves:
                return
            try:
                await it.transport.move_to(it.proxy.url(scheme=other))
            except ConnectionError:
                # The way there was cut as well; the session stayed where it was.
                await it.transport.move_to(it.proxy.url(scheme=other))

        match position:
            case "before it is read":
                it.proxy.stall_all(Side.CLIENT)
                it.app.stage.mark("g:go")
                tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                await lose_the_connection()
            case "while it runs":
                tasks.start_soon(call)
                await it.app.stage.reached("g:started")
                await lose_the_connection()
                it.app.stage.mark("g:go")
            case "after it was answered":
                tasks.start_soon(call)
                await it.app.stage.reached("g:started")
                it.proxy.stall_all(Side.SERVER)
                it.app.stage.mark("g:go")
                await it.app.stage.reached("g:done")
                await lose_the_connection()
            case _:
                tasks.start_soon(call)
                await it.app.stage.reached("g:started")
                with it.proxy.offline():
                    await it.change_from_another(*URIS[1:6])
                # The next connection is cut as well, somewhere in what it is sent.
                it.proxy.cut_next_after(900)
                if moves:
                    await anyio.wait_all_tasks_blocked()
                    await lose_the_connection()
                it.app.stage.mark("g:go")
        await it.app.stage.reached("g:done")
        await it.change_from_another(*URIS[6:])
        expected = [URIS[0], *(URIS[1:6] if position == "during the replay" else ()), *URIS[6:]]
        await watcher.has(len(expected))
        # One more round trip: whatever came twice would have come by now.
        assert await it.call("echo", text="the end") == "the end"

        assert watcher.seen == expected
        await it.received.board.until(lambda: bool(answers), what="an answer for the caller")
        assert answers == ["1 steps"]
        assert it.app.stage.count("g:started") == 1
        assert all(outcome.recovered for outcome in it.received.outcomes)
        tasks.cancel_scope.cancel()
