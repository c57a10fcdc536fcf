"""The way of a session's events to a connection's stream, and who may still go it."""

from typing import Any, NamedTuple

from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import (
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    SessionId,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.delivery.stored_connection import StreamRelay
from mcp_sessions.stores.memory import MemoryStore

NOW = 1_800_000_000.0
LOG = LogEpoch("0" * 19)


class Carried(NamedTuple):
    """A session that is attached to a transport-mode session's connection."""

    store: MemoryStore
    connection: SessionId
    session: SessionId
    epoch: FencingEpoch

    def relay(self) -> StreamRelay:
        """The way, as one more process has it."""
        return StreamRelay(self.store, lambda: NOW, self.connection, self.session, self.epoch)

    async def append(self, text: str) -> Position:
        """Store an event and relay it nowhere; the head."""
        await self.store.append(self.session, Draft(text.encode()), now=NOW)
        head = await self.store.head(self.session)
        assert head is not None
        return head

    async def relayed(self) -> list[str]:
        """What the connection's stream holds."""
        start = await self.store.open_stream(self.connection, GET_STREAM)
        assert start is not None
        first = Position(start.log_epoch, 0).event_id()
        events, _ = await self.store.read(self.connection, first, now=NOW, stream=GET_STREAM)
        return [event.payload.decode() for event in events]


async def carried(**limits: Any) -> Carried:
    store = MemoryStore()
    await store.open(SessionPolicy(**limits))
    connection = await store.create(Mode.TRANSPORT, ANONYMOUS, peer=None, now=NOW)
    session = await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=NOW)
    attached = await store.attach(session.session_id, ConnectionId(connection.session_id), now=NOW)
    assert attached is not None
    after = parse_position(attached.head)
    assert after is not None
    epoch = attached.fencing_epoch
    await store.carry(connection.session_id, session.session_id, epoch, after)
    return Carried(store, connection.session_id, session.session_id, epoch)


async def test_whoever_comes_by_relays_what_nobody_did() -> None:
    """EVT10: stored by a process that died before its second step; once, by whoever is first."""
    it = await carried()
    head = Position(LOG, 0)
    for text in ("1", "2", "3"):
        head = await it.append(text)

    first, second = it.relay(), it.relay()
    assert await first.catch_up(head)
    assert await second.catch_up(head)

    assert await it.relayed() == ["1", "2", "3"]
    assert (len(first.entries), len(second.entries)) == (3, 0)


async def test_what_was_stored_after_a_takeover_is_not_relayed() -> None:
    """RES3: the displaced stream is not caught up with what is the new one's, though nobody took
    the session off it yet.
    """
    it = await carried()
    await it.store.attach(it.session, ConnectionId("websocket-x"), now=NOW)
    head = await it.append("of the new one")

    assert await it.relay().catch_up(head)
    assert await it.relayed() == []


async def test_what_was_stored_after_a_detach_waits() -> None:
    """Attached nowhere: its events wait in the session's own window."""
    it = await carried()
    await it.store.detach(it.session, it.epoch)
    head = await it.append("waits")

    assert await it.relay().catch_up(head)
    assert await it.relayed() == []


async def test_a_hole_is_said() -> None:
    """CUP5: what is missing is gone from the window: nothing goes past it in silence."""
    it = await carried(max_events=2)
    head = Position(LOG, 0)
    for text in ("1", "2", "3", "4"):
        head = await it.append(text)

    assert not await it.relay().catch_up(head)
    assert await it.relayed() == []
