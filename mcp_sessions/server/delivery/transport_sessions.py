"""Transport-mode sessions: who may use one, its connection in this process, and where its GET
stream goes on.

The session is in the store. Its connection is made in each process where a request names it
for the first time, and can be made anew at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mcp_sessions import method_names
from mcp_sessions.core.messages import notification_message
from mcp_sessions.core.story import Why
from mcp_sessions.errors import (
    Detached,
    InvalidReason,
    InvalidRequest,
    Refusal,
    SessionNotFound,
    Status,
)
from mcp_sessions.ids import (
    GET_STREAM,
    SESSION_ID,
    Position,
    SessionId,
    parse_position,
    position_of,
)
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.joint_admission import JointAdmission
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.stores.records import Mode, SessionRecord


class TransportSessions:
    def __init__(
        self,
        replica: Replica,
        connections: ConnectionRegistry,
        attachments: Attachments,
        *,
        broadcaster: ChangeBroadcaster,
        held: Collection[SessionId],
        listed: Callable[[], frozenset[str]],
    ) -> None:
        self._store, self._bus, self._clock = replica.store, replica.bus, replica.clock
        self._strangers = replica.strangers
        self._connections, self._attachments = connections, attachments
        self._broadcaster, self._held, self._listed = broadcaster, held, listed

    async def admit(
        self, session_header: str, principal: Principal, joint: JointAdmission | None = None
    ) -> SessionRecord:
        """The transport session that ``Mcp-Session-Id`` names, as it is now.

        Args:
            joint: Gets the outcome for the current session, from the same step.

        Raises:
            SessionNotFound: Unknown, ended, expired or somebody else's: 404.
            InvalidRequest: One's own protocol-mode session: 400, mode_conflict.
        """
        session_id, admitted = SessionId(session_header), None
        if SESSION_ID.fullmatch(session_header):
            admitted = await self._store.admit(
                session_id,
                principal,
                mode=Mode.TRANSPORT,
                now=self._clock(),
                held=session_id in self._held,
                current=joint.use if joint is not None else None,
            )
        if joint is not None:
            joint.became(admitted.current if admitted is not None else None)
        if admitted is None:
            self._strangers.add(session_header)
            raise SessionNotFound(session_header, status=Status.NOT_FOUND)
        record = admitted.record
        if record.mode is not Mode.TRANSPORT:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT,
                "Mcp-Session-Id names a session that its client made: name that one in _meta",
                status=Status.BAD_REQUEST,
            )
        return record

    async def connected(
        self, session_header: str, principal: Principal, joint: JointAdmission | None = None
    ) -> tuple[SessionRecord, StoredConnection]:
        record = await self.admit(session_header, principal, joint)
        connection = self._connections.stored(record)
        if self._bus.is_shared:
            connection.saw(record)
        return record, connection

    async def may_receive(self, record: SessionRecord, principal: Principal) -> bool:
        """Whether a credential has the scopes of the transport session and of what is attached
        there, which one with more scopes may have started since (SEC3).
        """
        if not principal.scopes >= record.principal.scopes:
            return False
        for session_id in record.client.carried:
            carried = await self._store.load(session_id, now=self._clock())
            if carried is not None and not principal.scopes >= carried.principal.scopes:
                return False
        return True

    async def catch_up(self, connection: StoredConnection) -> None:
        """Relay what a process stored for a connection's sessions before it died; a session
        that cannot continue there is asked to resume.

        Raises:
            StoreUnavailable: Not all of it was relayed.
        """
        for session_id in await connection.catch_up():
            await self._attachments.displace(session_id, Detached.EVICTED)

    # --- GET streams -------------------------------------------------------------------------

    async def start_stream(
        self, connection: StoredConnection, record: SessionRecord, last_event_id: str | None
    ) -> tuple[Position, Sequence[bytes]]:
        """Start a GET stream: return its position, and its first messages.

        Args:
            connection: Its connection.
            record: The record from the admission of the GET.
            last_event_id: The client's last event, as the client says.

        Raises:
            SessionNotFound: The session has ended.
            StoreUnavailable: The store does not take what the stream would bring.
        """
        self._broadcaster.check([record.session_id, *record.client.carried])
        await self._attachments.write_late_events(record)
        if self._store.survives_process or self._bus.is_shared:
            await self.catch_up(connection)
        try:
            after, lost, continues = await self._position(connection, record, last_event_id)
        except SessionNotFound:
            await self._connections.release(connection)
            raise
        if lost is not None and lost is not Refusal.NO_POSITION:
            # Missed events are gone from the window (HTL9), or more events waited for the first
            # stream than the window holds (HTL3). The client has to know.
            for session_id in record.client.carried:
                # Its position in the session's own log may still be good: it has to resume.
                await self._attachments.displace(session_id, Detached.EVICTED)
        elif not continues:
            # A later GET without a position: its sessions wait for session/resume.
            for session_id, fencing_epoch in record.client.carried.items():
                await self._attachments.detach(
                    session_id, connection, fencing_epoch, why=Why.RESTARTED
                )
        if lost is None:
            return after, ()
        return after, _refetch(record.client.subscriptions, self._listed())

    async def _position(
        self, connection: StoredConnection, record: SessionRecord, last_event_id: str | None
    ) -> tuple[Position, Refusal | None, bool]:
        """Return the stream's start, the reason for a loss, and whether the stream continues.

        A stream continues an earlier one, or is the first.

        Raises:
            SessionNotFound: The session has ended.
        """
        first = await connection.is_first(record.client.stream_opened)
        head = await self._store.open_stream(record.session_id, GET_STREAM)
        if head is None:
            # Admitted by this very request, and ended since.
            raise SessionNotFound(record.session_id, status=Status.NOT_FOUND)
        if last_event_id is None and not first:
            # Events that no stream of this connection was handed are still sent.
            handed = connection.handed
            if handed is None:
                # That stream was open in another process, or before this one. Its last event is
                # not known.
                lost = Refusal.NO_POSITION if head.number > 0 else None
                return head, lost, False
            is_lost = await self._refused(record, handed) is not None
            return head if is_lost else position_of(handed), None, False
        if last_event_id is None:
            last_event_id = Position(head.log_epoch, 0).event_id()
        after = parse_position(last_event_id)
        if after is None:
            # However long it is: no store is asked for what is no id (ERR6).
            return head, Refusal.UNKNOWN_POSITION, False
        refusal = await self._refused(record, last_event_id)
        if refusal is not None:
            return head, refusal, False
        return after, None, True

    async def _refused(self, record: SessionRecord, event_id: str) -> Refusal | None:
        now = self._clock()
        _, refusal = await self._store.read(record.session_id, event_id, now=now, stream=GET_STREAM)
        return refusal


def _refetch(subscriptions: Collection[str], lists: frozenset[str]) -> list[bytes]:
    """Return the messages that make a client read everything again after a loss.

    They are one update for each subscribed resource, and one change for each list.
    """
    updated = method_names.RESOURCE_UPDATED
    return [
        *(notification_message(updated, {"uri": uri}) for uri in sorted(subscriptions)),
        *(notification_message(method_names.CHANGED[name], None) for name in sorted(lists)),
    ]
