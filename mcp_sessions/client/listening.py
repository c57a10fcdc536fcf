"""Keeps the session's one listen stream open, for what the application listens to.

In the modern era events come on a ``subscriptions/listen`` that names the session. It is
opened when the application opens its first one, again when it asks for more, and again when
it was cut: then ``session/resume`` goes before it and says where the new one begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client import messages
from mcp_sessions.client.application import Application
from mcp_sessions.client.control import Hopeless, SessionControl
from mcp_sessions.client.dialer import Failed, Failure, Link
from mcp_sessions.client.requests import PendingRequest, RequestRefused
from mcp_sessions.client.sessions import KnownServer
from mcp_sessions.client.state import ClientState, Phase, Runtime
from mcp_sessions.core.messages import Json, error_body, members_of
from mcp_sessions.core.resume import FailureCause, is_away
from mcp_sessions.errors import INVALID_REQUEST, SESSION_NOT_FOUND

logger = logging.getLogger(__name__)

_TOO_LARGE = 413
"""The status of a request that is more than the server takes."""

_REFUSED = (401, 403)
"""Those of a credential that is not accepted."""


@dataclass(slots=True, eq=False)
class Listener:
    """The session's listen stream.

    Args:
        lose: Called when the link of the stream is lost.
        restart: Called when the session is gone.
    """

    _runtime: Runtime
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _control: SessionControl
    _lose: Callable[[Link, Failure], None]
    _restart: Callable[[], None]
    _is_at_it: bool = False
    _sent_state: str | None = None
    """The ``state`` that the stream on the wire was asked for with."""

    def add(self, pending: PendingRequest) -> None:
        self._app.listens.add(pending)
        self.see_to_it()

    def see_to_it(self, *, delayed: bool = False) -> None:
        if not self._is_at_it:
            self._is_at_it = True
            self._runtime.tasks.start_soon(self._listen, delayed)

    async def _listen(self, delayed: bool) -> None:
        runtime, listens = self._runtime, self._app.listens
        try:
            if delayed:
                await runtime.back_off()
            while listens and not listens.is_covered():
                link = self._link()
                if link is None:
                    # The stream is opened once the client is ready.
                    return
                try:
                    await self._listen_on(link)
                except Hopeless:
                    return
                except (Failed, RequestRefused) as error:
                    logger.info("listening failed: %s", error)
                    listens.cut()
                    if self._peer.session is None:
                        return
                    failure = error.failure if isinstance(error, Failed) else None
                    if failure is not None and is_away(failure.cause, failure.status):
                        self._lose(link, failure)
                        return
                    await runtime.back_off()
        finally:
            self._is_at_it = False
        for part in listens.not_yet_acknowledged():
            await self._app.deliver(part)

    def _link(self) -> Link | None:
        is_ready = self._state.phase is Phase.READY and self._peer.session is not None
        return self._state.link if is_ready else None

    async def _listen_on(self, link: Link) -> None:
        peer, listens = self._peer, self._app.listens
        if listens.wire_id is not None:
            # Our own resume would take the session from it, and it would say so.
            if not listens.is_answered:
                self._control.gave_up_on_attempt(
                    Failure(FailureCause.CLOSED, "the client opened it again")
                )
            link.abandon(listens.wire_id)
            listens.cut()
        if peer.session is not None and peer.session.resumes_before_listening:
            outcome = await self._control.attach(link)
            if not outcome.recovered:
                await self._control.report_everything_changed()
            await self._app.report_outcome(outcome)
        session = peer.session
        if session is None or not listens or self._state.link is not link:
            return
        session.note_listen()
        self._sent_state = session.state
        message = messages.naming(listens.next_request(), peer.attempts.instance)
        headers = {**listens.headers(), **messages.session_headers(session.session_id)}
        if peer.modern_envelope is not None:
            headers = {**messages.modern_headers(message, peer.modern_envelope), **headers}
        await link.send(messages.stamped(message, session, None, modern=True), headers)

    async def stop(self) -> None:
        listens, link = self._app.listens, self._state.link
        wire_id = listens.wire_id
        if listens or wire_id is None or link is None:
            return
        listens.cut()
        if link.kind != "http":
            try:
                await link.send(
                    messages.notification(method_names.CANCELLED, {"requestId": wire_id}), {}
                )
            except Failed as failed:
                logger.debug("%s", failed)
        link.abandon(wire_id)

    async def cut(self, failure: Failure) -> None:
        logger.debug("the listen stream: %s", failure.explanation)
        was_open, link = self._app.listens.is_answered, self._state.link
        if not was_open:
            self._control.gave_up_on_attempt(failure)
        self._app.listens.cut()
        self._look_at_state(failure.error)
        error = failure.error or error_body(INVALID_REQUEST, failure.explanation)
        if failure.status == _TOO_LARGE:
            # Asked for again it would be as large.
            await self._refuse(error)
        elif not was_open and (failure.is_answer or failure.status in _REFUSED):
            await self._refuse_new(error)
        is_lost = was_open or failure.cause is FailureCause.UNREACHABLE
        if link is not None and is_lost and is_away(failure.cause, failure.status):
            # One that never opened may be what this path does not let through: that alone is no
            # reason to leave a connection on which calls are answered.
            self._lose(link, failure)
        else:
            self.see_to_it(delayed=True)

    async def ended(self, message: Json) -> None:
        """Handle the end of the stream: it stops, another client listens now, or the session is
        gone. Or the server refused it.
        """
        was_open = self._app.listens.is_answered
        self._app.listens.cut()
        error = cast("Json", message.get("error") or {})
        if error.get("code") == SESSION_NOT_FOUND:
            self._restart()
            return
        self._look_at_state(error)
        if error and not was_open:
            await self._refuse_new(error)
        if self._state.phase is Phase.READY and self._app.listens:
            self.see_to_it(delayed=True)

    async def _refuse_new(self, error: Json) -> None:
        """Give the application an error that its newest stream would get again. Streams that were
        open stay, without that one.
        """
        may_pass = error.get("code") == SESSION_NOT_FOUND or messages.says_state_refused(error)
        may_pass = may_pass or "retryAfter" in members_of(error.get("data"))
        largest = self._app.listens.largest()
        if largest is not None and not (may_pass or largest.is_acknowledged):
            await self._refuse(error)

    async def _refuse(self, error: Json) -> None:
        largest = self._app.listens.largest()
        if largest is not None:
            await self._app.answer(largest, error["code"], error["message"], error.get("data"))

    def _look_at_state(self, error: Json | None) -> None:
        session = self._peer.session
        if session is not None and error is not None and messages.says_state_refused(error):
            self._peer.drop_state(session.session_id, self._sent_state)
