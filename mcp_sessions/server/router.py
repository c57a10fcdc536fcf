"""Which session does a message belong to, and who serves it.

The three rules of association (``protocol.md``): the request names a session; else, on a
handshake-era connection, its current session; else none. ``session/*`` is answered here,
everything else by the wrapped server.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import (
    Answer,
    Notification,
    NotNamed,
    Request,
    RequestId,
    error_body,
    error_message,
    named_session,
    request_key,
    result_message,
    wire_error,
)
from mcp_sessions.core.request_keys import Begun, content_digest
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    LimitReached,
    OutcomeUnknown,
    SessionDetached,
    SessionNotFound,
    WireError,
)
from mcp_sessions.ids import ConnectionId, FencingEpoch, RequestKey, SessionId
from mcp_sessions.server.changes import Changes
from mcp_sessions.server.connection import Inbound, TransportConnection
from mcp_sessions.server.gates import Gates
from mcp_sessions.server.handle import Locks, SessionHandle
from mcp_sessions.server.host import REQUEST_CANCELLED, Host
from mcp_sessions.server.hub import Hub
from mcp_sessions.server.joining import Joining
from mcp_sessions.server.outbound import ConnectionOutbound, LateOutbound, SessionOutbound
from mcp_sessions.server.publisher import Publisher
from mcp_sessions.server.replicas import Replicas
from mcp_sessions.server.running import Carrier, RunningRequest
from mcp_sessions.server.served_here import (
    DISCOVER,
    SUBSCRIPTION_METHODS,
    Discovery,
    Subscriptions,
)
from mcp_sessions.server.session_methods import SESSION_METHODS, SessionMethods
from mcp_sessions.server.telling import Publish, Telling
from mcp_sessions.server.upstream import Upstream, UpstreamError, UpstreamPeer
from mcp_sessions.stores.base import (
    Admitted,
    CurrentSession,
    KeyUse,
    Mode,
    Peer,
    SessionRecord,
    SessionStore,
)

logger = logging.getLogger(__name__)

Register = Callable[[Peer], Awaitable[TransportConnection]]


@dataclass(slots=True)
class Association:
    """What a request belongs to."""

    admitted: Admitted | None
    """None: no session (rule 3)."""

    named: bool = False
    """By rule 1."""

    key: RequestKey | None = None


class Router:
    """Takes decoded messages from the bindings; answers go to the request's channel."""

    def __init__(
        self,
        *,
        store: SessionStore,
        hub: Hub,
        publisher: Publisher,
        changes: Changes,
        host: Host,
        upstream: Upstream,
        methods: SessionMethods,
        gates: Gates,
        advertise: Callable[[dict[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        """Take what it works with.

        Args:
            advertise: Adds our capabilities to an ``initialize`` result, in place.
        """
        self._store = store
        self._hub = hub
        self._publisher = publisher
        self._changes = changes
        self._host = host
        self._upstream = upstream
        self._methods = methods
        self._gates = gates
        self._advertise = advertise
        self._clock = clock
        self._locks = Locks()
        self._arriving: set[tuple[ConnectionId, RequestId]] = set()
        self._begins: weakref.WeakValueDictionary[RequestKey, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        host.standalone = self._standalone
        self._telling: Telling | None = None
        self._joining: Joining | None = None

    def share(self, replicas: Replicas, publish: Publish) -> Telling:
        """Serve together with other processes.

        Args:
            replicas: Those.
            publish: See :class:`Telling`.
        """
        self._joining = Joining(
            replicas,
            self._host,
            admit=self._admit_again,
            answer=self._answer_kept,
            begins=self._begin_of,
        )
        self._telling = Telling(
            replicas,
            self._store,
            self._hub,
            self._changes,
            self._host,
            self._joining,
            forget=self._methods.forget_here,
            publish=publish,
        )
        return self._telling

    # --- what bindings call ------------------------------------------------------------------

    async def initialize(
        self, request: Request, inbound: Inbound, register: Register, *, is_there: bool = False
    ) -> tuple[bytes, TransportConnection | None]:
        """Shake hands: the encoded answer, and the new connection if it succeeded.

        Nothing is registered before the wrapped server accepted (pitfall D1).

        Args:
            register: Makes the connection from what was agreed.
            is_there: It needs no store to be one: a pipe or a WebSocket.
        """
        outbound = LateOutbound()
        carrier = Carrier(request, inbound, named=False)
        call = RunningRequest(carrier, None, None, self._host)
        try:
            result, peer, upstream_peer = await self._upstream.initialize(
                call, request.params, outbound
            )
            keeps = is_there or self._store.remembers
            connection = await register(peer) if keeps else None
        except UpstreamError as failed:
            return error_message(request.id, failed.error), None
        except WireError as refused:
            return error_message(request.id, wire_error(refused)), None
        finally:
            call.done = True
        self._advertise(result)
        if connection is None:
            await upstream_peer.close()
            return result_message(request.id, result), None
        outbound.bind(ConnectionOutbound(self._publisher, self._host, connection))
        if connection.transport_session is not None:
            upstream_peer.belongs_to(connection.transport_session)
        connection.upstream_peers[None] = upstream_peer
        self._hub.add(connection)
        return result_message(request.id, result), connection

    async def request(self, request: Request, inbound: Inbound) -> None:
        """Serve a request; its answer goes to ``inbound.channel``, now or later."""
        if self._host.draining:
            # Over HTTP nothing comes this far; what is open both ways hears it here.
            error = error_body(INTERNAL_ERROR, "the server is shutting down")
            await _refuse(request, inbound, error)
            return
        # Until it runs, or is refused, its id is taken all the same: two of one id may come
        # while the store is still asked for the first one's session.
        connection = inbound.connection
        arriving = (connection.id, request.id) if connection is not None else None
        if arriving is not None and arriving in self._arriving:
            await _refuse(request, inbound, wire_error(_duplicate_id()))
            return
        if arriving is not None:
            self._arriving.add(arriving)
        try:
            if request.method in SESSION_METHODS:
                self._check_id(request, inbound)
                result = await self._methods.serve(request, inbound)
                if inbound.modern:
                    result["resultType"] = "complete"
                await inbound.channel.answer(inbound.result(request.id, result))
            else:
                await self._serve(request, inbound)
        except WireError as refused:
            await _refuse(request, inbound, wire_error(refused))
        except UpstreamError as failed:
            await _refuse(request, inbound, failed.error)
        finally:
            if arriving is not None:
                self._arriving.discard(arriving)

    async def notification(
        self, notification: Notification, inbound: Inbound
    ) -> Coroutine[Any, Any, None] | None:
        """Take a notification. What is wrong with it is logged: it is owed no answer.

        Returns:
            What the wrapped server does with it, which may wait for the client; None:
            nothing. Everything else that it changes is changed by then.
        """
        method, params = notification.method, notification.params
        if method == "notifications/cancelled":
            await self._cancel(params, inbound)
        elif method == "notifications/progress":
            await self._host.calls.progress(params, inbound.principal)
            if self._telling is not None:
                await self._telling.progressed(params, inbound.principal)
        try:
            association = await self._associate(params, inbound, None)
        except WireError as refused:
            logger.info("dropped %s: %s", method, refused)
            return None
        record = association.admitted.record if association.admitted is not None else None
        peer = self._upstream_peer(inbound, record)
        carrier = Carrier(Request("", method, params), inbound, named=False)
        call = RunningRequest(carrier, record, None, self._host)
        call.request_id = None

        async def notify() -> None:
            await peer.notify(call, method, params)
            if inbound.connection is None or inbound.modern:
                await peer.close()

        return notify()

    async def answer(self, answer: Answer, inbound: Inbound) -> bool:
        """Take the answer to a request of ours; False if it is to none that is open."""
        if self._host.calls.resolve(answer, inbound.principal):
            return True
        return self._telling is not None and await self._telling.answered(answer, inbound.principal)

    async def cancel_keyed(self, notification: Notification, inbound: Inbound) -> None:
        """Take a modern-era notification: a cancellation that names session and key, or
        nothing that concerns us.
        """
        if notification.method == "notifications/cancelled":
            await self._cancel(notification.params, inbound)

    async def admitted(self, request: Request, inbound: Inbound) -> SessionRecord | None:
        """The session that a listen request names, admitted; None: it names none (rule 1 only).

        Raises:
            WireError: As for any request.
        """
        # A key of it would never be finished: a listen ends with its connection.
        association = await self._associate(request.params, inbound, request, keyed=False)
        return association.admitted.record if association.admitted is not None else None

    # --- requests ----------------------------------------------------------------------------

    async def _serve(self, request: Request, inbound: Inbound) -> None:
        key = request_key(request.params)
        if key is None:
            await self._serve_now(request, inbound)
            return
        # The same key again waits until the first runs or is refused: recorded in the store,
        # but at work nowhere yet, it would look lost.
        async with self._begin_of(key):
            await self._serve_now(request, inbound)

    def _begin_of(self, key: RequestKey) -> asyncio.Lock:
        begins = self._begins.get(key)
        if begins is None:
            begins = self._begins[key] = asyncio.Lock()
        return begins

    async def _serve_now(self, request: Request, inbound: Inbound) -> None:
        self._check_id(request, inbound)
        association = await self._associate(request.params, inbound, request)
        admitted = association.admitted
        carrier = Carrier(request, inbound, association.named)
        if admitted is not None and admitted.key is not None and admitted.key is not Begun.FIRST:
            await self._again(carrier, association.key, admitted)
            return
        record = admitted.record if admitted is not None else None
        if record is not None and association.named:
            await self._attach_if_free(record, inbound)
        self._gates.check(request, record)
        peer = self._upstream_peer(inbound, record)
        if inbound.modern:
            if request.method == DISCOVER:
                peer = Discovery(peer, self._advertise)
        elif request.method in SUBSCRIPTION_METHODS and self._store.remembers:
            remember = self._remember_subscription(inbound, record)
            peer = Subscriptions(peer, self._upstream, remember)
        handle = None
        if record is not None:
            handle = SessionHandle(
                record, self._store, self._publisher, self._locks, self._methods.check_state
            )
        key = association.key if record is not None else None
        self._host.start(
            carrier,
            peer,
            record=record,
            key=key,
            handle=handle,
            close_peer=inbound.connection is None or inbound.modern,
        )

    async def _associate(
        self,
        params: dict[str, Any] | None,
        inbound: Inbound,
        request: Request | None,
        *,
        keyed: bool = True,
    ) -> Association:
        """Rules 1 to 3.

        Args:
            request: Record its key, if it has one; None: a notification, which has none.
            keyed: False: a key is ignored.

        Raises:
            InvalidParams, SessionNotFound, SessionDetached, InvalidRequest
        """
        key = request_key(params) if request is not None and keyed else None
        named = named_session(params)
        connection = inbound.connection
        if not isinstance(named, NotNamed):
            opened = await self._methods.check_token(params, named, inbound)
            if not self._store.remembers:
                key = None
            admitted = await self._admit(named, inbound, request, key)
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
            return Association(None)
        if named is NotNamed.NULL:
            if not await self._is_alive(current, inbound):
                await inbound.set_current(None)
            return Association(None)
        exempt = request is None or request.method == "ping"
        if exempt and not await self._is_alive(current, inbound):
            return Association(None)
        admitted = await self._admit(
            current.session_id, inbound, request, key, current.fencing_epoch
        )
        if admitted.displaced:
            raise SessionDetached
        return Association(admitted, False, key)

    async def _admit(
        self,
        session_id: SessionId,
        inbound: Inbound,
        request: Request | None,
        key: RequestKey | None,
        fencing_epoch: FencingEpoch | None = None,
    ) -> Admitted:
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
            use = KeyUse(key, digest, self._host.process, inbound.principal.scopes)
        admitted = await self._store.admit(
            session_id,
            inbound.principal,
            mode=Mode.PROTOCOL,
            now=self._clock(),
            held=session_id in self._host.held,
            fencing_epoch=fencing_epoch,
            key=use,
        )
        if admitted is None:
            raise SessionNotFound(session_id)
        return admitted

    async def _is_alive(self, current: CurrentSession, inbound: Inbound) -> bool:
        record = await self._store.load(current.session_id, now=self._clock())
        return (
            record is not None
            and record.principal == inbound.principal
            and record.fencing_epoch == current.fencing_epoch
        )

    async def _again(self, carrier: Carrier, key: RequestKey | None, admitted: Admitted) -> None:
        """A request key that is known: whatever happens, the handler does not run again."""
        record = admitted.record
        match admitted.key:
            case Begun.OTHER_CONTENT:
                raise InvalidRequest(
                    InvalidReason.KEY_REUSED, "this request key was used with other content"
                )
            case Begun.FULL:
                raise LimitReached("request_key_bytes")
            case Begun.ANSWERED:
                await self._answer_kept(carrier, admitted)
                return
            case Begun.RUNNING if key is not None:
                running, runner = self._host.by_key(record.session_id, key), admitted.runner
                elsewhere = runner is not None and runner != self._host.process
                if running is not None:
                    if carrier.named:
                        await self._attach_if_free(record, carrier.inbound)
                    await self._host.join(running, carrier)
                    return
                if self._joining is not None and runner is not None and elsewhere:
                    if carrier.named:
                        await self._attach_if_free(record, carrier.inbound)
                    self._joining.begin(carrier, record.session_id, key, runner)
                    return
            case _:
                # Dropped, or begun with scopes that this credential lacks: for its sender
                # nobody can know how it ended.
                pass
        raise OutcomeUnknown

    async def _answer_kept(self, carrier: Carrier, admitted: Admitted) -> None:
        message, code = self._methods.kept_answer(
            admitted.outcome or b"", carrier.request.id, carrier, admitted.record
        )
        await carrier.inbound.channel.answer(message, code=code)

    async def _admit_again(
        self, carrier: Carrier, session_id: SessionId, key: RequestKey
    ) -> Admitted:
        return await self._admit(session_id, carrier.inbound, carrier.request, key)

    def _check_id(self, request: Request, inbound: Inbound) -> None:
        connection = inbound.connection
        if connection is not None and self._joining is not None:
            if self._joining.of_request(connection.id, request.id) is not None:
                raise _duplicate_id()
        running = connection.requests.get(request.id) if connection is not None else None
        if running is None or running.done:
            return
        for carrier in running.carriers:
            here = carrier.inbound.connection is connection and carrier.request.id == request.id
            if here and carrier.inbound.channel.is_open:
                raise _duplicate_id()

    async def _attach_if_free(self, record: SessionRecord, inbound: Inbound) -> None:
        """Rule 1 only. A current session that was detached here waits for ``session/resume``:
        attached in passing, its client would go past what it missed and never get it.
        """
        connection, attachment = inbound.connection, record.attachment
        if connection is None:
            return
        if attachment is not None:
            if await self._hub.is_there(attachment.connection_id):
                return
            # Its process died with the connection, and could not say so (pitfall E8).
            await self._store.detach(record.session_id, attachment.fencing_epoch)
        if not inbound.principal.scopes >= record.principal.scopes:
            # A weaker credential may use the session, but not hear what a stronger one may
            # have caused (pitfall F3).
            return
        attached = await self._hub.attach(record.session_id, connection, only_if_free=True)
        if attached is None:
            return
        current = await inbound.current()
        if current is not None and current.session_id == record.session_id:
            await inbound.set_current(CurrentSession(record.session_id, attached.fencing_epoch))

    async def _cancel(self, params: Mapping[str, Any] | None, inbound: Inbound) -> None:
        running: RunningRequest | None = None
        try:
            named, key = named_session(params), request_key(params)
        except InvalidParams as malformed:
            logger.info("dropped a cancellation: %s", malformed)
            return
        if key is not None and not isinstance(named, NotNamed):
            running = self._host.by_key(named, key)
            if running is None:
                await self._cancel_elsewhere(named, key, inbound)
            elif running.record is None or running.record.principal != inbound.principal:
                return
        else:
            request_id, connection = (params or {}).get("requestId"), inbound.connection
            if connection is None or not isinstance(request_id, (str, int)):
                return
            running = connection.requests.get(request_id)
            if running is None and self._joining is not None:
                join = self._joining.of_request(connection.id, request_id)
                if join is not None:
                    await self._joining.cancel(join)
                    return
            if running is None and self._telling is not None and inbound.record is not None:
                # Over HTTP the request may have come to any replica.
                await self._telling.cancel(connection.id, request_id)
        if running is not None:
            await self._host.abort(running, error_body(REQUEST_CANCELLED, "Request cancelled"))

    async def _cancel_elsewhere(
        self, session_id: SessionId, key: RequestKey, inbound: Inbound
    ) -> None:
        if self._telling is None:
            return
        record = await self._store.load(session_id, now=self._clock())
        if record is not None and record.principal == inbound.principal:
            await self._telling.cancel_keyed(session_id, key)

    # --- how the wrapped server sees a client --------------------------------------------------

    def _upstream_peer(self, inbound: Inbound, record: SessionRecord | None) -> UpstreamPeer:
        connection = inbound.connection
        if connection is None or inbound.modern:
            outbound = None
            if record is not None:
                outbound = SessionOutbound(
                    self._hub, self._publisher, self._host, self._store, record
                )
            session_id = record.session_id if record is not None else None
            if inbound.modern:
                return self._upstream.modern_peer(inbound.route, outbound, session_id)
            return self._upstream.peer(inbound.peer, outbound or LateOutbound(), session_id)
        session_id = record.session_id if record is not None else None
        known = connection.upstream_peers.get(session_id)
        if known is not None:
            return known
        if record is not None:
            outbound = SessionOutbound(self._hub, self._publisher, self._host, self._store, record)
            self._hub.used(record.session_id, connection)
            peer = self._upstream.peer(inbound.peer, outbound, record.session_id)
        else:
            outbound = ConnectionOutbound(self._publisher, self._host, connection)
            session_id = connection.transport_session
            # On a pipe a client may speak before its handshake; the server says what it
            # thinks of that.
            ready = inbound.peer.initialize_params is not None
            peer = self._upstream.peer(inbound.peer, outbound, session_id, ready=ready)
            if not ready:
                return peer
            session_id = None
        connection.upstream_peers[session_id] = peer
        return peer

    def _remember_subscription(
        self, inbound: Inbound, record: SessionRecord | None
    ) -> Callable[[str, bool], Awaitable[bool]]:
        """Subscriptions belong to the session; without one, to the connection."""
        connection = inbound.connection
        session_id = record.session_id if record is not None else None
        if session_id is None and connection is not None:
            session_id = connection.transport_session

        async def remember(uri: str, on: bool) -> bool:
            if session_id is not None:
                change = self._store.subscribe if on else self._store.unsubscribe
                return await change(session_id, uri)
            if connection is None:
                return False
            self._hub.subscribe_bare(connection, uri, on=on)
            return True

        return remember

    def _standalone(self, running: RunningRequest) -> Any:
        inbound, record = running.carriers[-1].inbound, running.record
        if record is not None:
            return SessionOutbound(self._hub, self._publisher, self._host, self._store, record)
        if inbound.connection is not None:
            return ConnectionOutbound(self._publisher, self._host, inbound.connection)
        return LateOutbound()


def _duplicate_id() -> InvalidRequest:
    return InvalidRequest(InvalidReason.DUPLICATE_ID, "a request with this id is still open")


async def _refuse(request: Request, inbound: Inbound, error: dict[str, Any]) -> None:
    message = inbound.error(request.id, error)
    await inbound.channel.answer(message, code=error.get("code"))
