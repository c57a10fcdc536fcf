"""The resuming client: an application's messages on one side, links on the other.

Every message comes and goes here, and is given to the part that knows what it means: `sending`
sends what the application says; `listening` keeps the modern era's event stream; `connection_loss`
gets to a session that works, by `control`. Their facts are in `state` (the phase and the links),
`sessions` (the server and the table of sessions) and `application`. Each is its own only writer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import anyio
import anyio.to_thread

from mcp_sessions import method_names, metrics
from mcp_sessions.client import messages, reports
from mcp_sessions.client.application import Application, Callbacks, everything
from mcp_sessions.client.connection_loss import Recovery, Way
from mcp_sessions.client.control import Connector, SessionControl
from mcp_sessions.client.dialer import (
    Accepted,
    AnswerTooLarge,
    Dialer,
    Down,
    Event,
    Failure,
    Link,
    Missed,
    Received,
    StreamBroke,
    StreamFailed,
    StreamReopened,
    StreamUnsure,
    Unanswered,
)
from mcp_sessions.client.jar import JarSlot, OpenCall, SavedSession
from mcp_sessions.client.listening import Listener
from mcp_sessions.client.reports import KnownSession, ResumeOutcome
from mcp_sessions.client.requests import Exchanges, PendingRequest
from mcp_sessions.client.sending import Sender
from mcp_sessions.client.sessions import KnownServer, session_named
from mcp_sessions.client.state import Addresses, ClientState, LinkChange, Phase, Runtime
from mcp_sessions.core.messages import SESSION_META, Json, RequestId, members_of, meta_of
from mcp_sessions.core.resume import event_id_of, is_session_id
from mcp_sessions.errors import INTERNAL_ERROR, SESSION_DETACHED, SESSION_NOT_FOUND

logger = logging.getLogger(__name__)

_LAST_ANSWERS = 2.0
"""Seconds for the answers of what ran in a session that the application ended."""


class ResumingClient:
    """One application's session with one server.

    Args:
        slot: Keeps the session between runs; None: it ends with the client.
    """

    def __init__(
        self,
        dialers: Sequence[Dialer],
        runtime: Runtime,
        callbacks: Callbacks,
        *,
        slot: JarSlot | None = None,
    ) -> None:
        policy = runtime.policy
        base, cap = policy.backoff_base, policy.backoff_cap
        addresses = Addresses(dialers, base=base, cap=cap, longest_rest=policy.give_up_after)
        self._runtime = runtime
        self._exchanges = exchanges = Exchanges(timeout=policy.connect_timeout)
        self._peer = peer = KnownServer(instance=runtime.mint_key())
        self._state = state = ClientState(runtime, addresses)
        self._app = app = Application(callbacks, runtime)
        connector = Connector(runtime, peer, self._on_event)
        self._control = control = SessionControl(runtime, state, peer, app, exchanges, connector)
        self._recovery = recovery = Recovery(
            runtime, state, peer, app, control, connector, self._on_ready, self._send
        )
        restart = partial(recovery.begin, Way.RESTART)
        self._listener = listener = Listener(
            runtime, state, peer, app, control, recovery.lose, restart
        )
        self._sender = Sender(runtime, state, peer, app, control, recovery, listener)
        self._slot = slot
        self._jar_content: SavedSession | None = None
        self._saving = anyio.Lock()

    async def _on_ready(self, link: Link) -> None:
        await self._recovery.catch_up(link)
        await self._sender.flush(link)

    async def _send(self, pending: PendingRequest) -> None:
        await self._sender.request(pending)

    # --- lifetime ----------------------------------------------------------------------------

    async def start(self) -> None:
        if self._slot is not None:
            saved = await anyio.to_thread.run_sync(self._slot.load)
            if saved is not None:
                self._peer.restore(saved)
                self._jar_content = saved
        metrics.look_for_provider()
        self._runtime.tasks.start_soon(self._keep_house)

    async def close(self) -> None:
        """Close for the application: a jar keeps the session, otherwise it ends."""
        link, limit = self._state.link, self._runtime.policy.closing_timeout
        await self._control.drop_pushed()
        if link is not None:
            if self._slot is None and self._state.phase is Phase.READY:
                with anyio.move_on_after(limit):
                    await self._control.end(link, within=limit)
            await link.close(leave=True)
        if self._slot is not None:
            await self._save()
            await anyio.to_thread.run_sync(self._slot.close)
        self._peer.sessions.closed()
        self._state.apply(LinkChange.END)

    async def _keep_house(self) -> None:
        policy = self._runtime.policy
        while True:
            await self._runtime.sleep(policy.jar_interval)
            await self._save()
            oldest = self._runtime.clock() - policy.answer_timeout
            for pending in self._app.requests:
                if pending.asked_at < oldest and not self._app.listens.has(pending):
                    text = f"no answer came within {policy.answer_timeout:g} s (answer_timeout)"
                    where = self._state.addresses.current.target
                    await self._app.give_up_on(pending, f"{where}: {text}")

    async def _save(self) -> None:
        if self._slot is None:
            return
        async with self._saving:
            content = self._peer.saved()
            if content == self._jar_content:
                return
            try:
                await anyio.to_thread.run_sync(self._slot.save, content)
                self._jar_content = content
            except OSError as error:
                logger.warning("the jar could not be written: %s", error.strerror)

    async def move_to(self, dialer: Dialer) -> ResumeOutcome:
        return await self._recovery.move_to(dialer)

    @property
    def session(self) -> KnownSession | None:
        return self._peer.known_session()

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        session = self._peer.session
        return session.open_calls.all() if session is not None else ()

    # --- what is open ------------------------------------------------------------------------

    @property
    def why_ended(self) -> str | None:
        """Why this client ended the connection, and what to do; None: the server ended it."""
        return self._app.why_ended

    async def until_answered(self, request_id: RequestId) -> None:
        pending = self._app.requests.asked(request_id)
        if pending is not None:
            await pending.settled.wait()

    def may_run_again(self, message: Json, runs: int) -> bool:
        """See :meth:`Application.may_run_again`. A host that manages its sessions decides that by
        itself.
        """
        return not self._peer.sessions.is_manager and self._app.may_run_again(message, runs)

    def waiting(self) -> list[PendingRequest]:
        return [p for p in self._app.requests if p.method != method_names.LISTEN]

    def questions(self) -> list[RequestId]:
        return self._app.questions.unanswered()

    async def give_up(self, why: str) -> None:
        """Answer all open requests. A loss that lasts says more than ``why``."""
        cause = "" if self._app.loss else f"{self._state.addresses.current.target}: {why}"
        for pending in self.waiting():
            await self._app.give_up_on(pending, cause)

    # --- from the application ------------------------------------------------------------------

    async def take(self, message: Json, headers: Mapping[str, str]) -> None:
        if "method" not in message:
            question_id = cast(RequestId, message.get("id"))
            if self._app.questions.answered(question_id, message):
                await self._sender.answer(question_id, message)
        elif "id" in message:
            await self._take_request(message, headers)
        elif message["method"] == method_names.CANCELLED:
            await self._sender.cancel(message, headers)
        else:
            await self._sender.notification(message, headers)
            if message["method"] == method_names.INITIALIZED:
                self._initialized()

    async def _take_request(self, message: Json, headers: Mapping[str, str]) -> None:
        state, peer = self._state, self._peer
        if self._app.requests.asked(message["id"]) is not None:
            # REQ2: the first goes on.
            await self._app.deliver(messages.duplicate_id(message["id"]))
            return
        pending = self._app.asks(peer.asked(message), headers, now=self._runtime.clock())
        self._recovery.hurry()
        if state.phase is Phase.FRESH and not await self._recovery.open_for(pending):
            return
        if state.phase is Phase.OPEN and self._is_first(pending):
            # It shall have a session.
            self._recovery.begin(Way.SETTLE)
        if state.phase is Phase.CUT_OFF:
            # Somebody asks: that is worth another try.
            peer.lives.used()
            self._recovery.begin(Way.RECOVER)
        if state.phase is Phase.ENDED:
            why = reports.taken_over(state.addresses.current.target)
            text = f"Session detached: {reports.what(message)} was not sent: {why}."
            await self._app.answer(pending, SESSION_DETACHED, text)
        elif state.phase in (Phase.OPEN, Phase.READY):
            await self._sender.request_or_give_up(pending)

    def _initialized(self) -> None:
        state = self._state
        if state.phase is Phase.OPEN:
            self._recovery.begin(Way.SETTLE)
        elif state.phase is Phase.READY and state.link is not None:
            state.link.configure(self._peer.settings())
            state.link.listen()

    def _is_first(self, pending: PendingRequest) -> bool:
        peer = self._peer
        if peer.initialize is None and peer.sessions.is_used:
            return True
        return peer.is_modern and pending.method != method_names.DISCOVER

    # --- from the server -----------------------------------------------------------------------

    async def _on_event(self, link: Link, event: Event) -> None:
        state, app = self._state, self._app
        match event:
            case Received(message):
                await self._received(link, message)
            case Accepted(request_id):
                pending = app.requests.find(request_id)
                if pending is not None:
                    pending.accepted()
            case Unanswered(request_id, failure):
                await self._unanswered(link, request_id, failure)
            case AnswerTooLarge(question_id):
                if link is state.link:
                    text = "an answer is too large for the server"
                    logger.warning("%s: %s", link.name, text)
                    refused = messages.error_answer(question_id, INTERNAL_ERROR, text)
                    app.questions.answered(question_id, refused)
            case StreamReopened(continued, was_lost):
                if not continued:
                    self._recovery.stream_reopened(link)
                    return
                self._recovery.stream_works()
                if was_lost and state.is_ready_on(link):
                    await app.report_outcome(ResumeOutcome(True, connected_to=link.name))
            case StreamUnsure():
                self._recovery.stream_unsure(link)
            case StreamBroke(failure):
                if state.is_ready_on(link):
                    # Most often it is open again soon: nothing else of the link need be lost.
                    app.lost(link.name, failure)
            case StreamFailed(failure):
                self._recovery.lose(link, failure)
            case Missed():
                if link is state.link and state.phase is not Phase.ENDED:
                    # As after a gap: it does not come again in any other way.
                    await self._control.report_everything_changed()
                    missed = ResumeOutcome(False, reason="too_large", connected_to=link.name)
                    await app.report_outcome(missed)
            case Down(failure):
                self._exchanges.down(link, failure)
                for pending in await self._recovery.down(link, failure):
                    await self._sender.orphaned(pending)

    async def _unanswered(self, link: Link, request_id: RequestId, failure: Failure) -> None:
        if self._exchanges.failed(request_id, failure):
            return
        if request_id == self._app.listens.wire_id:
            await self._listener.cut(failure)
            return
        pending = self._app.requests.find(request_id)
        if pending is None or not self._recovery.first_failed(link, pending, failure):
            await self._sender.unanswered(link, request_id, failure)

    async def _received(self, link: Link, message: Json) -> None:
        if "method" not in message:
            failure = messages.away(members_of(message.get("error")))
            if failure is not None:
                await self._unanswered(link, message["id"], failure)
            else:
                await self._answer(link, message)
        elif "id" in message:
            is_new, answer = self._app.questions.asked(message["id"])
            if is_new:
                await self._app.deliver(message)
            elif answer is not None:
                # ASK5: it came again, the answer was lost on its way.
                self._runtime.tasks.start_soon(self._sender.answer, message["id"], answer)
        else:
            await self._notification(link, message)

    async def _notification(self, link: Link, message: Json) -> None:
        app = self._app
        params = cast("Json | None", message.get("params"))
        method, session = message["method"], self._peer.session
        match method:
            case method_names.DETACHED:
                await self._recovery.detached(link, params or {})
                return
            case method_names.CANCELLED:
                app.questions.withdrawn((params or {}).get("requestId"))
            case method_names.PROGRESS:
                pending = app.requests.reporting((params or {}).get("progressToken"))
                if pending is not None:
                    pending.accepted()
                    if not pending.reported(params or {}):
                        return
            case method_names.ACKNOWLEDGED:
                if await self._took_acknowledgement(message):
                    return
            case _:
                pass
        if await self._took_event(link, message):
            return
        if session is None:
            await app.deliver(message)
            return
        event_id = event_id_of(params, session.session_id)
        if event_id is not None or not self._peer.sessions.is_used:
            message = messages.without_session(message)
        if event_id is not None:
            if not session.follower.admits(event_id):
                # CLI3: it was seen.
                return
            self._state.progressed()
            self._recovery.stream_works()
            if self._peer.sessions.has_attached and method != method_names.RESOURCE_UPDATED:
                # EVT11: a session of the application tells it.
                return
        if not (self._peer.is_modern and app.listens):
            await app.deliver(message)
        elif app.listens.is_acknowledgement(message):
            self._state.progressed()
            for part in app.listens.acknowledged(params):
                await app.deliver(part)
        elif event_id is not None or messages.SUBSCRIPTION_ID in meta_of(params):
            for part in app.listens.parts(message):
                await app.deliver(part)
        else:
            await app.deliver(message)

    # --- from the server, in a session of the application --------------------------------------

    async def _took_event(self, link: Link, message: Json) -> bool:
        sessions = self._peer.sessions
        if not sessions.is_used:
            return False
        params = cast("Json | None", message.get("params"))
        named = members_of(meta_of(params).get(SESSION_META)).get("sessionId")
        own = sessions.own
        if not is_session_id(named):
            has_id = "sessionEventId" in (params or {})
            named = sessions.current if has_id and own is None else None
        if named is None and link is self._state.pushed:
            # The application has no such connection that could learn of it (EVT11).
            return True
        if named is None or (own is not None and named == own.session_id):
            return False
        if link.kind == "http":
            # The answer that comes first may be on its way (RES6, RES7).
            await sessions.until_taken(named)
        held = sessions.hosted(named)
        if held is not None and (link.kind == "http" or not self._exchanges.waits_for(link)):
            # On one connection the answer cannot be read while an event before it waits.
            await held.until_decided()
        if sessions.has_ended(named) or (held is not None and held.is_withheld):
            return True
        event_id = event_id_of(params, named)
        if event_id is not None:
            # ATT3: a session that a request named may be attached here.
            held = held or sessions.follow(named, None)
            held.came()
            if not held.follower.admits(event_id):
                return True
        await self._app.deliver(self._as_listened(message, named))
        return True

    def _as_listened(self, message: Json, session_id: str | None = None) -> Json:
        """An event with the id that the application knows its listen stream by (WSS12)."""
        params = cast("Json | None", message.get("params"))
        wire_id = meta_of(params).get(messages.SUBSCRIPTION_ID)
        pending = self._app.requests.find(wire_id) if isinstance(wire_id, (str, int)) else None
        if pending is None and session_id is not None:
            # A replay may come before its stream is open again on the wire.
            pending = self._app.requests.listen_of(session_id, is_open=True)
        if pending is None or pending.app_id == wire_id:
            return message
        return messages.listened(message, pending.app_id)

    async def _took_acknowledgement(self, message: Json) -> bool:
        """Pass on that a listen stream of the application is open: once, however often it was
        opened on the wire. False: it is none of those.
        """
        params = cast("Json | None", message.get("params"))
        wire_id = meta_of(params).get(messages.SUBSCRIPTION_ID)
        pending = self._app.requests.find(wire_id) if isinstance(wire_id, (str, int)) else None
        if pending is None or not pending.is_hosts:
            return False
        was_open, pending.is_acknowledged = pending.is_acknowledged, True
        if not was_open:
            await self._app.deliver(self._as_listened(message))
        elif pending.session_id is None:
            # Nobody kept what it missed.
            for change in everything(members_of((params or {}).get("notifications"))):
                await self._app.deliver(messages.listened(change, pending.app_id))
        return True

    async def _until_last(self, ending: PendingRequest) -> None:
        """Return when all that ran in a session that ended has its answer (END4), or it takes
        too long.
        """
        ended = session_named(ending.message) or messages.session_asked(ending.message)
        with anyio.move_on_after(_LAST_ANSWERS):
            for pending in self._app.requests:
                if pending.session_id == ended and pending is not ending:
                    await pending.settled.wait()

    # --- answers of the server -----------------------------------------------------------------

    async def _answer(self, link: Link, message: Json) -> None:
        app, peer = self._app, self._peer
        if self._exchanges.answered(message):
            self._recovery.was_answered()
            return
        wire_id = cast(RequestId, message.get("id"))
        if app.listens.wire_id is not None and wire_id == app.listens.wire_id:
            await self._listener.ended(message)
            return
        pending = app.requests.find(wire_id)
        if pending is None:
            logger.debug("dropped an answer that nobody waits for")
            return
        result = cast("Json | None", message.get("result"))
        error = cast("Json", message.get("error") or {})
        if await self._sender.without_room(pending, error):
            return
        if pending.is_hosts:
            peer.sessions.answered(pending, result, error)
            if pending.method in method_names.OPENING and result is not None:
                peer.learn(result)
            if result is not None and pending.session_id is None and peer.session is None:
                peer.note_subscription(pending.message)
            if pending.is_named_here:
                message = messages.without_session(message)
            if link is self._state.pushed and messages.envelope_of(pending.message) is not None:
                message = messages.as_modern(message)
            if link.kind == "http" and pending.method in messages.ENDS_SESSION:
                # On the application's one connection nothing follows it (END4).
                await self._until_last(pending)
        elif pending.session_id is not None:
            if error.get("code") == SESSION_NOT_FOUND:
                await self._sender.session_refused(pending, error)
                return
            elif messages.says_state_refused(error):
                if await self._sender.state_refused(pending):
                    return
            elif result is not None:
                if peer.session is not None:
                    # STT1, CLI7
                    peer.session.merge(result)
                peer.lives.used()
                peer.note_subscription(pending.message)
        elif result is not None and pending.method in method_names.OPENING:
            peer.learn(result)
        elif result is not None and peer.session is None:
            peer.lives.used()
        self._state.progressed()
        if result is not None and pending.method == method_names.LIST_TOOLS:
            app.learn_tools(result)
        if messages.says_unknown(error) and app.begins_anew(pending):
            await self._sender.orphaned(pending)
            return
        if not pending.is_hosts and messages.says_unknown(error):
            # ERR7: the wire says no more. The application knows the request by its name. Only a
            # host that manages its sessions gets each answer as the server gave it.
            text = reports.may_have_run(pending.message, f"{link.name}: {reports.RESTARTED}")
            message = {**message, "error": {**error, "message": text}}
        if pending.session_id is not None and not pending.is_hosts:
            message = messages.without_session(message)
            session = peer.session
            if session is not None and session.open_calls.answered(pending.message, result):
                # The process may be killed while its user thinks.
                await self._save()
        app.protocol_version = peer.headers().get("mcp-protocol-version")
        await app.conclude(pending, message, link)
        self._sender.listen_ended(pending)
