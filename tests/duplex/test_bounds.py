"""The memory that one WebSocket or stdio client can make the process hold has a bound."""

from typing import Any, cast

import pytest

from mcp_sessions_transports.duplex_transport import DuplexTransport
from tests.support.duplex import DuplexWorld, WebSocketPeer, duplex_world
from tests.support.raw import Json, at_most, keyed, text_of

KINDS = pytest.mark.parametrize("kind", ["websocket", "pipe"])


def transport_of(w: DuplexWorld) -> DuplexTransport:
    (connection,) = w.inside.connections.all()
    return cast(DuplexTransport, connection.transport)


@KINDS
async def test_running_calls_of_one_connection_are_bounded(kind: str) -> None:
    """ERR6, ``max_running_requests``: the one too many is refused, and the connection is read on:
    what runs may wait for an answer of its client.
    """
    async with duplex_world(max_running_requests=5) as w:
        peer, other = await w.connected(kind), await w.connected(kind)
        session = (await peer.start())["sessionId"]
        calls = [await peer.call("wait", gate="g") for _ in range(5)]
        error = await peer.error(
            "tools/call", {"name": "echo", "arguments": {"text": "x"}}, meta=keyed("k", session)
        )
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_running_requests")
        assert await other.text("echo", text="x") == "x"
        assert (await peer.resume(session))["resumed"]
        w.inner.box.gate("g").go.set()
        for call in calls:
            assert text_of((await peer.answer(call))["result"]) == "through g"
        # It was not recorded: now it runs.
        assert await peer.text("echo", text="y", meta=keyed("k", session)) == "y"
        assert not len(w.inside.runner.calls.load)


def answers_large(w: DuplexWorld, size: int) -> None:
    """A tool ``large`` that waits at the gate, and answers so many bytes."""

    async def large(ctx: Any, arguments: Json) -> str:
        await w.inner.box.gate("g").arrive()
        return "x" * size

    w.inner.box.tools["large"] = large


@KINDS
async def test_answers_that_a_client_does_not_take_are_bounded_in_bytes(kind: str) -> None:
    """``max_unread_bytes``: it asked for all of them before the first was there, takes none, and
    is cut, long before ``slow_timeout``.
    """
    async with duplex_world(send_buffer=10_000, max_unread_bytes=50_000, slow_timeout=600) as w:
        answers_large(w, 9_000)
        peer = await w.connected(kind)
        transport = transport_of(w)
        for _ in range(40):
            await peer.call("large")
        gate = w.inner.box.gate("g")
        await peer.text("echo", text="all were read")
        transport.outbox.hold()
        gate.go.set()
        await at_most(10, transport.closed.wait())
        held = sum(len(chunk) for chunk, _ in transport.outbox._buffer)  # pyright: ignore[reportPrivateUsage]
        assert held < 10_000 + 50_000 + 10_000
        if isinstance(peer, WebSocketPeer):
            said = "too slow: max_unread_bytes is 50000 bytes; come back in 1 s"
            assert await peer.closed() == (1013, said)


@KINDS
async def test_one_large_answer_and_many_to_who_reads_arrive(kind: str) -> None:
    """The bound is on what waits: an answer alone goes out however large it is."""
    async with duplex_world(send_buffer=10_000, max_unread_bytes=50_000) as w:
        answers_large(w, 300_000)
        w.inner.box.gate("g").go.set()
        peer = await w.connected(kind)
        for _ in range(3):
            assert len(await peer.text("large")) == 300_000


async def test_a_connection_that_ends_does_not_look_through_everybodys_subscriptions() -> None:
    """Many that end at once, as behind a proxy that is restarted, cost what they hold each."""

    class NotLookedThrough(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("every subscription of every connection")

        __iter__ = values = keys = items  # pyright: ignore[reportAssignmentType]

    async with duplex_world() as w:
        peer, other = await w.connected(), await w.connected()
        registry: Any = w.inside.connections
        for each in (peer, other):
            await each.result("resources/subscribe", {"uri": "note://shared"})
            await each.result("resources/subscribe", {"uri": f"note://{id(each)}"})
        registry._sessionless = NotLookedThrough(registry._sessionless)
        connections = registry.all()
        await peer.leave()
        await at_most(10, connections[0].transport.closed.wait())
        assert len(registry._sessionless) == 2
        assert len(registry.sessionless_subscribers("note://shared")) == 1
