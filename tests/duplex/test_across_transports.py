"""One session, every transport: what one connection left, another takes up.

Every ordered pair of {HTTP handshake, HTTP modern, WebSocket, stdio}, in one process.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcp_sessions_transports.stdio import stdio_server as stdio
from tests.support import apps
from tests.support.duplex import DECLARED, ELICITS, WITHIN, DuplexPeer, DuplexWorld, duplex_world
from tests.support.modern import ModernClient, Received
from tests.support.raw import (
    KEY,
    Json,
    RawClient,
    Reply,
    at_most,
    call_params,
    event_ids,
    in_session,
    text_of,
    uris,
)

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

KINDS = ("http", "modern", "websocket", "stdio")
PAIRS = [(old, new) for old in KINDS for new in KINDS]
HANDSHAKE = [pair for pair in PAIRS if "modern" not in pair]
WATCHED = ("note://a", "note://b", "note://c", "note://d", "note://e")
DETACHED = "notifications/sessions/detached"
CAPABILITIES = {**DECLARED, **ELICITS}


@pytest.fixture(autouse=True)
def pipes_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that ended waits for what runs, two seconds; here a gate keeps it running."""
    monkeypatch.setattr(stdio, "_LAST_WORDS", 0.05)


class End(ABC):
    def __init__(self, world: DuplexWorld) -> None:
        self.world = world
        self.session_id = ""

    @abstractmethod
    async def start(self) -> str:
        """Start a session that learns of `WATCHED`; its first position."""

    @abstractmethod
    async def resume(self, session_id: str, position: str) -> Json: ...

    @abstractmethod
    async def call(self, tool: str, key: str, arguments: Json) -> Awaitable[Json]:
        """Call a tool with a request key; what gives the whole answer."""

    @property
    @abstractmethod
    def received(self) -> list[Json]: ...

    @abstractmethod
    async def until(self, look: Any) -> None:
        """Return once ``look()`` holds."""

    @abstractmethod
    async def respond(self, request: Json, result: Json) -> None:
        """Answer a request of the server's."""

    @abstractmethod
    async def leave(self) -> None: ...

    @property
    def events(self) -> list[Json]:
        return [m for m in self.received if "sessionEventId" in (m.get("params") or {})]

    async def has_events(self, count: int) -> list[Json]:
        await self.until(lambda: len(self.events) >= count)
        return self.events

    async def question(self) -> Json:
        await self.until(lambda: self._asked())
        return self._asked()[0]

    def _asked(self) -> list[Json]:
        return [m for m in self.received if "method" in m and "id" in m]


class DuplexEnd(End):
    """A WebSocket or a pipe."""

    def __init__(self, world: DuplexWorld, peer: DuplexPeer) -> None:
        super().__init__(world)
        self.peer = peer

    async def start(self) -> str:
        started = await self.peer.start()
        self.session_id = started["sessionId"]
        for uri in WATCHED:
            await self.peer.result("resources/subscribe", {"uri": uri})
        return started["sessionEventId"]

    async def resume(self, session_id: str, position: str) -> Json:
        self.session_id = session_id
        return await self.peer.resume(session_id, position)

    async def call(self, tool: str, key: str, arguments: Json) -> Awaitable[Json]:
        request_id = await self.peer.call(tool, meta={KEY: key}, **arguments)
        return self.peer.answer(request_id)

    @property
    def received(self) -> list[Json]:
        return [m for m in self.peer.messages if "method" in m]

    async def until(self, look: Any) -> None:
        await self.peer.until(look)

    async def respond(self, request: Json, result: Json) -> None:
        await self.peer.respond(request, result)

    async def leave(self) -> None:
        await self.peer.leave()


