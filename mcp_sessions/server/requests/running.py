from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from opentelemetry.trace import Span

from mcp_sessions import method_names
from mcp_sessions.background import report
from mcp_sessions.core.handles import HANDLE
from mcp_sessions.core.listen_messages import SUBSCRIPTION_ID
from mcp_sessions.core.messages import RequestId, error_body, members_of, wire_error
from mcp_sessions.core.named import LISTS, NAMED
from mcp_sessions.core.nearness import own_connection
from mcp_sessions.core.progress import Progress
from mcp_sessions.core.task import TASK
from mcp_sessions.core.visibility import restored
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    REQUEST_CANCELLED,
    LimitReached,
    OutcomeUnknown,
    SessionsError,
    StoreUnavailable,
)
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.detached import IN_BACKGROUND
from mcp_sessions.server.calls.shares import share_of
from mcp_sessions.server.calls.table import Call, Outcome
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.delivery.broadcaster import ANNOUNCED, Announced
from mcp_sessions.server.delivery.questions import check_may_ask
from mcp_sessions.server.reporting.loggable import loggable_name
from mcp_sessions.server.requests.handle import CURRENT, SessionHandle
from mcp_sessions.server.requests.open_questions import OpenQuestions
from mcp_sessions.server.requests.outcome import store_error
from mcp_sessions.server.requests.reports import Reports
from mcp_sessions.server.requests.running_task import RunningTask, cancel_there
from mcp_sessions.server.requests.shared import Shared
from mcp_sessions.server.requests.tasks import Tasks
from mcp_sessions.server.upstream import port
from mcp_sessions.server.upstream.accepted_questions import INPUT_REQUIRED, asks_of
from mcp_sessions.server.upstream.held_call import HeldCall
from mcp_sessions.server.upstream.port import Outbound, PeerRequest, UpstreamError, UpstreamPeer
from mcp_sessions.server.upstream.request_state import restored_params, set_apart, waiting_call
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_NOT_OF_TASKS = (method_names.PROGRESS, method_names.LOGGED)


