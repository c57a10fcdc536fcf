"""A call whose handler says nothing for long is seen on every transport, whatever serves it."""

import pytest

from tests.support.children import child_world
from tests.support.duplex import duplex_world
from tests.support.raw import text_of
from tests.support.urls import stock_server
from tests.support.world import Toolbox, world

PROGRESS = "notifications/progress"
TOKEN = {"progressToken": "t"}


@pytest.mark.parametrize("kind", ["websocket", "pipe"])
async def test_a_silent_call_is_reported_on_one_wire(kind: str) -> None:
    """Under its token, and rising."""
    async with duplex_world(progress_every=0.3) as w:
        client = await w.connected(kind)
        sent = await client.call("wait", gate="g", meta=TOKEN)

        def notified() -> list[float]:
            said = [m["params"] for m in client.notifications if m["method"] == PROGRESS]
            assert all(each["progressToken"] == "t" for each in said)
            return [each["progress"] for each in said]

        await client.until(lambda: len(notified()) >= 3, "three messages")
        w.inner.box.gate("g").go.set()
        await client.answer(sent)
        assert notified() == sorted(set(notified()))


async def test_a_silent_call_of_a_command_is_reported() -> None:
    """A command in any language: the layer tells it, not the command."""
    async with child_world(progress_every=0.3) as w:
        client = await w.connected()
        sent = client.call("wait", meta=TOKEN)

        def count() -> int:
            return sum(each.get("method") == PROGRESS for each in sent.reply.messages)

        await sent.reply.until(lambda: count() >= 3, "three messages")
        assert count() >= 3
        await client.notify("notifications/cancelled", {"requestId": sent.id})


async def test_a_silent_call_of_a_url_is_reported() -> None:
    """A server at a URL that says nothing: the layer tells it, until the answer comes."""
    box = Toolbox()
    async with stock_server(box) as server, world(server=server, progress_every=0.3) as w:
        client = await w.connected()
        sent = client.call("wait", gate="g", meta=TOKEN)

        def notified() -> list[float]:
            said = [m["params"] for m in sent.reply.messages if m.get("method") == PROGRESS]
            assert all(each["progressToken"] == "t" for each in said)
            return [each["progress"] for each in said]

        await sent.reply.until(lambda: len(notified()) >= 3, "three messages")
        box.gate("g").go.set()
        assert text_of(await sent.result()) == "through g"
        assert notified() == sorted(set(notified()))
