"""The endpoint: which era serves a request, and what is answered when nobody can."""

from typing import Any

import pytest

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.stores.memory import MemoryStore
from tests.support.raw import NEWEST, RawClient, call_params, text_of
from tests.support.virtual_time import cycles
from tests.support.world import World, connected_world, world


class Flaky(MemoryStore):
    is_away = False
    failure: StoreUnavailable = StoreUnavailable("away")

    async def admit(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_away:
            raise self.failure
        return await super().admit(*args, **kwargs)

    async def append(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_away:
            raise self.failure
        return await super().append(*args, **kwargs)

    async def append_change(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_away:
            raise self.failure
        return await super().append_change(*args, **kwargs)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_store_that_is_away_is_a_503(method: str) -> None:
    """HTP5: "Redis down → errors (503 / retry), never silent fallback to memory"; and it goes on
    when the store is back.
    """
    store = Flaky()
    async with connected_world(store=store) as (_, client):
        store.is_away = True
        body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}' if method == "POST" else b""
        headers = {**client.headers(), "Content-Type": "application/json"}

        reply = await client.http(method, headers, body).done()

        assert (reply.status, reply.header("retry-after")) == (503, "1")
        assert reply.json["error"]["message"] == "the session store is away"
        store.is_away = False
        assert await client.text("echo", text="x") == "x"


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_store_that_refuses_is_not_said_to_be_away(method: str) -> None:
    """HTP5. The text has one word of the reason, and nothing that only the log may have."""
    store = Flaky()
    async with connected_world(store=store) as (_, client):
        store.failure = StoreRefused("redis://:secret@host is full", "full")
        store.is_away = True
        body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}' if method == "POST" else b""
        headers = {**client.headers(), "Content-Type": "application/json"}

        reply = await client.http(method, headers, body).done()

        assert (reply.status, reply.header("retry-after")) == (503, "1")
        error = reply.json["error"]
        assert (error["code"], error["message"]) == (
            -32603,
            "the session store refuses requests (full)",
        )
        store.is_away = False
        assert await client.text("echo", text="x") == "x"


async def test_a_store_that_goes_away_under_a_change_ends_no_server() -> None:
    """What cannot be stored while it is away is notified when it is back, and so is the next
    one.
    """
    store = Flaky()
    async with connected_world(store=store) as (w, client):
        stream = await client.get().started()
        await client.result("resources/subscribe", {"uri": "a:1"})
        store.is_away = True
        with pytest.raises(StoreUnavailable, match="keeps"):
            await w.layer.notify_resource_updated("a:1")
        await cycles()
        assert stream.messages == []
        store.is_away = False
        assert len(await stream.has(1)) == 1

        await w.layer.notify_resource_updated("a:1")

        assert len(await stream.has(2)) == 2


async def served(w: World, version: str | None) -> tuple[int | None, Any]:
    """Status and body of a ping with that version header."""
    client = RawClient(w.carrier)
    headers = {"Mcp-Protocol-Version": version}
    reply = await client.post({"jsonrpc": "2.0", "id": 1, "method": "ping"}, headers=headers).done()
    return reply.status, reply.json


async def test_the_header_picks_the_era() -> None:
    """A known handshake-era version, or none at all, is the handshake era (here: no session);
    anything else is the modern era, which says what is wrong with it.
    """
    async with world() as w:
        for version in (None, "2025-03-26", "2025-06-18", NEWEST):
            status, body = await served(w, version)
            assert (status, body["error"]["message"]) == (400, "Bad Request: Missing session ID")
        for version in ("1999-01-01", "2026-07-28", "x"):
            status, body = await served(w, version)
            assert status == 400
            assert "session" not in body["error"]["message"].lower()


async def test_the_session_has_the_version_it_agreed_on() -> None:
    """A later request may name another, or none: what was agreed holds (2025-11-25: a server
    "MAY" go by what it negotiated).
    """
    async with world() as w:
        client = await w.connected(version="2025-03-26")
        for version in (None, NEWEST, "2025-06-18"):
            sent = client.send(
                "tools/call",
                call_params("progress", {"steps": 1}, {"progressToken": 1}),
                headers={"Mcp-Protocol-Version": version},
            )
            assert text_of(await sent.result()) == "reported"
            assert all(event.message is not None for event in sent.reply.events)  # not primed


@pytest.mark.parametrize("white", ["{} ", " {}", "\t{}\t"], ids=["after", "before", "tabs"])
async def test_white_space_around_a_header_is_no_part_of_it(white: str) -> None:
    """RFC 9110, 5.5: an id is not another one for it."""
    async with connected_world() as (_, client):
        assert client.session_id is not None
        headers = {
            "Mcp-Session-Id": white.format(client.session_id),
            "Mcp-Protocol-Version": white.format(NEWEST),
        }
        assert await client.result("ping", headers=headers) == {}


async def test_of_a_header_that_came_twice_the_first_counts() -> None:
    """As for the SDK and for the application's own code: two readers of one request must not
    see two different sessions, or hosts.
    """
    async with world() as w:
        client, other = await w.connected(), await w.connected()
        session = (await other.start())["sessionId"]
        assert client.session_id is not None and other.session_id is not None

        async def status(*twice: tuple[str, str]) -> int | None:
            headers = [*twice, *client.headers().items(), ("Content-Type", "application/json")]
            body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
            return (await w.carrier.send("POST", "/mcp", headers, body).done()).status

        assert await status() == 200
        assert await status(("Host", "evil.example")) == 421
        assert await status(("Mcp-Session-Id", session)) == 400
        assert await status(("Mcp-Session-Id", other.session_id)) == 200
        assert await status(("Mcp-Session-Id", "unknown")) == 404
        assert await status(("Accept", "text/html")) == 406
