"""Keeps the session's one listen stream open, for what the application listens to.

In the modern era events come on a ``subscriptions/listen`` that names the session. It is
opened when the application opens its first one, again when it asks for more, and again when
it was cut: then ``session/resume`` goes before it and says where the new one begins.
"""

from __future__ import annotations

import logging
from typing import cast

from mcp_sessions.client import wire
from mcp_sessions.client.dialer import Failed, Failure, Json, Link
from mcp_sessions.client.exchange import Refused
from mcp_sessions.client.keeper import Hopeless
from mcp_sessions.client.requests import Pending
from mcp_sessions.client.situation import Phase, Situation, Way
from mcp_sessions.core.resume import AWAY, Cause
from mcp_sessions.errors import SESSION_NOT_FOUND

logger = logging.getLogger(__name__)


def _is_unreachable(error: Failed | Refused) -> bool:
    """Whether a failure is the address's, and not the server's word."""
    if isinstance(error, Refused):
        return wire.says_not_begun(error.error)
    return error.failure.cause is not Cause.STATUS or error.failure.status in AWAY


class Listener:
    """One client's listening."""

    def __init__(self, situation: Situation) -> None:
        self._at = situation
        self._is_at_it = False
        self._state: str | None = None
        """The ``state`` that the stream on the wire was asked for with."""

    def add(self, pending: Pending) -> None:
        """The application opened a stream."""
        self._at.listens.add(pending)
        self.see_to_it()

    def see_to_it(self, *, delayed: bool = False) -> None:
        """Have the stream on the wire bring what is asked for.

        Args:
            delayed: It failed just now.
        """
        if not self._is_at_it:
            self._is_at_it = True
            self._at.spawn(self._listen, delayed)

    async def _listen(self, delayed: bool) -> None:
        at = self._at
        try:
            if delayed:
                await at.sleep(at.backoff.failed(at.draw()))
            while at.listens and not at.listens.is_covered():
                link = at.link
                if at.phase is not Phase.READY or link is None:
                    # Whoever gets it ready sees to it again.
                    return
                try:
                    await self._listen_on(link)
                except Hopeless:
                    return
                except (Failed, Refused) as error:
                    logger.info("listening failed: %s", error)
                    at.listens.wire_id = None
                    if at.keeper.session is None:
                        return
                    if _is_unreachable(error) and at.try_another_address():
                        return
                    await at.sleep(at.backoff.failed(at.draw()))
        finally:
            self._is_at_it = False
        for part in at.listens.not_yet_acknowledged():
            await at.deliver(part)

    async def _listen_on(self, link: Link) -> None:
        at, keeper, listens = self._at, self._at.keeper, self._at.listens
        if listens.wire_id is not None:
            # Our own resume would take the session from it, and it would say so.
            if not listens.is_answered:
                keeper.gave_up_on_attempt(Failure(Cause.CLOSED, "it was asked for anew"))
            link.abandon(listens.wire_id)
            listens.wire_id = None
        if keeper.must_resume_before_listening:
            outcome = await keeper.attach(link)
            if not outcome.recovered:
                await at.tell_everything_changed()
            await at.tell_outcome(outcome)
        session = keeper.session
        if session is None or not listens or at.link is not link:
            return
        keeper.must_resume_before_listening = True
        self._state = session.state
        message = wire.naming(listens.next_request(), keeper.attempts.instance)
        wire_id = cast(str, message["id"])
        headers = {**listens.headers(), **wire.session_headers(session)}
        await link.send(wire.stamped(message, wire_id, session, None, modern=True), headers)

    async def stop(self) -> None:
        """The application closed a stream: if it was the last, so is the one on the wire."""
        at = self._at
        wire_id, link = at.listens.wire_id, at.link
        if at.listens or wire_id is None or link is None:
            return
        at.listens.wire_id = None
        if link.kind != "http":
            try:
                await link.send(wire.notification(wire.CANCELLED, {"requestId": wire_id}), {})
            except Failed as failed:
                logger.debug("%s", failed)
        link.abandon(wire_id)

    def cut(self, failure: Failure) -> None:
        """The stream on the wire broke."""
        logger.debug("the listen stream: %s", failure.explanation)
        if not self._at.listens.is_answered:
            self._at.keeper.gave_up_on_attempt(failure)
        self._at.listens.wire_id = None
        self._look_at_state(failure.error)
        self.see_to_it(delayed=True)

    def ended(self, message: Json) -> None:
        """The server ended it: it stops, somebody else listens now, or the session is gone."""
        self._at.listens.wire_id = None
        error = cast("Json", message.get("error") or {})
        if error.get("code") == SESSION_NOT_FOUND:
            self._at.begin(Way.START_OVER)
            return
        self._look_at_state(error)
        if self._at.phase is Phase.READY and self._at.listens:
            self.see_to_it(delayed=True)

    def _look_at_state(self, error: Json | None) -> None:
        session = self._at.keeper.session
        if session is not None and error is not None and wire.says_state_refused(error):
            self._at.keeper.drop_state(session.session_id, self._state)
