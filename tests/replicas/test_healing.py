"""The rounds heal what messages did not bring, for ever: nothing that goes wrong ends them."""

from collections.abc import Callable, Collection, Coroutine
from typing import Any

import pytest

from mcp_sessions.errors import StoreRefused
from mcp_sessions.ids import SessionId
from mcp_sessions.server.cluster.shared_bus import ROUND, SharedBus
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.cluster_handlers import ClusterHandlers
from tests.support.raw import at_most, uris
from tests.support.replicas import cluster, events_are_lost
from tests.support.virtual_time import cycles

Step = Callable[[], Coroutine[Any, Any, None]]

pytestmark = pytest.mark.in_process


async def test_a_reader_that_died_does_not_end_the_rounds() -> None:
    """Its response stream was read on two replicas when both died: the request goes without a
    listener in time, and what is lost on the way to a stream is still read.
    """
    async with cluster(4, detached_timeout=30) as c:
        client = await c[0].connected()
        sent = client.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        position = (await sent.reply.event(0)).id
        gate = c[0].box.gate("g")
        await gate.started.wait()
        for reader in (1, 2):
            await c.at(reader, client).get(position).has(1)
        sent.reply.leave()
        await cycles(20)
        for reader in (1, 2):
            c.kill(reader)
        # Their death shows after a while, in a round.
        await at_most(90, gate.cancelled.wait())

        listening = await c[0].connected()
        await listening.start()
        stream = await listening.get().started()
        c.backplane.loses = events_are_lost
        await c.at(3, listening).text("update", uri="a:1")
        assert uris(await at_most(2 * ROUND, stream.has(1))) == ["a:1"]


@pytest.mark.fails_in_background("a step of the rounds over watched streams")
async def test_what_is_wrong_with_one_step_of_a_round_keeps_no_other_from_being_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(2) as c:
        bus = c[0].inside.bus
        assert isinstance(bus, SharedBus)
        done: list[float] = []

        async def fails() -> None:
            raise RuntimeError("a defect")

        async def counts() -> None:
            done.append(c.clock())

        def steps(handlers: ClusterHandlers, carrying: Collection[SessionId]) -> list[Step]:
            return [fails, *own(handlers, carrying), counts]

        own = ClusterHandlers.round
        monkeypatch.setattr(ClusterHandlers, "round", steps)
        for _ in range(3):
            await bus.round()
        assert len(done) == 3


async def test_a_connection_that_cannot_be_read_keeps_no_other_from_what_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release wrote it, say."""
    async with cluster(2) as c:
        for _ in range(2):
            client = await c[0].connected()
            await client.get().started()
            await client.start()
        looked: list[SessionId] = []

        async def refuses(sessions: TransportSessions, connection: StoredConnection) -> None:
            looked.append(connection.session_id)
            raise StoreRefused("it cannot be read")

        monkeypatch.setattr(TransportSessions, "catch_up", refuses)
        bus = c[0].inside.bus
        assert isinstance(bus, SharedBus)
        await bus.round()
        assert len(looked) == 2
