"""A client that takes nothing, and a store that is away, end no child and hold up nobody else."""

from typing import cast

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import EVENTS, SessionId, StreamName
from mcp_sessions.stores.memory.store import MemoryStore
from mcp_sessions.stores.records import Appended
from mcp_sessions_transports.duplex import DuplexTransport
from tests.support.children import child, child_world, until
from tests.support.duplex import duplex_world
from tests.support.raw import at_most, in_session

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("per", ["shared", "principal"])
async def test_a_client_that_takes_nothing_keeps_no_answer_of_another(per: str) -> None:
    """Its own progress waits for it, in bounds; who else asks the same process is answered."""
    server = child(per=per)
    async with duplex_world(server=server, send_buffer=10_000, slow_timeout=600) as w:
        slow, other = await w.connected(), await w.connected("pipe")
        (first, *_) = w.layer._assembly.connections.all()  # pyright: ignore[reportPrivateUsage]
        release = cast(DuplexTransport, first.transport).outbox.hold()
        meta = {"progressToken": "mine"}
        sent = await slow.call("progress", steps=100, size=1_000, meta=meta)
        assert await at_most(20, other.text("echo", text="not held up")) == "not held up"
        release()
        await slow.answer(sent)
        steps = [m["params"]["progress"] for m in slow.notifications]
        assert steps == list(range(1, 101))
        assert slow.messages[-1]["id"] == sent, "the answer came before what was told before it"


class AwayStore(MemoryStore):
    """Takes no event while it is away."""

    is_away = False
    refused = 0

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        """See `SessionStore`."""
        if self.is_away:
            self.refused += 1
            raise StoreUnavailable("away")
        return await super().append(session_id, draft, now=now, stream=stream)


async def test_a_store_that_is_away_ends_no_child_and_loses_no_change() -> None:
    store = AwayStore()
    async with child_world(store=store) as w:
        client = await w.connected()
        stream = client.get()
        session = (await client.start())["sessionId"]
        meta = in_session(session)
        await client.result("resources/subscribe", {"uri": "test://a", "_meta": meta})
        pid = await client.text("pid", meta=meta)
        store.is_away = True
        assert await client.text("update", uri="test://a", meta=meta) == "updated"
        await until(lambda: store.refused, "the change was tried")
        assert await client.text("pid", meta=meta) == pid
        assert not stream.messages
        store.is_away = False
        (told,) = await stream.has(1)
        assert told["params"]["uri"] == "test://a"
