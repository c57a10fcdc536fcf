"""Takes the application's own sessions up again, and passes their events on.

Rules that must hold, and that ``tests/client/test_hosted.py`` owns:

1. After a loss each session that was attached to the application's connection is resumed at
   the last event that the application was given. It does not learn of the loss.
2. If that is refused, no later event of the session passes (ATT10), and the application is
   notified: by ``notifications/sessions/detached`` with ``evicted`` if it knows the extension
   (TKO3), so that it resumes with its own position; else by the end of its connection.
3. Its subscriptions outside of sessions are repeated, and their resources reported as changed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

import anyio

from mcp_sessions import method_names
from mcp_sessions.client import rpc, stamping
from mcp_sessions.client.application import Application
from mcp_sessions.client.control import SessionControl
from mcp_sessions.client.dialer import Json, Link
from mcp_sessions.client.hosted import HostedSession, session_named
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.listen_streams import everything
from mcp_sessions.client.pushing import Pushing
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.core.messages import SESSION_META, members_of, meta_of
from mcp_sessions.core.resume import event_id_of, is_session_id
from mcp_sessions.errors import Detached
from mcp_sessions.ids import digest

logger = logging.getLogger(__name__)

_HOLE = "a session missed events that the server does not have any more: start the bridge again"

_LAST_ANSWERS = 2.0
"""Seconds for the answers of what ran in a session that the application ended."""


@dataclass(slots=True, eq=False)
class Reattaching:
    _peer: KnownServer
    _app: Application
    _control: SessionControl
    pushing: Pushing
    _is_left: bool = False

    async def take_up(self, link: Link, *, is_new: bool) -> None:
        """Resume on a link what is attached to the application's connection.

        Args:
            is_new: The link was opened for it.

        Raises:
            Failed: The link is of no use; another may be.
        """
        peer = self._peer
        if not peer.hosted.is_manager:
            return
        if is_new and peer.session is None and not peer.is_modern:
            # Outside of sessions they ended with the connection.
            named: Json = {"_meta": {SESSION_META: None}} if peer.abilities.has_sessions else {}
            await self._control.subscribe_again(link, named)
            await self._app.report_everything_changed()
        if is_new:
            await self.pushing.drop()
        for held in list(peer.hosted.attached()):
            if link.kind == "http" and self.is_listened_to(held.session_id):
                # Its stream is asked for again, and says from where.
                continue
            held.taking()
            try:
                reason = await self._resume(link, held, is_new=is_new)
            finally:
                held.decided()
            if reason is not None:
                logger.warning(
                    "session %s could not be resumed at %s: %s",
                    digest(held.session_id),
                    link.name,
                    reason,
                )
                await self._report_refused(held)

    async def _resume(self, link: Link, held: HostedSession, *, is_new: bool) -> str | None:
        hosted, position = self._peer.hosted, held.follower.position
        link = await self.pushing.link_for(link)
        result = await self._control.resume(link, held.session_id, position, is_new=is_new)
        if result is None:
            hosted.gone(held.session_id)
            return "it is gone"
        if result.get("catchup") is True:
            logger.info("session %s resumed at %s", digest(held.session_id), link.name)
            return None
        if position is None:
            # Nothing of it was ever seen, so that nothing can be missed.
            held.follower.restart(rpc.head_of(result))
            return None
        hosted.missed_events(held)
        return f"a gap ({result.get('reason')})"

    async def _report_refused(self, held: HostedSession) -> None:
        if self._peer.hosted.is_declared:
            params = {"sessionId": held.session_id, "reason": Detached.EVICTED.value}
            await self._app.deliver(rpc.notification(method_names.DETACHED, params))
        elif held.is_withheld:
            await self._app.end(_HOLE)

    async def took_event(self, link: Link, message: Json) -> bool:
        hosted = self._peer.hosted
        if not hosted.is_used:
            return False
        params = cast("Json | None", message.get("params"))
        named = members_of(meta_of(params).get(SESSION_META)).get("sessionId")
        own = self._peer.session
        if not is_session_id(named):
            has_id = "sessionEventId" in (params or {})
            named = hosted.current if has_id and own is None else None
        if named is None and link is self._peer.pushed:
            # The application has no such connection that could learn of it (EVT11).
            return True
        if named is None or (own is not None and named == own.session_id):
            return False
        if link.kind == "http":
            # The answer that comes first may be on its way (RES6, RES7).
            await hosted.until_taken(named)
        held = hosted.find(named)
        if held is not None:
            await held.until_decided()
        if hosted.has_ended(named) or (held is not None and held.is_withheld):
            return True
        event_id = event_id_of(params, named)
        if event_id is not None:
            # ATT3: a session that a request named may be attached here.
            held = held or hosted.follow(named, None)
            held.came()
            if not held.follower.admits(event_id):
                return True
        await self._app.deliver(self._as_listened(message, named))
        return True

    def _as_listened(self, message: Json, session_id: str | None = None) -> Json:
        """An event with the id that the application knows its listen stream by (WSS12)."""
        params = cast("Json | None", message.get("params"))
        wire_id = meta_of(params).get(stamping.SUBSCRIPTION_ID)
        pending = self._app.requests.find(wire_id) if isinstance(wire_id, (str, int)) else None
        if pending is None and session_id is not None:
            # A replay may come before its stream is open again on the wire.
            pending = self._listen_of(session_id)
        if pending is None or pending.app_id == wire_id:
            return message
        return stamping.marked(message, {stamping.SUBSCRIPTION_ID: pending.app_id})

    async def took_acknowledgement(self, message: Json) -> bool:
        """Pass on that a listen stream of the application is open: once, however often it was
        opened on the wire. False: it is none of those.
        """
        params = cast("Json | None", message.get("params"))
        wire_id = meta_of(params).get(stamping.SUBSCRIPTION_ID)
        pending = self._app.requests.find(wire_id) if isinstance(wire_id, (str, int)) else None
        if pending is None or not pending.is_hosts:
            return False
        was_open, pending.is_acknowledged = pending.is_acknowledged, True
        if not was_open:
            await self._app.deliver(self._as_listened(message))
        elif pending.hosted is None:
            # Nobody kept what it missed.
            for change in everything(members_of((params or {}).get("notifications"))):
                listened = {stamping.SUBSCRIPTION_ID: pending.app_id}
                await self._app.deliver(stamping.marked(change, listened))
        return True

    async def before_listening(self, link: Link, pending: PendingRequest) -> None:
        """Over HTTP a listen stream begins where ``session/resume`` says (CLI11, HTM9).

        Raises:
            Failed: The link is of no use.
        """
        held = self._peer.hosted.find(pending.hosted)
        position = held.follower.position if held is not None else None
        if link.kind != "http" or held is None or position is None:
            return
        held.taking()
        try:
            result = await self._control.resume(link, held.session_id, position, is_new=False)
            if result is not None and result.get("catchup") is not True:
                self._peer.hosted.missed_events(held)
        finally:
            held.decided()
        if held.is_withheld:
            await self._report_refused(held)

    def note_end_of(self, pending: PendingRequest) -> None:
        """A request is about to be answered: if it is a listen stream over HTTP, its session is
        attached nowhere then, and stays the application's (WSS19).
        """
        if pending.method == method_names.LISTEN and self._peer.pushed is not None:
            self._is_left = self._is_left or pending.hosted is not None

    def is_left_by_listens(self) -> bool:
        """Whether a session is to be attached again, since its listen stream ended; once."""
        is_left, self._is_left = self._is_left, False
        return is_left

    async def until_last(self, ending: PendingRequest) -> None:
        """Return when all that ran in a session that ended has its answer (END4), or it takes
        too long.
        """
        ended = session_named(ending.message) or rpc.session_asked(ending.message)
        with anyio.move_on_after(_LAST_ANSWERS):
            for pending in self._app.requests:
                if pending.hosted == ended and pending is not ending:
                    await pending.settled.wait()

    def is_listened_to(self, session_id: str) -> bool:
        return self._listen_of(session_id, is_open=False) is not None

    def _listen_of(self, session_id: str, *, is_open: bool = True) -> PendingRequest | None:
        for pending in reversed(list(self._app.requests)):
            if pending.hosted == session_id and pending.method == method_names.LISTEN:
                if pending.is_acknowledged or not is_open:
                    return pending
        return None
