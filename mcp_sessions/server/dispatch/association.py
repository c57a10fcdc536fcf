"""Find the session of a message, if any: the rules of association (ASC).

1. A message may name a session. The session must exist and belong to the sender.
2. A message that names none belongs to the current session of its connection, if the connection
   is of the handshake era and has one.
3. Otherwise the message belongs to no session.

A request of no session may belong to a conversation that its host names. The conversation has a
session that its handlers see, and its client does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import NotNamed
from mcp_sessions.core.readings import folded, is_one_of
from mcp_sessions.core.request_keys import Begun, KeyUse, content_digest
from mcp_sessions.core.states import Mode
from mcp_sessions.core.visibility import TOOLS, Visibility, calls_one
from mcp_sessions.errors import (
    InvalidReason,
    InvalidRequest,
    SessionDetached,
    SessionNotFound,
    SessionRequiredByServer,
)
from mcp_sessions.ids import FencingEpoch, RequestKey, SessionId
from mcp_sessions.server.connection import Inbound
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.dispatch.conversations import BoundSessions
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Admitted, CurrentSession, SessionRecord


@dataclass(slots=True)
class Association:
    """The session of a request."""

    admitted: Admitted | None
    """None: no session (rule 3)."""

    named: bool = False
    """By rule 1."""

    key: RequestKey | None = None

    bound: SessionRecord | None = None
    """By rule 3: that of its conversation."""

    started: str | None = None
    """The handle of that session, which this request started."""

    declined: bool = False
    """Its sender says that it belongs to none, not to its connection's either."""

    gated: bool = False
    """It calls a tool that is served in a session only, and not known outside of one: unless
    what it belongs to sees that tool it is asked for like one that is not there."""


@dataclass(slots=True, eq=False, repr=False)
class Associations:
    """Finds the session of a message, and lets it in there."""

    _store: SessionStore
    _connections: ConnectionRegistry
    _attachments: Attachments
    _runner: RequestRunner
    _sealed: SealedState
    _clock: Callable[[], float]
    _conversations: BoundSessions | None
    _visibility: Visibility
    _gated_methods: set[str] = field(default_factory=set[str])
    _gated_tools: set[str] = field(default_factory=set[str])
    """Folded: a server may take another spelling for the same tool."""

    def gate(self, *, tools: Iterable[str], methods: Iterable[str]) -> None:
        """Serve these in a session only from now on, beside those that are gated already."""
        self._gated_tools.update(map(folded, tools))
        self._gated_methods.update(methods)

    async def of(
        self,
        message: Message,
        inbound: Inbound,
        *,
        is_request: bool = True,
        keyed: bool = True,
        instead_of: str = "",
    ) -> Association:
        """Rules 1 to 3; by rule 3 only what is not gated, or is of a conversation.

        Args:
            inbound: Where the message came from.
            is_request: Its key is recorded, if it has one; False: a notification, which has none.
            keyed: False: a request key is ignored, and a conversation's as well.
            instead_of: See :class:`~mcp_sessions.core.request_keys.KeyUse`.

        Raises:
            InvalidParams, SessionNotFound, SessionDetached, InvalidRequest,
                SessionRequiredByServer
            UnknownHandle: See :meth:`BoundSessions.of`.
        """
        if message.is_misnamed or message.is_miskeyed:
            if is_request and keyed:
                message.keyed()
            message.named()
        key = message.key if is_request and keyed else None
        named = message.session
        request = message if is_request else None
        connection = inbound.connection
        if not isinstance(named, NotNamed):
            opened = await self._sealed.check_token(message, named, inbound)
            if not self._store.remembers:
                key = None
            admitted = await self.admit(named, inbound, request, key, instead_of=instead_of)
            if opened is not None and not self._store.remembers:
                admitted.record.state, admitted.record.state_version = opened
            if admitted.record.mode is not Mode.PROTOCOL:
                raise InvalidRequest(
                    InvalidReason.MODE_CONFLICT, "this session belongs to its transport"
                )
            return Association(admitted, True, key)
        current = None
        if connection is not None and not inbound.modern:
            current = await inbound.current()
        if current is None or connection is None:
            return await self._outside(request, inbound, named, keyed)
        if named is NotNamed.NULL:
            if not await self._is_alive(current, inbound):
                await inbound.set_current(None)
            return await self._outside(request, inbound, named, keyed)
        exempt = request is None or request.method == "ping"
        if exempt and not await self._is_alive(current, inbound):
            return await self._outside(request, inbound, named, keyed)
        admitted = inbound.joint.taken(current) if inbound.joint is not None else None
        if admitted is None:
            admitted = await self.admit(
                current.session_id,
                inbound,
                request,
                key,
                current.fencing_epoch,
                instead_of=instead_of,
            )
        if admitted.displaced:
            raise SessionDetached
        return Association(admitted, False, key)

    async def _outside(
        self, request: Message | None, inbound: Inbound, named: NotNamed, keyed: bool
    ) -> Association:
        declined = named is NotNamed.NULL
        if self._conversations is not None and request is not None and keyed and not declined:
            bound = await self._conversations.of(request, inbound)
            if bound is not None:
                return Association(None, bound=bound.record, started=bound.started)
        if request is not None and request.method in self._gated_methods:
            raise SessionRequiredByServer
        tool, gated = None, False
        if self._gated_tools and request is not None and request.method == "tools/call":
            tool = _tool(request)
            gated = is_one_of(tool, self._gated_tools) if tool is not None else False
            # If it is not sure which tool the server reads, it may be one of these.
            gated = gated or not calls_one(request.params or {})
        if gated:
            sees = self._visibility
            if sees.needed:
                sees = sees.with_scopes(inbound.principal.checked_scopes)
            if not sees.is_hidden(TOOLS, str(tool)):
                raise SessionRequiredByServer
        return Association(None, declined=declined, gated=gated)

    async def admit(
        self,
        session_id: SessionId,
        inbound: Inbound,
        request: Message | None,
        key: RequestKey | None,
        fencing_epoch: FencingEpoch | None = None,
        *,
        instead_of: str = "",
    ) -> Admitted:
        """Let a message into a session, as :meth:`of` does. The run of a key that is recorded
        now is settled by who begins it.

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
            inbound.principal,
            mode=Mode.PROTOCOL,
            now=self._clock(),
            held=session_id in self._runner.held,
            fencing_epoch=fencing_epoch,
            key=use,
        )
        if use is not None and (admitted is None or admitted.key is not Begun.FIRST):
            self._runner.runs.settle(use.run)
        if admitted is None:
            raise SessionNotFound(session_id)
        return admitted

    async def session_of(self, request: Message, inbound: Inbound) -> SessionId | None:
        """The session that :meth:`of` would let a request into; None: none.

        Raises:
            InvalidParams: What names it is malformed.
        """
        named = request.named()
        if not isinstance(named, NotNamed):
            return named
        if inbound.connection is None or inbound.modern or named is NotNamed.NULL:
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
        """Attach a session to where it was named, if nobody hears its events.

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
            await self._store.detach(record.session_id, attachment.fencing_epoch)
        if not inbound.principal.scopes >= record.principal.scopes:
            # A weaker credential may use the session, but not hear what a stronger one may
            # have caused (SEC3).
            return
        attached = await self._attachments.attach(record.session_id, connection, only_if_free=True)
        if attached is None:
            return
        current = await inbound.current()
        if current is not None and current.session_id == record.session_id:
            await inbound.set_current(CurrentSession(record.session_id, attached.fencing_epoch))


def _tool(request: Message) -> str | None:
    name = (request.params or {}).get("name")
    return name if isinstance(name, str) else None
