"""A subscription that cannot be stored is not refused by an error of nobody's (HTP5, KEY11)."""

import pytest

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.stores.memory import MemoryStore
from tests.support.failing_calls import fails
from tests.support.in_memory import MemorySocket
from tests.support.raw import keyed
from tests.support.world import world

METHODS = {"resources/subscribe": "subscribe", "resources/unsubscribe": "unsubscribe"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after its effect"])
@pytest.mark.parametrize("method", METHODS)
async def test_over_http_its_client_is_asked_to_come_back(method: str, after: bool) -> None:
    store = MemoryStore()
    async with world(store=store) as w:
        client = await w.connected()
        await client.start()
        fails(store, METHODS[method], after=after)
        reply = await client.send(method, {"uri": "note:1"}).reply.done()
        assert reply.status == 503 and int(reply.header("retry-after") or 0) > 0
        assert await client.result(method, {"uri": "note:1"}) == {}


REFUSED = StoreRefused("redis://:secret@host has another password", "credentials")


@pytest.mark.parametrize("method", METHODS)
async def test_over_http_a_store_that_refuses_is_not_said_to_be_away(method: str) -> None:
    store = MemoryStore()
    async with world(store=store) as w:
        client = await w.connected()
        await client.start()
        fails(store, METHODS[method], after=False, failure=REFUSED)
        reply = await client.send(method, {"uri": "note:1"}).reply.done()
        assert reply.status == 503
        said = "the session store refuses requests (credentials)"
        assert reply.json["error"]["message"] == said


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (None, "the session store is away"),
        (REFUSED, "the session store refuses requests (credentials)"),
        (StoreRefused("busy"), "the session store refuses requests"),
    ],
)
@pytest.mark.parametrize("at", ["subscribe", "admit"])
async def test_over_a_websocket_it_is_an_error_that_says_so(
    failure: StoreUnavailable | None, said: str, at: str
) -> None:
    store = MemoryStore()
    async with world(store=store) as w:
        peer = MemorySocket(w.layer_app)
        await peer.open()
        await peer.initialize()
        await peer.start()
        fails(store, at, after=False, failure=failure)
        error = await peer.error("resources/subscribe", {"uri": "note:1"})
        if at == "admit":
            assert (error["code"], error["message"]) == (-32603, said)
        else:
            # ERR17: its handler began.
            assert (error["code"], error["message"]) == (-31012, "Outcome unknown")
        assert await peer.result("resources/subscribe", {"uri": "note:1"}) == {}
        await peer.leave()


async def test_with_a_key_its_outcome_is_unknown_and_stays_so() -> None:
    store = MemoryStore()
    async with world(store=store) as w:
        client = await w.connected()
        await client.start()
        fails(store, "subscribe", after=True)
        params = {"uri": "note:1", "_meta": keyed("k")}
        for _ in range(2):
            assert (await client.error("resources/subscribe", params))["code"] == -31012
