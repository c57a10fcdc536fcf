"""Send the application's messages that are no requests: notifications, answers, cancellations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client import stamping
from mcp_sessions.client.application import Application
from mcp_sessions.client.dialer import Failed, Json, Link
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.listener import Listener
from mcp_sessions.client.reattaching import Reattaching
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.state import ClientState, Phase
from mcp_sessions.core.messages import REQUEST_KEY_META, SESSION_META, RequestId, meta_of
from mcp_sessions.errors import REQUEST_CANCELLED

logger = logging.getLogger(__name__)

_MOST_WAITING = 1_000
"""Notifications of the application that wait for a connection; then the oldest is dropped."""


@dataclass(slots=True, eq=False)
class ClientOutbox:
    _state: ClientState
    _peer: KnownServer
    _app: Application
    _listener: Listener
    _hosted: Reattaching
    _waiting: list[tuple[Json, Mapping[str, str]]] = field(
        default_factory=list[tuple[Json, Mapping[str, str]]]
    )

    async def notification(self, message: Json, headers: Mapping[str, str]) -> None:
        link = self._state.link
        if link is None or self._state.phase not in (Phase.OPEN, Phase.READY):
            if message["method"] != method_names.INITIALIZED:
                self._waiting.append((message, headers))
                del self._waiting[:-_MOST_WAITING]
            return
        await _send(link, message, headers)

    async def answer(self, question_id: RequestId, message: Json) -> None:
        """Answer a question of the server. The answer is kept until it is delivered (ASK5)."""
        link = self._state.link
        if link is None:
            return
        try:
            await link.send(message, self._peer.headers())
            self._app.questions.delivered(question_id)
        except Failed as failed:
            logger.debug("an answer waits for a connection: %s", failed)

    async def cancel(self, message: Json, headers: Mapping[str, str]) -> None:
        """Cancel a request of the application (REQ7)."""
        peer, app = self._peer, self._app
        params = cast("Json", message.get("params") or {})
        meta = meta_of(params)
        is_by_key = peer.hosted.is_manager and {SESSION_META, REQUEST_KEY_META} <= meta.keys()
        if is_by_key:
            # REQ7: it is about a key of the application, and looks at no id.
            await self.notification(message, headers)
            return
        pending = app.requests.asked(params.get("requestId"))
        if pending is None:
            if not peer.is_modern or peer.hosted.is_manager:
                await self.notification(message, headers)
            return
        if pending.is_hosts or peer.hosted.is_manager:
            await self._cancel_for_host(pending, message, params, headers)
            return
        app.requests.done(pending)
        app.forget(pending)
        if app.listens.remove(pending.app_id):
            await self._listener.stop()
            return
        link = pending.link
        if link is None or not pending.wire_ids:
            return
        wire_id = pending.wire_ids[-1]
        message = {**message, "params": {**params, "requestId": wire_id}}
        if peer.modern_envelope is not None:
            message = stamping.marked(message, peer.modern_envelope.meta)
        if pending.key is not None and pending.session_id is not None:
            named = {"sessionId": pending.session_id}
            added = {SESSION_META: named, REQUEST_KEY_META: pending.key}
            message = stamping.marked(message, added)
        # Over HTTP the modern era cancels by closing the stream, unless there is a key.
        if not (peer.is_modern and link.kind == "http" and pending.key is None):
            await _send(link, message, {**headers, **peer.headers(method_names.CANCELLED)})
        if peer.is_modern:
            link.abandon(wire_id)

    async def _cancel_for_host(
        self, pending: PendingRequest, message: Json, params: Json, headers: Mapping[str, str]
    ) -> None:
        """As on any connection: it is answered, by who ends it (REQ6)."""
        link, is_keyed = pending.link, pending.key is not None and pending.hosted is not None
        if link is not None and pending.wire_ids:
            message = {**message, "params": {**params, "requestId": pending.wire_ids[-1]}}
            if is_keyed:
                named = {"sessionId": pending.hosted}
                added = {SESSION_META: named, REQUEST_KEY_META: pending.key}
                message = stamping.marked(message, added)
            envelope = stamping.envelope_of(pending.message)
            if envelope is not None:
                message = stamping.marked(message, envelope.meta)
                headers = {**headers, **self._peer.headers(method_names.CANCELLED)}
            if is_keyed or envelope is None or link.kind != "http":
                await self.notification(message, headers)
                return
            # There it is the end of the response that cancels, and nothing answers (REQ5).
            link.abandon(pending.wire_ids[-1])
        self._hosted.note_end_of(pending)
        await self._app.answer(pending, REQUEST_CANCELLED, "Request cancelled")

    async def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for message, headers in waiting:
            await self.notification(message, headers)
        for question_id, answer in self._app.questions.undelivered():
            await self.answer(question_id, answer)


async def _send(link: Link, message: Json, headers: Mapping[str, str]) -> None:
    try:
        await link.send(message, headers)
    except Failed as failed:
        logger.info("the server did not accept %s: %s", message["method"], failed)
