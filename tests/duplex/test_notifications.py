"""Notifications of a WebSocket or stdio client: their handlers may ask the client something, and
whatever they wait for, the connection is read.
"""

import asyncio
from typing import Any

import anyio
import mcp_types as types
import pytest

from tests.support.duplex import DuplexWorld, duplex_world
from tests.support.raw import Json, at_most

KINDS = pytest.mark.parametrize("kind", ["websocket", "pipe"])

CHANGED = "notifications/roots/list_changed"


class Params(types.NotificationParams):
    n: int = 0


def handles(w: DuplexWorld, handler: Any) -> None:
    """The wrapped server handles ``roots/list_changed`` so."""
    w.inner.box.server.add_notification_handler(CHANGED, Params, handler)


@KINDS
@pytest.mark.parametrize("in_session", [False, True], ids=["no session", "in a session"])
async def test_a_handler_of_a_notification_asks_its_client(kind: str, in_session: bool) -> None:
    """It was awaited by who reads the connection, and its answer was never read. The SDK's own
    stdio answers.
    """
    async with duplex_world() as w:
        received: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

        async def handler(ctx: Any, params: Params) -> None:
            result = await ctx.session.send_request(types.ListRootsRequest(), types.ListRootsResult)
            received.set_result([str(root.uri) for root in result.roots])

        handles(w, handler)
        peer = await w.connected(kind, capabilities={"roots": {"listChanged": True}})
        if in_session:
            await peer.start()
        await peer.notify(CHANGED)
        question = await peer.question()
        # Also while the question is open.
        assert await peer.text("echo", text="x") == "x"
        await peer.respond(question, {"roots": [{"uri": "file:///here"}]})

        assert await at_most(10, received) == ["file:///here"]
        assert await peer.text("echo", text="y") == "y"


@KINDS
async def test_progress_on_a_handlers_question_reaches_it_while_it_asks(kind: str) -> None:
    """The report is a notification, too, and comes while that of the handler is not done."""
    async with duplex_world() as w:
        reports: list[float] = []
        reported, done = asyncio.Event(), asyncio.Event()

        async def handler(ctx: Any, params: Params) -> None:
            async def report(progress: float, total: float | None, message: str | None) -> None:
                reports.append(progress)
                reported.set()

            await ctx.session.send_request(
                types.ListRootsRequest(), types.ListRootsResult, progress_callback=report
            )
            done.set()

        handles(w, handler)
        peer = await w.connected(kind, capabilities={"roots": {}})
        await peer.notify(CHANGED)
        question = await peer.question()
        token = question["params"]["_meta"]["progressToken"]
        await peer.notify("notifications/progress", {"progressToken": token, "progress": 3})
        await at_most(10, reported.wait())
        await peer.respond(question, {"roots": []})
        await at_most(10, done.wait())
        assert reports == [3]


@KINDS
async def test_notifications_are_handled_in_their_order(kind: str) -> None:
    """One that waits keeps those behind it waiting, and nothing else."""
    async with duplex_world() as w:
        seen: list[int] = []
        go, last = asyncio.Event(), asyncio.Event()

        async def handler(ctx: Any, params: Params) -> None:
            if params.n == 0:
                await go.wait()
            seen.append(params.n)
            if params.n == 4:
                last.set()

        handles(w, handler)
        peer = await w.connected(kind)
        for n in range(5):
            await peer.notify(CHANGED, {"n": n})
        assert await peer.text("echo", text="x") == "x"
        assert seen == []
        go.set()
        await at_most(10, last.wait())
        assert seen == [0, 1, 2, 3, 4]


@KINDS
async def test_what_waits_for_a_handler_that_does_not_end_is_bounded(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """``receive_buffer``, in bytes: the rest is left out, the connection is read, and handled
    again when the handler ends.
    """
    async with duplex_world(receive_buffer=10_000, slow_timeout=0.1) as w:
        seen: list[int] = []
        go, last = asyncio.Event(), asyncio.Event()

        async def handler(ctx: Any, params: Params) -> None:
            if params.n == 0:
                await go.wait()
            seen.append(params.n)
            if params.n == -1:
                last.set()

        handles(w, handler)
        peer = await w.connected(kind)
        for n in range(40):
            await peer.notify(CHANGED, {"n": n, "text": "x" * 1_000})
        assert await peer.text("echo", text="x") == "x"
        assert "a notification is dropped" in caplog.text
        go.set()
        params: Json = {"n": -1}
        await peer.notify(CHANGED, params)
        # What fitted was handled, in order; nothing waits for ever.
        await at_most(10, last.wait())
        assert seen[:-1] == list(range(len(seen) - 1)) and len(seen) < 10


@KINDS
async def test_a_handler_that_waits_for_a_client_that_left_is_ended(kind: str) -> None:
    """Nobody will answer it: its connection's patience is its own."""
    async with duplex_world(slow_timeout=0.1) as w:
        ended = asyncio.Event()

        async def handler(ctx: Any, params: Params) -> None:
            try:
                await ctx.session.send_request(types.ListRootsRequest(), types.ListRootsResult)
            finally:
                ended.set()

        handles(w, handler)
        peer = await w.connected(kind, capabilities={"roots": {}})
        await peer.notify(CHANGED)
        await peer.question()
        assert not ended.is_set()
        await peer.leave()
        await at_most(10, ended.wait())


@KINDS
@pytest.mark.parametrize("in_session", [False, True], ids=["no session", "in a session"])
@pytest.mark.parametrize("related", [False, True], ids=["standalone", "of the request"])
async def test_a_question_that_is_given_up_is_taken_back(
    kind: str, in_session: bool, related: bool
) -> None:
    """ASK6, before the answer of the call that asked."""
    async with duplex_world() as w:

        async def impatient(ctx: Any, arguments: Json) -> str:
            request_id = ctx.request_id if related else None
            schema: Json = {"type": "object", "properties": {}}
            with anyio.move_on_after(0.1):
                await ctx.session.elicit_form("?", schema, related_request_id=request_id)
            return "gave up"

        w.inner.box.tools["impatient"] = impatient
        peer = await w.connected(kind, capabilities={"elicitation": {}})
        if in_session:
            await peer.start()
        assert await peer.text("impatient") == "gave up"
        question = await peer.question()
        cancelled = await peer.notified("notifications/cancelled")
        assert cancelled["params"]["requestId"] == question["id"]
        if related:
            assert peer.messages.index(cancelled) == len(peer.messages) - 2
