"""Route each message that comes in.

The router answers ``session/*`` itself. The wrapped server answers everything else, in the
message's session. Answers and cancellations go to the requests that they name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from mcp_sessions import method_names, metrics
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import Answer, NotNamed, error_body, result_message, wire_error
from mcp_sessions.core.visibility import Visibility
from mcp_sessions.errors import (
    REQUEST_CANCELLED,
    InvalidParams,
    LimitReached,
    NotBegun,
    OutcomeUnknown,
    SessionNotFound,
    StoreUnavailable,
    WireError,
)
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions.server.calls.table import ANSWERED, Call, Keyed, Outcome, Stage, abort
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import CancelKeyed, CancelRequest
from mcp_sessions.server.connection.connection import ClientConnection, Inbound
from mcp_sessions.server.delivery.questions import RemoteQuestions
from mcp_sessions.server.dispatch.path import Path, Stages
from mcp_sessions.server.dispatch.stages.serving import UpstreamPeers
from mcp_sessions.server.reporting.loggable import loggable_method
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.reporting.stories import word_of
from mcp_sessions.server.requests.joining import Joining
from mcp_sessions.server.requests.outbound import LateOutbound
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.ends_contract import principal_name
from mcp_sessions.stores.limits import check_peer
from mcp_sessions.stores.records import Peer, SessionRecord

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

Register = Callable[[Peer], Awaitable[ClientConnection]]


class Router:
    def __init__(
        self,
        replica: Replica,
        runner: RequestRunner,
        stages: Stages,
        *,
        joining: Joining,
        questions: RemoteQuestions,
        peers: UpstreamPeers,
        advertise: Callable[[dict[str, Any]], None],
        visibility: Visibility,
    ) -> None:
        self._replica = replica
        self._runner, self._joining, self._questions = runner, joining, questions
        self._peers, self._advertise = peers, advertise
        self._audited = stages.audited
        self.limits = ReachedLimits(time.monotonic)
        """Counts each limit that refuses a request."""

        self.path = Path(stages, runner, visibility, begin_anew=self._begin_anew)
        self.gate = self.path.gate
        self.audited = stages.audited.around

    # --- what bindings call ------------------------------------------------------------------

    async def initialize(
        self, request: Message, inbound: Inbound, register: Register, *, is_there: bool = False
    ) -> tuple[bytes, ClientConnection | None]:
        """Return the encoded answer to ``initialize``, and the new connection if there is one.

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
        call = self._peers.running(Call(request, inbound))
        try:
            result, peer, upstream_peer = await self._peers.upstream.initialize(
                call, request.params, outbound
            )
        except UpstreamError as failed:
            return inbound.error(request.id, failed.error), None
        finally:
            call.end()
        keeps = is_there or self._replica.store.remembers
        try:
            check_peer(peer, self._replica.policy)
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
        return result_message(request.id, result), connection

    async def request(self, request: Message, inbound: Inbound) -> None:
        stages, call = self._stages_of(request, inbound), Call(request, inbound)
        if not (self._audited.logger.level or metrics.measures):
            await self._through(stages, call)
            return
        try:
            await self._through((self._audited, *stages), call)
        except BaseException as failed:
            if inbound.audit is not None:
                inbound.audit.failed(failed)
            raise

    def _stages_of(self, request: Message, inbound: Inbound) -> Sequence[Stage]:
        path = self.path
        if request.method in method_names.OF_SESSIONS:
            return path.ours
        if path.of_tasks and request.method in method_names.OF_TASKS and inbound.peer.modern:
            return path.of_tasks
        if request.key is not None:
            return path.keyed
        if path.of_hosts:
            return path.of_hosts
        # Malformed metadata names no session here. The first stage refuses it.
        if isinstance(request.session, NotNamed):
            if inbound.connection is None:
                return path.alone
            if inbound.peer.modern:
                return path.outside
            record = inbound.http.record
            if record is not None and record.client.current is None:
                return path.outside
        return path.keyless

    async def _through(
        self, stages: Sequence[Stage], call: Call, *, is_again: bool = False
    ) -> None:
        try:
            try:
                for stage in stages:
                    try:
                        outcome = await stage.before(call)
                    except StoreUnavailable as failed:
                        if stage.may_have_begun(call):
                            raise
                        raise NotBegun(failed) from failed
                    if outcome is not None:
                        if outcome is not ANSWERED:
                            await call.answer(outcome)
                        break
            finally:
                if call.keyed is not None:
                    call.keyed.release()
                if call.work is None:
                    if call.tasking is not None:
                        call.tasking.discard()
                    if call.is_open and not is_again:
                        self._runner.calls.close(call)
                elif call.error is not None:
                    await call.work.abort(call.error)
        except LimitReached as refused:
            self.limits.reached(refused)
            self._tell(call, refused)
            await call.answer(Outcome(None, wire_error(refused)), retry_after=refused.retry_after)
        except WireError as refused:
            self._tell(call, refused)
            await call.answer(Outcome(None, wire_error(refused)))
        except UpstreamError as failed:
            await call.answer(Outcome(None, failed.error))

    def _tell(self, call: Call, refused: WireError) -> None:
        """Note a refusal for the story of the session that the request was admitted to. A limit
        may have refused it before: then for that of the one session that its connection has.
        """
        inbound, why = call.inbound, type(refused).__name__
        record, connection = call.record or inbound.http.record, inbound.connection
        sessions = [record.session_id] if record is not None else []
        if isinstance(refused, LimitReached):
            why = refused.limit
            self._replica.refused.add(
                principal_name(inbound.principal) or inbound.address or "anonymous"
            )
            if record is None and connection is not None and len(connection.attached) == 1:
                sessions = [*connection.attached]
        for session_id in sessions:
            text = f"refused {why} {word_of(call.request.method)}"
            self._replica.stories.count(session_id, text)

    def reported(self, notification: Message, inbound: Inbound) -> Coroutine[Any, Any, None] | None:
        """Pass a report of progress on to the asker of its question; None: it is no such report.

        The result may wait for the client. A binding calls this in addition to
        :meth:`notification`.
        """
        if notification.method != method_names.PROGRESS:
            return None

        async def report() -> None:
            params, principal = notification.params, inbound.principal
            await self._questions.progress(params, principal)

        return report()

    async def notification(
        self, notification: Message, inbound: Inbound
    ) -> Coroutine[Any, Any, None] | None:
        """Take a notification. Its faults are logged: it gets no answer.

        Returns:
            What the wrapped server does with it, which may wait for the client; None:
            nothing. Everything else that it changes is changed by then.
        """
        method = notification.method
        if method == method_names.CANCELLED:
            await self._cancel(notification, inbound)
        call = Call(notification, inbound)
        try:
            for stage in self.path.of_listens:
                await stage.before(call)
        except WireError as refused:
            logger.info("dropped %s: %s", loggable_method(method), refused)
            return None
        peer, running = self._peers.peer_and_call(call)

        async def notify() -> None:
            await peer.notify(running, method, notification.forwarded)
            if inbound.connection is None or inbound.peer.modern:
                await peer.close()

        return notify()

    def answer(self, answer: Answer, inbound: Inbound) -> bool | asyncio.Future[bool]:
        """See :meth:`RemoteQuestions.answer`."""
        share = share_of(inbound.principal, inbound.scope)
        return self._questions.answer(answer, inbound.principal, share)

    async def cancel_keyed(self, notification: Message, inbound: Inbound) -> None:
        """Take a modern-era notification: a cancellation that names session and key, or
        nothing that concerns us.
        """
        if notification.method == method_names.CANCELLED:
            await self._cancel(notification, inbound)

    async def admitted(self, request: Message, inbound: Inbound) -> SessionRecord | None:
        """The session that a listen request names, admitted; None: it names none (rule 1 only).

        Raises:
            WireError: As for any request.
        """
        # Without the stages of a key: it would never be finished, as a listen ends with its
        # connection.
        call = Call(request, inbound)
        for stage in self.path.of_listens:
            await stage.before(call)
        return call.record

    # --- requests ----------------------------------------------------------------------------

    async def _begin_anew(self, call: Call, known_in: SessionId, instead_of: str) -> None:
        """Serve a keyed request whose run in another process never began, and never will.

        Raises:
            StoreUnavailable: It is not begun.
        """
        calls = self._runner.calls
        if calls.draining and not calls.is_served_still(call.inbound):
            await call.answer(Outcome(None, wire_error(OutcomeUnknown())))
            return
        keyed = call.keyed = call.keyed or Keyed()
        keyed.known_in, keyed.instead_of = known_in, instead_of
        stages = self.path.keyed if keyed.of_host is None else self.path.of_hosts
        await self._through(stages[1:], call, is_again=True)

    async def _cancel(self, notification: Message, inbound: Inbound) -> None:
        cancelled = error_body(REQUEST_CANCELLED, "Request cancelled")
        try:
            named, key = notification.named(), notification.keyed()
        except InvalidParams as malformed:
            logger.info("dropped a cancellation: %s", malformed)
            return
        if key is not None and not isinstance(named, NotNamed):
            running = await self._joining.find_running(named, key)
            if running is None:
                await self._cancel_at_replicas(named, key, inbound)
            elif running.record is not None and running.record.principal == inbound.principal:
                await running.abort(cancelled)
        else:
            request_id, connection = notification.cancels, inbound.connection
            if connection is None or request_id is None:
                return
            if not isinstance(named, NotNamed):
                # ASC10: one for a session that is not there has no effect.
                try:
                    await self.admitted(notification, inbound)
                except SessionNotFound as missing:
                    logger.info("dropped a cancellation: %s", missing)
                    return
            meant = self._runner.calls.meant(connection.id, request_id)
            if inbound.http.record is not None:
                # Over HTTP such a request may have come to any replica.
                await self._replica.bus.try_send(
                    CancelRequest(connection_id=connection.id, id=request_id)
                )
            for call in meant:
                await abort(call, cancelled)

    async def _cancel_at_replicas(
        self, session_id: SessionId, key: RequestKey, inbound: Inbound
    ) -> None:
        if not self._replica.bus.is_shared:
            return
        store, now = self._replica.store, self._replica.clock()
        record = await store.load(session_id, now=now)
        if record is not None and record.principal == inbound.principal:
            await self._replica.bus.try_send(CancelKeyed(session_id=session_id, key=key))
