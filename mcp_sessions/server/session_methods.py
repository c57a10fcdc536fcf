"""``session/start``, ``session/resume`` and ``session/end`` (document 002)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from mcp_sessions.core.messages import (
    SESSION_META,
    Request,
    RequestId,
    answer_with,
    decode,
    meta_of,
    result_outcome,
    session_id_member,
)
from mcp_sessions.errors import (
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    LimitReached,
    Refusal,
    SessionNotFound,
)
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.principal import Principal
from mcp_sessions.server.connection import Inbound
from mcp_sessions.server.hub import Hub
from mcp_sessions.server.requests import Carrier, Host
from mcp_sessions.stores.base import (
    CurrentSession,
    Mode,
    Peer,
    SessionRecord,
    SessionStore,
)

logger = logging.getLogger(__name__)

SESSION_METHODS = frozenset({"session/start", "session/resume", "session/end"})


class SessionMethods:
    """The methods that make, resume and end sessions."""

    def __init__(
        self, store: SessionStore, hub: Hub, host: Host, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._hub = hub
        self._host = host
        self._clock = clock
        self.make_room: Callable[[], Awaitable[None]] = _no_room
        """Ends what has expired; called when a limit is reached, before it is refused."""

    async def serve(self, request: Request, inbound: Inbound) -> dict[str, Any]:
        """The result of a ``session/*`` request.

        Raises:
            WireError: What the caller is told instead.
        """
        match request.method:
            case "session/start":
                return await self._start(inbound)
            case "session/resume":
                return await self._resume(request.params, inbound)
            case "session/end":
                return await self._end(request.params, inbound)
            case _:
                raise AssertionError(f"{request.method} is no session method")

    async def create(self, mode: Mode, principal: Principal, peer: Peer | None) -> SessionRecord:
        """A new session.

        Raises:
            LimitReached: Too many are open, even after the expired ones were ended.
        """
        try:
            return await self._store.create(mode, principal, peer=peer, now=self._clock())
        except LimitReached:
            await self.make_room()
            return await self._store.create(mode, principal, peer=peer, now=self._clock())

    async def finish(self, session_id: SessionId) -> bool:
        """End a session for ever; False if it was not there.

        The log is closed first: whatever is appended or written from then on is refused.
        """
        record = await self._store.end(session_id)
        if record is None:
            return False
        await self.forget(record)
        logger.info("session %s ended", digest(session_id))
        return True

    async def forget(self, record: SessionRecord) -> None:
        """A session is over in the store: end what is at work for it here."""
        await self._hub.forget(record)
        await self._host.abort_session(record.session_id)

    def stamp(self, result: dict[str, Any], record: SessionRecord) -> dict[str, Any]:
        """``result`` with the session's ``_meta`` (document 004: "Using Sessions")."""
        meta = {
            **(meta_of(result) or {}),
            SESSION_META: {
                "sessionId": record.session_id,
                "expiresAt": timestamp(record.expires_at),
            },
        }
        return {**result, "_meta": meta}

    def kept_answer(
        self, outcome: bytes, request_id: RequestId, carrier: Carrier, record: SessionRecord
    ) -> bytes:
        """A kept outcome as the answer to a request that was sent again."""
        if carrier.named and outcome.startswith(b'"result":'):
            result = decode(outcome.removeprefix(b'"result":'))
            outcome = result_outcome(self.stamp(result, record))
        return answer_with(outcome, request_id)

    async def _start(self, inbound: Inbound) -> dict[str, Any]:
        record = await self.create(Mode.PROTOCOL, inbound.principal, inbound.peer)
        session_id, connection = record.session_id, inbound.connection
        if connection is not None:
            attached = await self._hub.attach(session_id, connection)
            if attached is not None:
                await connection.set_current(CurrentSession(session_id, attached.fencing_epoch))
        head = await self._store.head(session_id)
        if head is None:
            raise SessionNotFound(session_id)
        logger.info("session %s started", digest(session_id))
        return {
            "sessionId": session_id,
            "sessionEventId": head.event_id(),
            "expiresAt": timestamp(record.expires_at),
        }

    async def _resume(self, params: dict[str, Any] | None, inbound: Inbound) -> dict[str, Any]:
        session_id = session_id_member(params, "params.sessionId")
        position = None
        if params is not None and "lastSessionEventId" in params:
            position = params["lastSessionEventId"]
            if not isinstance(position, str):
                raise InvalidParams("params.lastSessionEventId must be a string")
        record = await self._owned(session_id, inbound)
        if inbound.resumes_stream:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT, "session/resume does not go with Last-Event-ID"
            )
        connection = inbound.connection if inbound.has_stream else None
        release = connection.hold() if connection is not None else None
        if release is not None:
            # "The result is written before the first replayed event."
            inbound.channel.after_answer(release)
        attached = await self._hub.attach(session_id, connection, position=position)
        if attached is None:
            raise SessionNotFound(session_id)
        if connection is not None:
            await connection.set_current(CurrentSession(session_id, attached.fencing_epoch))
        refusal = attached.refusal if connection is not None else Refusal.NO_STREAM
        result: dict[str, Any] = {
            "resumed": True,
            "catchup": refusal is None,
            "sessionEventId": attached.head,
            "replayed": len(attached.replay) if refusal is None else 0,
            "expiresAt": timestamp(record.expires_at),
        }
        if refusal is not None:
            result["reason"] = refusal.value
        logger.info(
            "session %s resumed: %s",
            digest(session_id),
            f"{len(attached.replay)} events" if refusal is None else refusal.value,
        )
        return result

    async def _end(self, params: dict[str, Any] | None, inbound: Inbound) -> dict[str, Any]:
        session_id = session_id_member(params, "params.sessionId")
        await self._owned(session_id, inbound)
        connection = inbound.connection
        current = await connection.current() if connection is not None else None
        if not await self.finish(session_id):
            raise SessionNotFound(session_id)
        if connection is not None and current is not None and current.session_id == session_id:
            # Ended by that same connection: later requests there belong to no session.
            await connection.set_current(None)
        return {}

    async def _owned(self, session_id: SessionId, inbound: Inbound) -> SessionRecord:
        """The caller's protocol-mode session. Ownership comes before mode."""
        admitted = await self._store.admit(
            session_id,
            inbound.principal,
            mode=Mode.PROTOCOL,
            now=self._clock(),
            held=session_id in self._host.held,
        )
        if admitted is None:
            raise SessionNotFound(session_id)
        if admitted.record.mode is not Mode.PROTOCOL:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT, "this session belongs to its transport"
            )
        return admitted.record


def timestamp(seconds: float) -> str:
    """``expiresAt``: ISO 8601, UTC, in whole seconds, never later than the truth."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _no_room() -> None:
    return None
