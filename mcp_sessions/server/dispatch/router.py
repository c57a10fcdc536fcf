"""Route each message that comes in.

The router answers ``session/*`` itself. The wrapped server answers everything else, in the
message's session. Answers and cancellations go to the requests that they name.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp_sessions.core.handles import not_a_handle
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import (
    Answer,
    NotNamed,
    error_body,
    result_message,
    wire_error,
)
from mcp_sessions.core.request_keys import Begun
from mcp_sessions.core.visibility import Visibility, restored
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    REQUEST_CANCELLED,
    InvalidParams,
    LimitReached,
    OutcomeUnknown,
    SessionRequiredByServer,
    WireError,
)
from mcp_sessions.ids import RequestKey, SessionId, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.audit import Audit
from mcp_sessions.server.calls.stages.handles import Handles
from mcp_sessions.server.calls.stages.stage import Stage
from mcp_sessions.server.calls.stages.visibility import Concealing
from mcp_sessions.server.calls.table import Call
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.forwarding import forward_answer, forward_progress
from mcp_sessions.server.cluster.messages import CancelKeyed, CancelRequest
from mcp_sessions.server.connection import ClientConnection, Inbound
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.dispatch.association import Associations
from mcp_sessions.server.dispatch.conversations import BoundSessions, UnknownHandle
from mcp_sessions.server.dispatch.idempotency import Idempotency
from mcp_sessions.server.dispatch.session_methods import SESSION_METHODS, SessionMethods
from mcp_sessions.server.loggable import loggable_method
from mcp_sessions.server.reached_limits import ReachedLimits
from mcp_sessions.server.requests.handle import SessionHandles
from mcp_sessions.server.requests.outbound import LateOutbound
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.server.upstream.handle_argument import HandleArgument
from mcp_sessions.server.upstream.peers import UpstreamPeers
from mcp_sessions.server.upstream.port import Upstream, UpstreamError
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.limits import check_peer
from mcp_sessions.stores.records import Peer, SessionRecord

logger = logging.getLogger(__name__)

Register = Callable[[Peer], Awaitable[ClientConnection]]


@dataclass(slots=True, eq=False, repr=False)
class Router:
    """Takes decoded messages from the bindings; answers go to the request's channel.

    Args:
        advertise: Adds our capabilities to the result of an ``initialize``, in place.
    """

    _store: SessionStore
    _connections: ConnectionRegistry
    _runner: RequestRunner
    _questions: PendingQuestions
    _upstream: Upstream
    _peers: UpstreamPeers
    _associations: Associations
    _conversations: BoundSessions | None
    _idempotency: Idempotency
    _methods: SessionMethods
    _handles: SessionHandles
    _policy: SessionPolicy
    _advertise: Callable[[dict[str, Any]], None]
    _clock: Callable[[], float]
    _bus: ClusterBus
    _audit: Audit
    _visibility: Visibility
    limits: ReachedLimits
    """Told of each limit that refuses a request."""

    # --- what bindings call ------------------------------------------------------------------

    async def initialize(
        self, request: Message, inbound: Inbound, register: Register, *, is_there: bool = False
    ) -> tuple[bytes, ClientConnection | None]:
        """Shake hands: the encoded answer, and the new connection if it succeeded.

        Nothing is registered before the wrapped server accepted (HTL1).

        Args:
            register: Makes the connection from what was agreed.
            is_there: It needs no store to be one: a pipe or a WebSocket.
        """
        with self.audited(request, inbound):
            answer, connection = await self._initialize(request, inbound, register, is_there)
            if inbound.audit is not None and connection is not None:
                inbound.audit.connected(
                    connection.peer.protocol_version, connection.transport_session
                )
            inbound.acknowledged()
            return answer, connection

    async def _initialize(
        self, request: Message, inbound: Inbound, register: Register, is_there: bool
    ) -> tuple[bytes, ClientConnection | None]:
        try:
            self._runner.calls.take(inbound)
        except LimitReached as refused:
            self.limits.reached(refused)
            return inbound.error(request.id, wire_error(refused)), None
        outbound = LateOutbound()
        waiter = Call(request, inbound)
        call = self._runner.call(waiter, None, partial(self._peers.standalone, inbound, None))
        try:
            result, peer, upstream_peer = await self._upstream.initialize(
                call, request.params, outbound
            )
        except UpstreamError as failed:
            return inbound.error(request.id, failed.error), None
        finally:
            call.end()
        keeps = is_there or self._store.remembers
        try:
            check_peer(peer, self._policy)
            connection = await register(peer) if keeps else None
        except WireError as refused:
            await upstream_peer.close()
            if isinstance(refused, LimitReached):
                self.limits.reached(refused)
            return inbound.error(request.id, wire_error(refused)), None
        except BaseException:
            await upstream_peer.close()
            raise
        self._advertise(result)
        if connection is None:
            await upstream_peer.close()
            return result_message(request.id, result), None
        self._peers.adopt(upstream_peer, outbound, connection)
        self._connections.add(connection)
        return result_message(request.id, result), connection

    async def request(self, request: Message, inbound: Inbound) -> None:
        """Serve a request; its answer goes to ``inbound.channel``, now or later."""
        if not self._audit.logger.level:
            await self._request(request, inbound)
            return
        with self.audited(request, inbound):
            await self._request(request, inbound)

    @contextmanager
    def audited(self, request: Message, inbound: Inbound) -> Generator[None]:
        """Write down what becomes of a request, if that is wanted: here, that it is not answered;
        else whoever answers does.
        """
        if not self._audit.logger.level:
            yield
            return
        entry = inbound.audited(
            self._audit.begin(
                request,
                principal=inbound.principal,
                transport=inbound.transport,
                client=inbound.address,
                version=inbound.peer.protocol_version,
                modern=inbound.modern,
            )
        )
        try:
            yield
        except (WireError, UpstreamError):
            # That is its answer.
            raise
        except BaseException as failed:
            if entry is not None:
                entry.failed(failed)
            raise

    async def _request(self, request: Message, inbound: Inbound) -> None:
        if self._runner.draining and not self._is_served_still(inbound):
            await _refuse_at_the_end(request, inbound)
            return
        is_ours = request.method in SESSION_METHODS
        try:
            # ASC20: a malformed key is refused before anything else.
            key = request.key
            if request.is_miskeyed and not is_ours:
                request.keyed()
            call = self._runner.calls.open(request, inbound, is_ours=is_ours)
            try:
                if is_ours:
                    result = await self._methods.serve(request, inbound)
                    if inbound.modern:
                        result["resultType"] = "complete"
                    await inbound.answer(inbound.result(request.id, result))
                elif key is None:
                    await self._serve(call)
                else:
                    await self._serve_keyed(call, key)
            finally:
                if call.work is None:
                    self._runner.calls.close(call)
                elif call.error is not None:
                    await call.work.abort(call.error)
        except WireError as refused:
            await self._refuse(request, inbound, refused)
        except UpstreamError as failed:
            await _refuse(request, inbound, failed.error)

    def _is_served_still(self, inbound: Inbound) -> bool:
        """Whether a request may begin while the process stops. Over HTTP others came no further
        than its door; what is open both ways hears it here.
        """
        is_leaving = inbound.connection is not None and inbound.connection.transport.is_leaving
        return is_leaving or (inbound.is_let_in and not self._runner.is_over)

    def reported(self, notification: Message, inbound: Inbound) -> Coroutine[Any, Any, None] | None:
        """Pass a report of progress on to the asker of its question; None: it is no such report.

        The result may wait for the client. A binding calls this in addition to
        :meth:`notification`.
        """
        if notification.method != "notifications/progress":
            return None

        async def report() -> None:
            params, principal = notification.params, inbound.principal
            await self._questions.progress(params, principal)
            await forward_progress(self._bus, params, principal)

        return report()

    async def notification(
        self, notification: Message, inbound: Inbound
    ) -> Coroutine[Any, Any, None] | None:
        """Take a notification. What is wrong with it is logged: it is owed no answer.

        Returns:
            What the wrapped server does with it, which may wait for the client; None:
            nothing. Everything else that it changes is changed by then.
        """
        method = notification.method
        if method == "notifications/cancelled":
            await self._cancel(notification, inbound)
        try:
            association = await self._associations.of(notification, inbound, is_request=False)
        except WireError as refused:
            logger.info("dropped %s: %s", loggable_method(method), refused)
            return None
        record = association.admitted.record if association.admitted is not None else None
        peer = self._peers.of(inbound, record)
        waiter = Call(notification, inbound)
        standalone = partial(self._peers.standalone, inbound, record)
        call = self._runner.call(waiter, record, standalone, is_notification=True)

        async def notify() -> None:
            await peer.notify(call, method, notification.forwarded)
            if inbound.connection is None or inbound.modern:
                await peer.close()

        return notify()

    async def answer(self, answer: Answer, inbound: Inbound) -> bool:
        """Take the answer to a request of ours; False if it is to none that is open."""
        if self._questions.resolve(answer, inbound.principal):
            return True
        return await forward_answer(self._bus, answer, inbound.principal)

    async def cancel_keyed(self, notification: Message, inbound: Inbound) -> None:
        """Take a modern-era notification: a cancellation that names session and key, or
        nothing that concerns us.
        """
        if notification.method == "notifications/cancelled":
            await self._cancel(notification, inbound)

    async def admitted(self, request: Message, inbound: Inbound) -> SessionRecord | None:
        """The session that a listen request names, admitted; None: it names none (rule 1 only).

        Raises:
            WireError: As for any request.
        """
        # A key of it would never be finished: a listen ends with its connection.
        association = await self._associations.of(request, inbound, keyed=False)
        return association.admitted.record if association.admitted is not None else None

    # --- requests ----------------------------------------------------------------------------

    async def _serve_keyed(self, call: Call, key: RequestKey) -> None:
        request, inbound, session_id = call.request, call.inbound, None
        # If it is let in with its connection, the lock is held.
        is_let_in = inbound.joint is not None and inbound.joint.is_let_in
        if not is_let_in:
            session_id = await self._associations.session_of(request, inbound)
        if session_id is None:
            await self._serve(call)
            return
        async with self._idempotency.begin_of((session_id, key)):
            await self._serve(call)

    async def _begin_anew(self, waiter: Call, known_in: SessionId, instead_of: str) -> None:
        """Serve a keyed request whose run in another process never began, and never will.

        Raises:
            StoreUnavailable: It is not begun.
        """
        request, inbound = waiter.request, waiter.inbound
        try:
            key = request.key
            session_id = await self._associations.session_of(request, inbound)
            is_served = not self._runner.draining or self._is_served_still(inbound)
            if key is None or session_id != known_in or not is_served:
                # Its connection went on to another session, or this process stops.
                raise OutcomeUnknown
            async with self._idempotency.begin_of((known_in, key)):
                await self._serve(waiter, instead_of)
            if waiter.work is not None and waiter.error is not None:
                await waiter.work.abort(waiter.error)
        except WireError as refused:
            await self._refuse(request, inbound, refused)
        except UpstreamError as failed:
            await _refuse(request, inbound, failed.error)

    async def _refuse(self, request: Message, inbound: Inbound, refused: WireError) -> None:
        if not isinstance(refused, LimitReached):
            await _refuse(request, inbound, wire_error(refused))
            return
        self.limits.reached(refused)
        message = inbound.error(request.id, wire_error(refused))
        await inbound.answer(message, code=refused.code, retry_after=refused.retry_after)

    async def _serve(self, waiter: Call, instead_of: str = "") -> None:
        request, inbound = waiter.request, waiter.inbound
        argument = self._conversations.argument_for(inbound) if self._conversations else None
        if argument is not None and argument.is_unknown(argument.tool_of(request)):
            await self._learn(argument, request, inbound)
        try:
            association = await self._associations.of(request, inbound, instead_of=instead_of)
        except UnknownHandle:
            if argument is None:
                raise AssertionError("a handle was found where none is looked for") from None
            refused = inbound.of_its_era(not_a_handle(argument.name))
            await inbound.answer(inbound.result(request.id, refused))
            return
        admitted = association.admitted
        if admitted is not None and self._idempotency.never_began(admitted):
            association = await self._associations.of(
                request, inbound, instead_of=admitted.run or ""
            )
            admitted = association.admitted
        audit = inbound.audit
        if audit is not None and admitted is not None:
            audit.serve_in(digest(admitted.record.session_id), "session")
        if admitted is not None and admitted.key is not None and admitted.key is not Begun.FIRST:
            if audit is not None:
                audit.seen_before()
            await self._idempotency.again(waiter, association.key, admitted, self._begin_anew)
            return
        record = admitted.record if admitted is not None else None
        if record is not None and association.named:
            await self._associations.attach_if_free(record, inbound)
        key = association.key if record is not None else None
        handle = None
        if record is not None:
            handle = self._handles.of(record)
        elif association.bound is not None:
            handle = self._handles.of_conversation(association.bound, inbound)
        elif inbound.connection is not None and not (inbound.modern or association.declined):
            handle = await self._handles.of_connection(inbound.connection, inbound.record)
        if audit is not None and handle is not None:
            audit.serve_in(handle.digest, handle.source, inbound.conversation)
        sees = handle.visibility if handle is not None else self._visibility
        if sees.needed:
            sees = sees.with_scopes(inbound.principal.checked_scopes)
        is_plain = sees.is_plain
        put = {} if is_plain else sees.names_hidden(request.method, request.params)
        if association.gated and not put:
            raise SessionRequiredByServer
        if self._runner.is_over:
            # Since it was let in. A key that it recorded is one of a run that never began.
            await _refuse_at_the_end(request, inbound)
            return
        peer = self._peers.serving(request, inbound, record)
        # What is hidden comes first: it is in no list, also if it takes a handle.
        stages: list[Stage] = [] if is_plain else [Concealing(sees)]
        if argument is not None:
            tool = argument.tool_of(request)
            taken = tool if argument.takes(tool) and not put else None
            stages.append(Handles(argument, taken, association.started))
        running = self._runner.call(
            waiter,
            record,
            partial(self._peers.standalone, inbound, record),
            key=key,
            handle=handle,
            stages=stages,
            bound_session=association.bound.session_id if association.bound is not None else None,
            restored=partial(restored, put=put) if put else None,
        )
        if admitted is not None and admitted.run is not None and key is not None:
            self._runner.runs.settle(admitted.run)
        running.start(peer, close_peer=inbound.connection is None or inbound.modern)

    async def _learn(self, argument: HandleArgument, request: Message, inbound: Inbound) -> None:
        """Look up a tool that is to take a handle, where no list went by so far."""
        waiter = Call(request, inbound)
        call = self._runner.call(waiter, None, partial(self._peers.standalone, inbound, None))
        peer = self._peers.of(inbound, None)
        try:
            await argument.learn(peer, call, request)
        except UpstreamError:
            logger.warning(
                "a client called a tool that should take a handle, but the server did not list it"
            )
        finally:
            call.end()
            if inbound.connection is None or inbound.modern:
                await peer.close()

    async def _cancel(self, notification: Message, inbound: Inbound) -> None:
        meant: Sequence[Call | RunningRequest] = ()
        try:
            named, key = notification.named(), notification.keyed()
        except InvalidParams as malformed:
            logger.info("dropped a cancellation: %s", malformed)
            return
        if key is not None and not isinstance(named, NotNamed):
            running = await self._idempotency.joining.at_work(named, key)
            if running is None:
                await self._cancel_elsewhere(named, key, inbound)
            elif running.record is not None and running.record.principal == inbound.principal:
                meant = [running]
        else:
            params, connection = notification.params or {}, inbound.connection
            request_id: object = params.get("requestId")
            if connection is None or not isinstance(request_id, (str, int)):
                return
            meant = self._runner.calls.meant(connection.id, request_id)
            if inbound.record is not None:
                # Over HTTP such a request may have come to any replica.
                await self._bus.tell(CancelRequest(connection_id=connection.id, id=request_id))
        for request in meant:
            await request.abort(error_body(REQUEST_CANCELLED, "Request cancelled"))

    async def _cancel_elsewhere(
        self, session_id: SessionId, key: RequestKey, inbound: Inbound
    ) -> None:
        if not self._bus.is_shared:
            return
        record = await self._store.load(session_id, now=self._clock())
        if record is not None and record.principal == inbound.principal:
            await self._bus.tell(CancelKeyed(session_id=session_id, key=key))


async def _refuse_at_the_end(request: Message, inbound: Inbound) -> None:
    """Refuse what is not begun any more; ERR15: its client may send it elsewhere."""
    data = {"reason": "draining", "started": False}
    await _refuse(request, inbound, error_body(INTERNAL_ERROR, "the server is shutting down", data))


async def _refuse(request: Message, inbound: Inbound, error: dict[str, Any]) -> None:
    message = inbound.error(request.id, error)
    await inbound.answer(message, code=error.get("code"))
