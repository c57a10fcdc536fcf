"""Clients share a child, and one subscribes while the subscription of another ends."""

import pytest

from mcp_sessions import HTTPServer
from tests.support.children import until
from tests.support.raw import uris
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import world

ABOUT = {"uri": "test://a"}


@pytest.mark.parametrize("ends", ["unsubscribes", "is cancelled"])
async def test_a_client_that_subscribes_while_the_only_other_one_leaves_gets_updates(
    ends: str,
) -> None:
    """The layer added it to a set that was removed meanwhile, and unsubscribed the child."""
    app = UrlServer()
    async with url_of(app) as url, world(server=HTTPServer(url, per="principal")) as w:
        other, client = await w.connected(), await w.connected()
        stream = await client.get().started()

        def received(method: str) -> int:
            return [each.get("method") for each in app.received].count(method)

        async def subscribed(times: int) -> None:
            await until(lambda: received("resources/subscribe") == times, "the child has it")

        if ends == "unsubscribes":
            await other.result("resources/subscribe", ABOUT)
        app.subscribes.clear()
        first = other.send("resources/subscribe", ABOUT) if ends == "is cancelled" else None
        await subscribed(1)
        subscribes = client.send("resources/subscribe", ABOUT)
        await subscribed(2)
        if first is None:
            await other.result("resources/unsubscribe", ABOUT)
        else:
            await other.notify("notifications/cancelled", {"requestId": first.id})
            await until(lambda: received("notifications/cancelled"), "the child knows")
        app.subscribes.set()
        await subscribes.result()
        assert app.subscribed == {"test://a"}
        app.say("notifications/resources/updated", ABOUT)
        assert uris(await stream.has(1)) == ["test://a"]
        await client.result("resources/unsubscribe", ABOUT)
        assert app.subscribed == set(), "nobody is left"
