"""Find the session of a message, if any: the rules of association (ASC).

1. A message may name a session. The session must exist and belong to the sender.
2. A message that names none belongs to the current session of its connection, if the connection
   is of the handshake era and has one.
3. Otherwise the message belongs to no session.

A request of no session may belong to a conversation that its host names. The conversation has a
session that its handlers see, and its client does not (``conversation.py``).
"""

from __future__ import annotations

from mcp_sessions import method_names
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import NotNamed
from mcp_sessions.core.request_keys import Begun, KeyUse, content_digest
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Why, detaches
from mcp_sessions.errors import InvalidReason, InvalidRequest, SessionDetached, SessionNotFound
from mcp_sessions.ids import FencingEpoch, RequestKey, SessionId, process_of, replica_name
from mcp_sessions.server.calls.table import Call, KeyScope, Outcome, Stage
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import Inbound, NotChanged
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.records import Admitted, CurrentSession, SessionRecord, StoredState


class Association(Stage):
    """Finds the session of a message, and admits the message to it.

    The store admits a request and records its key in one step. So ``idempotency.py``, whose stages
    stand before and after this one, takes the answer about the key from here. Over HTTP one step
    may admit a request to its connection as well: that was done before the path
    (:mod:`mcp_sessions.server.connection.joint_admission`), and is taken from there.
    """

    def __init__(
        self,
        replica: Replica,
        delivery: Delivery,
        runner: RequestRunner,
        *,
        sealed: SealedState,
    ) -> None:
        self._store, self._clock = replica.store, replica.clock
        self._strangers = replica.strangers
        self._connections, self._attachments = delivery.connections, delivery.attachments
        self._runner, self._sealed = runner, sealed

    async def before(self, call: Call) -> Outcome | None:
        """Rules 1 and 2.

        Raises:
            InvalidParams, SessionNotFound, SessionDetached, InvalidRequest
        """
        message, inbound = call.request, call.inbound
        instead_of = call.keyed.instead_of if call.keyed is not None else ""
        named = message.session
        if named is NotNamed.MALFORMED:
            named = message.named()
        is_request = not message.is_notification
        request = message if is_request else None
        if not isinstance(named, NotNamed):
            opened = await self._sealed.check_token(message, named, inbound)
            if not self._store.remembers:
                call.key = None
            admitted = await self.admit(named, inbound, request, call.key, instead_of=instead_of)
            if opened is not None and not self._store.remembers:
                admitted.record.state = StoredState(*opened)
            if admitted.record.mode is not Mode.PROTOCOL:
                raise InvalidRequest(
                    InvalidReason.MODE_CONFLICT, "this session belongs to its transport"
                )
        else:
            current, connection = None, inbound.connection
            if connection is not None and not inbound.peer.modern:
                admitted_to = inbound.http.record
                if admitted_to is not None and inbound.changed_current is NotChanged.HERE:
                    # As Inbound.current has it: most requests come this way.
                    current = admitted_to.client.current
                else:
                    current = await inbound.current()
            if current is not None and named is NotNamed.NULL:
                if not await self._is_alive(current, inbound):
                    await inbound.set_current(None)
                current = None
            exempt = not is_request or message.method == method_names.PING
            if current is not None and exempt and not await self._is_alive(current, inbound):
                current = None
            if current is None:
                call.admitted = call.record = call.key = None
                return None
            joint = inbound.http.joint
            admitted = joint.taken(current) if joint is not None else None
            if admitted is None:
                admitted = await self.admit(
                    current.session_id,
                    inbound,
                    request,
                    call.key,
                    current.fencing_epoch,
                    instead_of=instead_of,
                )
            if admitted.displaced:
                raise SessionDetached
        call.admitted, call.record = admitted, admitted.record
        return None

    async def admit(
        self,
        session_id: SessionId,
        inbound: Inbound,
        request: Message | None,
        key: RequestKey | None,
        fencing_epoch: FencingEpoch | None = None,
        *,
        instead_of: str = "",
        scope: KeyScope | None = None,
    ) -> Admitted:
        """Admit a message to a session, as :meth:`before` does. The run of a key that is recorded
        now is settled by who begins it.

        Args:
            scope: The session is one for keys.

        Raises:
            SessionNotFound: It is not there, or not the sender's.
        """
        if request is None and self._store.remembers:
            # A notification is no request: it moves no deadline.
            record = await self._store.load(session_id, now=self._clock())
            if record is None or record.principal != inbound.principal:
                raise SessionNotFound(session_id)
            displaced = fencing_epoch is not None and record.fencing_epoch != fencing_epoch
            return Admitted(record, displaced=displaced)
        use = None
        if key is not None and request is not None:
            digest = content_digest(request.method, request.params)
            scopes, run = inbound.principal.scopes, self._runner.runs.mint()
            use = KeyUse(key, digest, self._runner.process, scopes, run, instead_of)
        admitted = await self._store.admit(
            session_id,
            inbound.principal if scope is None else scope.principal,
            mode=Mode.PROTOCOL if scope is None else scope.mode,
            now=self._clock(),
            held=session_id in self._runner.held,
            fencing_epoch=fencing_epoch,
            key=use,
        )
        if use is not None and (admitted is None or admitted.key is not Begun.FIRST):
            self._runner.runs.settle(use.run)
        if admitted is None:
            self._strangers.add(session_id)
            raise SessionNotFound(session_id)
        return admitted

    async def session_of(self, request: Message, inbound: Inbound) -> SessionId | None:
        """The session that :meth:`before` would admit a request to; None: none.

        Raises:
            InvalidParams: The metadata that names it is malformed.
        """
        named = request.named()
        if not isinstance(named, NotNamed):
            return named
        if inbound.connection is None or inbound.peer.modern or named is NotNamed.NULL:
            return None
        current = await inbound.current()
        return current.session_id if current is not None else None

    async def _is_alive(self, current: CurrentSession, inbound: Inbound) -> bool:
        record = await self._store.load(current.session_id, now=self._clock())
        return (
            record is not None
            and record.principal == inbound.principal
            and record.fencing_epoch == current.fencing_epoch
        )

    async def attach_if_free(self, record: SessionRecord, inbound: Inbound) -> None:
        """Attach a session to where it was named, if nobody receives its events.

        Rule 1 only. A current session that was detached here waits for ``session/resume``:
        attached in passing, its client would go past what it missed and never get it.
        """
        connection, attachment = inbound.connection, record.attachment
        if connection is None:
            return
        if attachment is not None:
            if await self._connections.is_there(attachment.connection_id):
                return
            # Its process died with the connection, and could not say so (ATT9).
            home = process_of(attachment.connection_id)
            gone = detaches(self._clock(), Why.REPLICA_GONE, replica_name(home or ""))
            await self._store.detach(record.session_id, attachment.fencing_epoch, gone)
        if not inbound.principal.scopes >= record.principal.scopes:
            # A weaker credential may use the session, but not receive what a stronger one may
            # have caused (SEC3).
            return
        attached = await self._attachments.attach(
            record.session_id, connection, why=Why.NAMED, only_if_free=True
        )
        if attached is None:
            return
        current = await inbound.current()
        if current is not None and current.session_id == record.session_id:
            await inbound.set_current(CurrentSession(record.session_id, attached.fencing_epoch))