class RunningRequest:
    """One running request or notification: the
    :class:`~mcp_sessions.server.upstream.port.UpstreamCall` its handler has.

    Args:
        shared: The values that all requests share.
        call: Its first sending.
        standalone: Makes the way to its client that is left when it was answered.
    """

    def __init__(self, shared: Shared, call: Call, standalone: Callable[[], Outbound]) -> None:
        self._shared = shared
        self._call = call
        self._standalone = standalone
        self.done = False
        self.task: asyncio.Task[None] | None = None
        request, record, conversation = call.request, call.record, call.conversation
        self.request, self.key, self.record = request, call.key, record
        self.handle: SessionHandle | None = call.handle
        self.request_id: RequestId | None = None if request.is_notification else request.id
        self.session_id = record.session_id if record is not None else None
        """The protocol-mode session it belongs to."""

        in_conversation = conversation.record.session_id if conversation is not None else None
        self.conversation_session = in_conversation
        """The session of its conversation, of which its client knows nothing."""

        scope = call.keyed.scope if call.keyed is not None else None
        self.keyed_in = scope.session_id if scope is not None else self.session_id
        """The session in which its key is recorded."""

        connection = call.inbound.connection
        in_transport = connection.transport_session if connection is not None else None
        self.sessions: list[SessionId] = []
        """The sessions, of any mode, that must not expire while it runs."""

        for session_id in (self.session_id, in_transport, self.conversation_session):
            if session_id is not None:
                self.sessions.append(session_id)
        if scope is not None and scope.session_id != in_transport:
            self.sessions.append(scope.session_id)
        self.waiters = [call]
        self.listener = call
        """The newest sending whose client listens. If none does, the newest that did."""

        self.response = call.inbound.channel
        self.get_stream = connection.transport if connection is not None else None
        self.started_at = shared.outcomes.clock()
        self.context: Any = call.inbound.http.request
        self._has_begun = False
        self.store_failure: StoreUnavailable | None = None
        self._questions: OpenQuestions | None = None  # None: it asked nothing.
        self._held: HeldCall | None = None
        """For a client of the 2026 era: the rounds in which its handler asks. None: it did not."""

        self._task: RunningTask | None = None
        """The task that its client has for it. None: its client waits for its answer."""

        self._is_announced = False
        """The answer that it is a task now, or that asks in rounds, is on its way."""

        self._timer: asyncio.TimerHandle | None = None
        """Until it becomes a task."""

        self._reports: Reports | None = None
        self.reported: Progress | None = None  # None: its client got no report of it.

    # --- from its start to its answer --------------------------------------------------------

    def start(self, peer: UpstreamPeer, *, close_peer: bool) -> None:
        """Handle it in a task of its own, and answer its waiters.

        Args:
            peer: Its client, as the wrapped server sees it.
            close_peer: The peer was made for this request alone.
        """
        shared, (waiter,) = self._shared, self.waiters
        shared.calls.begins(self)
        channel = waiter.inbound.channel
        channel.on_closed, channel.on_reopened = lambda: self._closed(waiter), self._reopened
        if shared.loop is None:
            shared.loop = asyncio.get_running_loop()
        work = self._run(peer, close_peer)
        # If Python can, the first step is done at once: a handler that never waits then costs no
        # turn of the event loop. One that is aborted next never begins.
        if sys.version_info >= (3, 12) and waiter.error is None:
            task = asyncio.Task(work, loop=shared.loop, eager_start=True)
        else:
            task = shared.loop.create_task(work)
        if not task.done():
            self.task = task
        # As Background.hold does: this is on the way of each request.
        tasks = shared.background.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if not channel.is_open:
            # It closed while the request was admitted, when nobody listened for that yet.
            self._closed(waiter)

    def _closed(self, waiter: Call) -> None:
        is_expected = not self.done or self._is_announced
        if waiter.inbound.channel.cancels and self.key is None and is_expected:
            # The modern era over HTTP: closing the response stream cancels the request.
            cancelled = error_body(REQUEST_CANCELLED, "Request cancelled")
            self._shared.background.run(IN_BACKGROUND, self.abort(cancelled))
        elif not self.done:
            if not self.is_awaited:
                self._shared.detached.add(self)
            self._find_listener()
            if self._questions is not None:
                self._questions.listening_changed()

    def _reopened(self) -> None:
        self._shared.detached.remove(self)
        self._find_listener()
        if self._questions is not None:
            self._questions.listening_changed()

    def _find_listener(self) -> None:
        listen = (each for each in reversed(self.waiters) if each.inbound.channel.is_open)
        self.listener = next(listen, self.listener)

    def end(self) -> None:
        self.done = True

    def ends_with(self, session_id: SessionId) -> bool:
        """Whether its client loses it with one of :attr:`sessions`. Not with the transport session
        that carried a request of a protocol-mode session, which outlives any connection; and with
        its conversation's its handler loses what it keeps there, and no more.
        """
        connection = self._call.inbound.connection
        in_transport = connection.transport_session if connection is not None else None
        own = self.session_id if self.session_id is not None else in_transport
        return session_id == own

    async def abort(self, error: dict[str, Any]) -> None:
        """Answer with ``error`` now and cancel the handler, however long that takes it."""
        if self.done:
            if self._task is not None:
                self._task.stop(error)
            elif self._is_announced:
                self.stop_handler()
            return
        await self._end(Outcome(None, error))

    @property
    def is_listen(self) -> bool:
        """Whether it is a listen outside of sessions."""
        return self.request.method == method_names.LISTEN

    async def end_listen(self) -> None:
        """Answer a listen with its result. So its client knows that nothing failed."""
        about = {SUBSCRIPTION_ID: self.request.id}
        await self._end(Outcome({"_meta": about, "resultType": "complete"}, None))

    async def _end(self, outcome: Outcome) -> None:
        await self._finish(outcome)
        # A task that is cancelled before its first step would not close its peer.
        if self.task is not None and self._has_begun:
            self.task.cancel()

    async def _run(self, peer: UpstreamPeer, close_peer: bool) -> None:
        try:
            await self.run_handler(peer, close_peer)
        except (Exception, asyncio.CancelledError) as failed:
            # Also after its handler: its client waits, or the client of its rounds or its task.
            error = None if self.done else wire_error(OutcomeUnknown())
            await self._finish(Outcome(None, error))
            if isinstance(failed, Exception):
                report("a request", failed)
            elif error is not None:
                raise

    async def run_handler(self, peer: UpstreamPeer, close_peer: bool) -> None:
        self._has_begun = True
        CURRENT.set(self.handle)
        announced = Announced()
        ANNOUNCED.set(announced)
        request, tasking = self.request, self._call.tasking
        answered: dict[str, Any] | None = None
        result: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        away: StoreUnavailable | None = None
        try:
            if self.done:
                # Cancelled before it began.
                if tasking is not None:
                    tasking.discard()
                return
            if tasking is not None and tasking.after is not None:
                self._may_become_task(tasking.tasks)
            if tasking is not None and tasking.running is not None:
                # If this is cancelled now, its client still gets the answer.
                becoming = self._becomes(tasking.running, tasking.tasks)
                await asyncio.shield(self._shared.background.run(IN_BACKGROUND, becoming))
            # A handler does not get the credential by which its client names the session.
            method, params = request.method, request.forwarded
            rounds = self._shared.questions.rounds if self._call.inbound.peer.modern else None
            while True:
                name = None
                if rounds is not None and params is not None and "requestState" in params:
                    name, params = waiting_call(params), restored_params(params)
                if rounds is not None and name is not None:
                    answered = await rounds.go_on(name, self, self._owner, method, params)
                    answered = self._call.inbound.of_its_era(answered)
                    self.record = await self._shared.outcomes.newest(self.record)
                else:
                    answered = await peer.request(self, method, params)
                    if rounds is not None and method in NAMED and "requestState" in answered:
                        answered = set_apart(answered)
                if self._task is not None and answered.get("resultType") == INPUT_REQUIRED:
                    try:
                        params = await self._task.next_round(answered, request.forwarded)
                    except asyncio.CancelledError:
                        waiting = waiting_call(answered)
                        if rounds is not None and waiting is not None:
                            last = {**(params or {}), "requestState": answered["requestState"]}
                            rounds.cancel(waiting, self, self._owner, method, last)
                        raise
                    continue
                if tasking is not None and answered.get("resultType") == TASK:
                    answered = await self._task_of_server(peer, answered, tasking.tasks)
                break
            if method in LISTS:
                self._shared.names.served(method, None, answered)
            result = answered
            if self._call.stages and self._is_expected:
                result, error, _ = self._after(Outcome(answered, None))
        except UpstreamError as failed:
            error = failed.error
            if answered is not None and members_of(error.get("data")).get("started") is False:
                # What was asked next did not start. The call did.
                error = wire_error(OutcomeUnknown())
            if self._call.stages and self._is_expected:
                result, error, _ = self._after(Outcome(None, error))
            if isinstance(failed, port.StoreFailedHandler):
                logger.error("the session store failed %s: %s", request.method, failed.failed)
                error = error if self.key is None else wire_error(OutcomeUnknown())
        except StoreUnavailable as failed:
            # The layer serves this method itself, or its server did not get it. A key is used up,
            # and what was answered has begun. Else it may be asked again.
            logger.error("what %s changed may be lost: %s", request.method, failed)
            away = failed if self.key is None and answered is None else None
            error = store_error(failed) if away is not None else wire_error(OutcomeUnknown())
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # The boundary to the wrapped server: its client is answered, whatever that raises.
            logger.exception("%s failed inside the wrapped server", request.method)
            error = error_body(INTERNAL_ERROR, "Internal error")
        finally:
            if close_peer:
                await peer.close()
        if result is not None and self.handle is not None and self.handle.has_state:
            try:
                stored = await self.handle.store_state()
                if self.record is not None and stored is not None:
                    self.record = stored
                    if isinstance(newest := self._newest, RunningRequest):
                        newest._describes(stored)
            except StoreUnavailable as failed:
                # Its handler is done, and whether its state is stored nobody knows (KEY11).
                logger.error("a change of session.state may be lost: %s", failed)
                result, error = None, wire_error(OutcomeUnknown())
            except (SessionsError, TypeError) as failed:
                logger.error("a change of session.state was not stored: %s", failed)
                result, error = None, error_body(INTERNAL_ERROR, "Internal error")
        if announced.waiting is not None:
            await announced.settled()
        await self._finish(Outcome(result, error, away))
        # The task's context knows this request: with its answer it would wait for the collector.
        self.task = None

    async def _finish(self, outcome: Outcome, *, continues: bool = False) -> None:
        """Answer its waiters.

        Args:
            continues: Its handler runs on, and asks by the answer.
        """
        held = self._held
        if self.done:
            if held is not None:
                held.ends(outcome.result, outcome.error)
            self._end_task(outcome.result, outcome.error)
            return
        self.done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if held is not None and not continues:
            held.ends(outcome.result, outcome.error)
        shared, outcomes = self._shared, self._shared.outcomes
        # Idle time counts from the end of the last request (SES14). Admission moved the deadline
        # already; a store is written again only if that was a while ago.
        is_long = outcomes.clock() - self.started_at > outcomes.policy.idle_timeout / 100
        if self in shared.detached.runs:
            shared.detached.remove(self)
        if self._questions is not None:
            self._questions.end()
        try:
            if self.key is not None and self.keyed_in is not None:
                await outcomes.keep(self.keyed_in, self.key, outcome, self.request.method)
            if is_long or self.keyed_in != self.session_id:
                await outcomes.touch(self.sessions)
        except StoreUnavailable as failed:
            # The handler ran: whoever still listens gets the answer.
            logger.warning(
                "%s ended, but the deadline of its session was not moved: %s",
                self.request.method,
                failed,
            )
        finally:
            # Until here the same request, sent again, could join: the store did not know better.
            shared.calls.end(self, runs_on=self._task is not None)
        if self._questions is not None:
            # Questions and withdrawals are sent first: nothing follows the answer.
            await self._questions.sent(outcomes.policy.slow_timeout)
            self._questions = None  # It knows this request, which would wait for the collector.
        if self._reports is not None:
            # Its handler may end while who sent it again gets what was reported before (KEY21).
            await self._reports.repeated()
        is_shared = self.waiters[0] is not self.waiters[-1]
        finish = self._for_sender if is_shared or self.record is not None else None
        for waiter in self.waiters:
            try:
                await waiter.answer(outcome, finish=finish)
            except StoreUnavailable as failed:
                # It was answered; what the store keeps of its stream is looked after there. The
                # other senders get the answer all the same (KEY5).
                logger.error("the end of a response stream was not stored: %s", failed)

    def _for_sender(self, waiter: Call, result: dict[str, Any]) -> dict[str, Any]:
        if self.record is not None and waiter.named:
            result = self._shared.outcomes.stamp(result, self.record)
        # The request was made for another sender, or is answered for one.
        return waiter.inbound.of_its_era(result) if len(self.waiters) > 1 else result

    # --- as a task -----------------------------------------------------------------------------

    def _may_become_task(self, tasks: Tasks) -> None:
        def try_it() -> None:
            self._shared.background.run(IN_BACKGROUND, self._become_task(tasks))

        self._timer = asyncio.get_running_loop().call_later(tasks.policy.after, try_it)

    async def _become_task(self, tasks: Tasks) -> None:
        inbound = self._call.inbound
        if not self._can_become_task:
            return
        try:
            task = await tasks.create(inbound, self.record, lambda: self._can_become_task)
        except (LimitReached, StoreUnavailable) as failed:
            logger.warning("a call became no task: %s", failed)
        else:
            await self._becomes(task, tasks)

    @property
    def _can_become_task(self) -> bool:
        # With its answer, a client without tasks could not answer an open question any more. A call
        # that asks in rounds is about to be answered with its question.
        return not self.done and self._questions is None and self._held is None

    async def _becomes(self, task: RunningTask, tasks: Tasks) -> None:
        """Answer its client with a task, and run on."""
        if not self._can_become_task:
            tasks.discard(task)
            return
        self._task = task
        task.runs(self)
        created = task.created
        if self._call.tasking is not None and self._call.tasking.is_told:
            created = self._call.inbound.of_its_era(task.told)
        await self._announce(self._after(Outcome(created, None)))

    async def _announce(self, outcome: Outcome) -> None:
        """Answer its client, and run on."""
        self._is_announced = True
        try:
            await self._finish(outcome, continues=True)
        finally:
            self._is_announced = False

    async def _task_of_server(
        self, peer: UpstreamPeer, created: dict[str, Any], tasks: Tasks
    ) -> dict[str, Any]:
        """Its server answered with a task of its own. Return what its client gets."""
        ask, params = partial(peer.request, self), self.request.forwarded
        if self._task is not None:
            return await self._task.follow(created, params, ask)
        inbound = self._call.inbound
        try:
            await tasks.note_of_server(created, inbound.principal, inbound.scope)
        except (LimitReached, StoreUnavailable) as failed:
            # It has begun, so this is neither the error of a limit nor of a store (ERR6, ERR17).
            logger.error("a task of the server's own is cancelled, and not noted: %s", failed)
            await cancel_there(created, params, ask)
            raise UpstreamError(wire_error(OutcomeUnknown())) from failed
        return created

    def _end_task(self, result: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        if self._task is not None:
            self._shared.calls.handled(self)
            self._task.ends(result, error)

    def stop_handler(self) -> object:
        return self.task and self.task.cancel()

    @property
    def _is_expected(self) -> bool:
        """Whether its client still gets the outcome, as an answer or as that of its task."""
        return not self.done or self._task is not None

    def _after(self, outcome: Outcome) -> Outcome:
        try:
            for stage in reversed(self._call.stages):
                outcome = stage.after(self._call, outcome)
        except Exception:
            # The boundary to a feature: its client is answered.
            logger.exception("the outcome of %s could not be changed", self.request.method)
            return Outcome(None, error_body(INTERNAL_ERROR, "Internal error"))
        return outcome

    async def _ask_in_rounds(self, asked: PeerRequest, inbound: Inbound) -> dict[str, Any]:
        if self._held is None:
            rounds = self._shared.questions.rounds
            asks = asks_of(inbound.peer.capabilities)
            if rounds is None or self.done:
                raise port.NotAskable(asked.method)
            way = self._owner, asks, self.request, self._asks, self.stop_handler
            self._held = rounds.begin(self, asked, *way)
        return await self._held.ask(asked)

    async def _asks(self, result: dict[str, Any]) -> None:
        await self._announce(self._after(Outcome(result, None)))

    def _describes(self, record: SessionRecord) -> None:
        self.record = record

    @property
    def _owner(self) -> Hashable:
        return self.conversation_session or self.session_id or self.principal

    @property
    def _newest(self) -> port.UpstreamCall | None:
        """The request that brought the last answers to its handler. None: itself."""
        newest = self._held.call.newest if self._held is not None and self.done else None
        return newest if newest is not self else None

    # --- what its handler has ------------------------------------------------------------------

    @property
    def name_for_log(self) -> str | None:
        """What it names, if the server has listed that."""
        name = loggable_name(self.request.params)
        return self._shared.names.name(self.request.method, name) if name is not None else None

    @property
    def principal(self) -> Principal:
        return self.listener.inbound.principal

    @property
    def client(self) -> Hashable:
        inbound = self._call.inbound
        if inbound.connection is not None:
            return inbound.connection
        return own_connection(inbound.scope) if inbound.scope is not None else None

    @property
    def share(self) -> Hashable:
        return share_of(self.principal, self._call.inbound.scope)

    @property
    def transport(self) -> str:
        return self.listener.inbound.transport

    @property
    def session(self) -> str | None:
        return self.handle.digest if self.handle is not None else None

    @property
    def conversation(self) -> str | None:
        key = self.waiters[0].inbound.conversation
        # No host calls it by a handle, which the server made and only its model knows.
        return key.text if key is not None and key.source != HANDLE else None

    def is_traced(self, span: Span) -> None:
        audit = self.waiters[0].inbound.audit
        if audit is not None:
            audit.trace(span)

    def store_failed(self, failed: StoreUnavailable) -> None:
        self.store_failure = failed

    @property
    def can_send_request(self) -> bool:
        inbound = self.listener.inbound
        if self._task is not None:
            return self._task.may_ask
        if inbound.peer.modern:
            if self._held is not None:
                return self._held.call.can_send_request
            can_wait = self._shared.questions.rounds is not None and not self.done
            return can_wait and bool(inbound.peer.capabilities) and self.request.method in NAMED
        return not self.done and inbound.asked is not None

    def is_awaited_by(self, call: Call) -> bool:
        return not self.done and call.inbound.channel.is_open

    @property
    def is_awaited(self) -> bool:
        return any(waiter.inbound.channel.is_open for waiter in self.waiters)

    @property
    def reach(self) -> int:
        if self._held is not None and self._held.name is not None:
            return port.LEFT
        if self._newest is not None:
            return self._newest.reach
        # The client of a task looks at it now and then.
        return port.LISTENS if self._task is None and self.is_awaited else port.AWAY

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        if method == method_names.PROGRESS and params is not None and self._is_own(params):
            # A repetition has a token of its own, and gets what was reported before (KEY21).
            await self.report({name: params[name] for name in params if name != "progressToken"})
            return
        if self._call.instead:
            params = restored(params, self._call.instead)
        held = self._held
        if held is not None and method == method_names.LOGGED and held.keeps(method, params):
            return
        if held is not None and (newest := self._newest) is not None:
            await newest.notify(method, params)
        elif self._task is not None and method in _NOT_OF_TASKS:
            # A task has no progress and no log messages: a part of its status is for people.
            return
        elif not self.done:
            inbound = self.listener.inbound
            await inbound.channel.emit(inbound.notification(method, params))
        elif method not in (method_names.PROGRESS, method_names.CANCELLED):
            # The request's way back is gone with its answer. Messages that are not for this
            # request alone still reach the client.
            await self._standalone().notify(method, params)

    def _is_own(self, params: Mapping[str, Any]) -> bool:
        """Whether a handler's notification is this request's progress: FastMCP sends it so."""
        token = params.get("progressToken")
        return token is not None and token == self.request.token

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        reported = (("progress", progress), ("total", total), ("message", message))
        await self.report({name: value for name, value in reported if value is not None})

    async def report(self, params: Mapping[str, Any]) -> None:
        if self._held is not None and self._held.keeps(method_names.PROGRESS, params):
            return None
        if self._held is not None and (newest := self._newest) is not None:
            return await newest.report(params)
        if self._task is not None:
            message: object = params.get("message")
            return self._task.says(message) if isinstance(message, str) else None
        if self.key is not None:
            self._reports = self._reports or Reports()
            if not self._reports.add(params):
                await self._reports.repeated()
                return
        if not self.done:
            await self._report_to(self.listener, params)

    async def _report_to(self, waiter: Call, params: Mapping[str, Any]) -> None:
        token = waiter.request.token
        if token is None:
            return
        if self._call.instead:
            params = restored(params, self._call.instead)
        self.reported = self.reported or Progress()
        inbound = self.listener.inbound
        params = self.reported.reported({"progressToken": token, **params})
        await inbound.channel.emit(inbound.notification(method_names.PROGRESS, params))

    async def still_runs(self, token: RequestId) -> None:
        if not self.done:
            self.reported = self.reported or Progress()
            params = {"progressToken": token, **self.reported.still()}
            inbound = self.listener.inbound
            # In a stream's log it replaces the one before it.
            await inbound.channel.emit(inbound.notification(method_names.PROGRESS, params), "still")

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        inbound = self.listener.inbound
        if self._task is not None:
            return await self._task.ask(asked)
        if inbound.peer.modern:
            return await self._ask_in_rounds(asked, inbound)
        check_may_ask(inbound.asked, asked.method)
        about = [call.questions for call in asked.about if isinstance(call, RunningRequest)]
        asked.may_move |= len(about) < len(asked.about)
        return await self.questions.ask(asked, about)

    async def join(self, waiter: Call) -> None:
        """Add a repeated request: from now on it gets progress and questions, and both get the
        answer.
        """
        waiter.begins(self)
        channel = waiter.inbound.channel
        channel.on_closed, channel.on_reopened = lambda: self._closed(waiter), self._reopened
        self._shared.detached.remove(self)
        self.waiters.append(waiter)
        self.listener = waiter
        connection = waiter.inbound.connection
        self.response = waiter.inbound.channel
        self.get_stream = connection.transport if connection is not None else None
        if self._reports is not None:
            self.reported = None  # Values rise from the first report again.
            await self._reports.repeat(partial(self._report_to, waiter))
        if self._questions is not None:
            await self._questions.ask_again()

    @property
    def questions(self) -> OpenQuestions:
        """Its questions to clients of the handshake era."""
        if self._questions is None:
            self._questions = OpenQuestions(self, self._shared)
        return self._questions
