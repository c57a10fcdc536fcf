"""The description of a client of the modern era is bounded on each transport.

Each of its requests describes it anew; a description outlives its request, where a process is
kept for it.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.duplex import DuplexWorld, duplex_world
from tests.support.modern import ModernClient, envelope
from tests.support.raw import Json

PREFIX = "io.modelcontextprotocol/"
LARGE = "x" * 1_000
SAYS: list[tuple[str, Json]] = [
    ("capabilities", {f"{PREFIX}clientCapabilities": {"elicitation": {"a": LARGE}}}),
    ("unknown capability", {f"{PREFIX}clientCapabilities": {LARGE: {}}}),
    ("clientInfo", {f"{PREFIX}clientInfo": {"name": LARGE, "version": "1"}}),
    ("logLevel", {f"{PREFIX}logLevel": LARGE}),
]
METHODS: list[tuple[str, Json]] = [
    ("tools/call", {"name": "echo", "arguments": {"text": "x"}}),
    ("tools/list", {}),
    ("server/discover", {}),
    ("subscriptions/listen", {"notifications": {"toolsListChanged": True}}),
    ("sessions/create", {}),
]
Ask = Callable[[str, Json], Awaitable[Json]]


async def door(w: DuplexWorld, kind: str) -> Ask:
    """Sends a request by one transport; its answer."""
    if kind == "http":
        client = ModernClient(w.inner.carrier)

        async def post(method: str, params: Json) -> Json:
            return await client.send(method, params).answer()

        return post
    peer = await (w.websocket if kind == "websocket" else w.pipe)(modern=True)

    async def send(method: str, params: Json) -> Json:
        return await peer.answer(await peer.send(method, params))

    return send


DOORS = pytest.mark.parametrize("kind", ["http", "websocket", "pipe"])


@DOORS
@pytest.mark.parametrize(("method", "params"), METHODS, ids=[method for method, _ in METHODS])
@pytest.mark.parametrize(("what", "said"), SAYS, ids=[what for what, _ in SAYS])
async def test_a_request_that_says_too_much_of_its_client_is_refused_at_each_door(
    kind: str, method: str, params: Json, what: str, said: Json
) -> None:
    """ERR6, ``max_client_bytes``; one that says less is served after it."""
    del what
    async with duplex_world(max_client_bytes=800) as w:
        ask = await door(w, kind)

        answer = await ask(method, {**params, "_meta": envelope(said)})

        error = answer["error"]
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_client_bytes")
        assert await w.layer.store.all_sessions() == []
        listed = await ask("tools/list", {"_meta": envelope()})
        assert "result" in listed, listed


@DOORS
async def test_what_is_no_word_about_the_client_has_no_such_bound(kind: str) -> None:
    """A long argument, and metadata of others, are for the wrapped server to judge."""
    async with duplex_world(max_client_bytes=800) as w:
        ask = await door(w, kind)
        params: dict[str, Any] = {"name": "echo", "arguments": {"text": LARGE}}

        answer = await ask("tools/call", {**params, "_meta": envelope({"example.org/note": LARGE})})

        assert answer["result"]["content"][0]["text"] == LARGE


LISTENS: list[tuple[str, list[str]]] = [
    ("max_subscriptions", ["a", "b", "c"]),
    ("max_uri_bytes", ["x" * 51]),
    ("max_subscription_bytes", ["x" * 40, "y" * 40]),
]


@DOORS
@pytest.mark.parametrize(("limit", "uris"), LISTENS, ids=[limit for limit, _ in LISTENS])
async def test_a_listen_outside_of_a_session_has_the_bounds_of_one_inside(
    kind: str, limit: str, uris: list[str]
) -> None:
    """ERR6: the resources are kept as long as it is open."""
    async with duplex_world(max_subscriptions=2, max_uri_bytes=50, max_subscription_bytes=60) as w:
        ask = await door(w, kind)
        wanted = {"notifications": {"resourceSubscriptions": uris}}

        answer = await ask("subscriptions/listen", {**wanted, "_meta": envelope()})

        assert answer["error"]["data"]["limit"] == limit