class HttpEnd(End):
    """Handshake-era HTTP: POSTs and a GET stream."""

    def __init__(self, world: DuplexWorld, client: RawClient, stream: Reply) -> None:
        super().__init__(world)
        self.client = client
        self.stream = stream
        self.replies: list[Reply] = []

    async def start(self) -> str:
        started = await self.client.start()
        self.session_id = started["sessionId"]
        for uri in WATCHED:
            await self.client.result("resources/subscribe", {"uri": uri})
        return started["sessionEventId"]

    async def resume(self, session_id: str, position: str) -> Json:
        self.session_id = session_id
        return await self.client.resume(session_id, position)

    async def call(self, tool: str, key: str, arguments: Json) -> Awaitable[Json]:
        sent = self.client.send("tools/call", call_params(tool, arguments, {KEY: key}))
        self.replies.append(sent.reply)
        return sent.answer()

    @property
    def received(self) -> list[Json]:
        return [m for reply in (self.stream, *self.replies) for m in reply.messages]

    async def until(self, look: Any) -> None:
        waiting = [
            asyncio.create_task(reply.until(lambda: bool(look()), within=WITHIN))
            for reply in (self.stream, *self.replies)
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert look()

    async def respond(self, request: Json, result: Json) -> None:
        await self.client.respond(request, result)

    async def leave(self) -> None:
        for reply in (self.stream, *self.replies):
            if not reply.ended:
                await reply.gone()


class ModernEnd(End):
    """Modern-era HTTP: lone POSTs, and a listen stream."""

    def __init__(self, world: DuplexWorld, client: ModernClient) -> None:
        super().__init__(world)
        self.client = client
        self.stream: Received | None = None
        self.calls: list[Received] = []

    async def start(self) -> str:
        started = await self.client.start()
        self.session_id = started["sessionId"]
        self.stream = await self.client.listening(self.session_id, *WATCHED)
        return started["sessionEventId"]

    async def resume(self, session_id: str, position: str) -> Json:
        self.session_id = session_id
        answer = await self.client.resume(session_id, position)
        self.stream = await self.client.listening(session_id, *WATCHED)
        return answer

    async def call(self, tool: str, key: str, arguments: Json) -> Awaitable[Json]:
        received = self.client.call(tool, arguments, session=self.session_id, key=key)
        self.calls.append(received)
        return received.answer()

    @property
    def received(self) -> list[Json]:
        return self.stream.messages if self.stream is not None else []

    async def until(self, look: Any) -> None:
        assert self.stream is not None
        await self.stream.reply.until(lambda: bool(look()), within=WITHIN)

    async def respond(self, request: Json, result: Json) -> None:
        raise AssertionError("the modern era is asked nothing")

    async def leave(self) -> None:
        for received in (self.stream, *self.calls):
            if received is not None and not received.reply.ended:
                await received.gone()


async def end_of(kind: str, world: DuplexWorld) -> End:
    """A connection of that kind, after its handshake."""
    if kind == "http":
        client = await world.inner.connected(capabilities=CAPABILITIES)
        return HttpEnd(world, client, await client.get().started())
    if kind == "modern":
        return ModernEnd(world, ModernClient(world.inner.carrier, capabilities=CAPABILITIES))
    return DuplexEnd(world, await world.connected(kind, capabilities=CAPABILITIES))


@asynccontextmanager
async def two(old: str, new: str, **limits: Any) -> AsyncGenerator[tuple[DuplexWorld, End, End]]:
    async with duplex_world(**limits) as world:
        yield world, await end_of(old, world), await end_of(new, world)


@pytest.mark.parametrize(("old", "new"), PAIRS)
async def test_what_was_missed_is_replayed_once_in_order_and_subscriptions_are_kept(
    old: str, new: str
) -> None:
    """ATT6, EVT10, SEC7."""
    async with two(old, new) as (world, left, right):
        await left.start()
        await world.layer.notify_resource_updated("note://a")
        (seen,) = event_ids(await left.has_events(1))
        await left.leave()
        for uri in ("note://b", "note://not-subscribed", "note://c", "note://d"):
            await world.layer.notify_resource_updated(uri)
        answer = await right.resume(left.session_id, seen)
        assert (answer["resumed"], answer["catchup"]) == (True, True)
        assert answer["replayed"] == 3
        await world.layer.notify_resource_updated("note://e")
        events = await right.has_events(4)
        assert uris(events) == ["note://b", "note://c", "note://d", "note://e"]
        ids = [seen, *event_ids(events)]
        assert ids == sorted(set(ids))
        for event in events:
            named = event["params"]["_meta"]["io.modelcontextprotocol/session"]
            assert named == {"sessionId": left.session_id}
        assert uris(left.events) == ["note://a"]


@pytest.mark.parametrize(("old", "new"), PAIRS)
async def test_a_keyed_call_started_on_one_is_answered_on_the_other_having_run_once(
    old: str, new: str
) -> None:
    """REQ4, across transports: while it runs, and again when it is done."""
    async with two(old, new) as (world, left, right):
        position = await left.start()
        gate = world.inner.box.gate("g")
        lost = await left.call("wait", "k1", {"gate": "g"})
        await at_most(WITHIN, gate.started.wait())
        await left.leave()
        lost.close()  # type: ignore[attr-defined]
        await right.resume(left.session_id, position)
        again = await right.call("wait", "k1", {"gate": "g"})
        gate.go.set()
        first = await again
        assert text_of(first["result"]) == "through g"
        kept = await (await right.call("wait", "k1", {"gate": "g"}))
        assert text_of(kept["result"]) == "through g"
        assert world.inner.box.calls.count("wait") == 1
        other = await (await right.call("wait", "k1", {"gate": "other"}))
        assert other["error"]["data"]["reason"] == "key_reused"


@pytest.mark.parametrize(("old", "new"), HANDSHAKE)
@pytest.mark.parametrize("tool", ["ask", "ask_standalone"])
async def test_a_pending_question_is_asked_again_on_the_new_connection_and_answered_there(
    old: str, new: str, tool: str
) -> None:
    """ASK2: under its own id, whether it was asked on the request's channel (then it
    comes with the request that is sent again) or on the session's.
    """
    async with two(old, new) as (world, left, right):
        position = await left.start()
        lost = await left.call(tool, "k", {"question": "why?"})
        asked = await left.question()
        await left.leave()
        lost.close()  # type: ignore[attr-defined]
        await right.resume(left.session_id, position)
        again = await right.call(tool, "k", {"question": "why?"})
        repeated = await right.question()
        assert repeated["id"] == asked["id"]
        await right.respond(repeated, {"action": "accept", "content": {"answer": "so"}})
        assert text_of((await again)["result"]) == "accept: so"
        assert world.inner.box.calls == [tool]


@pytest.mark.parametrize(("old", "new"), PAIRS)
async def test_who_was_displaced_is_notified_and_gets_nothing_more(old: str, new: str) -> None:
    """TKO7, the server's part; TKO9: its late end does not touch the new one."""
    async with two(old, new) as (world, left, right):
        position = await left.start()
        await right.resume(left.session_id, position)
        await left.until(lambda: [m for m in left.received if m.get("method") == DETACHED])
        notified = [m["params"] for m in left.received if m.get("method") == DETACHED]
        assert [(m["sessionId"], m["reason"]) for m in notified] == [
            (left.session_id, "taken_over")
        ]
        refused = None
        if isinstance(left, DuplexEnd):
            refused = await left.peer.error("tools/list")
            assert await left.peer.result("ping") == {}
            named = in_session(left.session_id)
            assert await left.peer.text("session_id", meta=named) == left.session_id
        elif isinstance(left, HttpEnd):
            refused = await left.client.error("tools/list")
            named = in_session(left.session_id)
            assert await left.client.text("session_id", meta=named) == left.session_id
        assert refused is None or refused["code"] == -31010
        await world.layer.notify_resource_updated("note://a")
        await right.has_events(1)
        await left.leave()
        await world.layer.notify_resource_updated("note://b")
        assert uris(await right.has_events(2)) == ["note://a", "note://b"]
        assert left.events == []
        assert not [m for m in right.received if m.get("method") == DETACHED]
