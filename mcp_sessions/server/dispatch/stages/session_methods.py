"""The methods of both documents that make, resume and end sessions.

``session/start``, ``session/resume`` and ``session/end``, ``sessions/create``
and ``sessions/delete`` (STA, RES, END, CRE, DEL). One kind of session, one id namespace.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, cast

from mcp_sessions import method_names
from mcp_sessions.core.ends import EndReason
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import (
    EVENT_ID_META,
    SESSION_META,
    NotNamed,
    error_body,
    session_id_member,
)
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Why
from mcp_sessions.errors import (
    METHOD_NOT_FOUND,
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    Refusal,
    SessionNotFound,
)
from mcp_sessions.ids import IN_NO_LOG, SessionEventId, SessionId, digest, parse_position
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.calls.table import Call, Outcome, Stage
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.record_changes import SetWaitsFrom
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())


class SessionMethods(Stage):
    def __init__(
        self,
        replica: Replica,
        attachments: Attachments,
        lifecycle: Lifecycle,
        *,
        held: Collection[SessionId],
        sealed: SealedState,
    ) -> None:
        self._store, self._clock, self._stories = replica.store, replica.clock, replica.stories
        self._attachments, self._lifecycle = attachments, lifecycle
        self._held, self._sealed = held, sealed

    def may_have_begun(self, call: Call) -> bool:
        return True

    async def before(self, call: Call) -> Outcome | None:
        request, inbound = call.request, call.inbound
        if not self._store.remembers and request.method in method_names.OF_A_STORE:
            # SLS1: without a store, only ``sessions/*`` is spoken.
            raise UpstreamError(error_body(METHOD_NOT_FOUND, "Method not found", request.method))
        match request.method:
            case method_names.START_SESSION:
                result = await self._start(inbound)
            case method_names.RESUME_SESSION:
                result = await self._resume(request, inbound)
            case method_names.END_SESSION:
                result = await self._end(request.params, inbound)
            case method_names.CREATE_SESSION:
                result = await self._create(request, inbound)
            case method_names.DELETE_SESSION:
                result = await self._delete(request, inbound)
            case _:
                raise AssertionError(f"{request.method} is no session method")
        if inbound.peer.modern:
            result["resultType"] = "complete"
        return Outcome(result, None)

    async def _start(self, inbound: Inbound) -> dict[str, Any]:
        record = await self._lifecycle.create(Mode.PROTOCOL, inbound.principal, inbound.peer)
        session_id, connection = record.session_id, inbound.connection
        if connection is not None:
            attached = await self._attachments.attach(session_id, connection, why=Why.STARTED)
            if attached is not None:
                await inbound.make_current(session_id, attached.fencing_epoch)
        return {
            "sessionId": session_id,
            "sessionEventId": await self._begin(record, inbound),
            "expiresAt": record.expires_text,
        }

    async def _create(self, request: Message, inbound: Inbound) -> dict[str, Any]:
        if not isinstance(request.named(), NotNamed):
            raise InvalidParams("sessions/create takes no session in _meta")
        record = await self._lifecycle.create(Mode.PROTOCOL, inbound.principal, inbound.peer)
        if inbound.connection is not None:
            # It receives its events here, but does not become the current session.
            await self._attachments.attach(record.session_id, inbound.connection, why=Why.STARTED)
        result: dict[str, Any] = {"session": self._sealed.metadata(record)}
        if self._store.remembers:
            result["_meta"] = {EVENT_ID_META: await self._begin(record, inbound)}
        return result

    async def _begin(self, record: SessionRecord, inbound: Inbound) -> SessionEventId:
        head = await self._store.head(record.session_id)
        if head is None:
            raise SessionNotFound(record.session_id)
        if inbound.peer.modern and inbound.connection is None:
            await self._store.change(record.session_id, SetWaitsFrom(head.event_id()))
        return head.event_id()

    async def _resume(self, request: Message, inbound: Inbound) -> dict[str, Any]:
        params = request.params
        session_id = session_id_member(params, "params.sessionId")
        last = position = None
        if params is not None and "lastSessionEventId" in params:
            last = params["lastSessionEventId"]
            if not isinstance(last, str):
                raise InvalidParams("params.lastSessionEventId must be a string")
            # However long it is: no store is sent what is no id (ERR6).
            position = parse_position(last) or IN_NO_LOG
        record = await self._owned(session_id, inbound)
        if not inbound.principal.scopes >= record.principal.scopes:
            # A weaker credential does not read what a stronger one may receive (SEC3).
            logger.warning("session %s: resume with fewer scopes refused", digest(session_id))
            self._stories.count(session_id, f"refused fewer-scopes {request.method}")
            raise SessionNotFound(session_id)
        if inbound.http.resumes_stream or inbound.http.session_header == session_id:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT,
                "session/resume goes with neither Last-Event-ID nor its own Mcp-Session-Id",
            )
        connection = inbound.connection
        release = connection.transport.hold() if connection is not None else None
        if release is not None:
            # "The result is written before the first replayed event."
            inbound.channel.follows = release
        attached = await self._attachments.attach(
            session_id,
            connection,
            why=Why.RESUMED,
            position=position,
            instance=request.instance,
            had=record.attachment,
        )
        if attached is None:
            raise SessionNotFound(session_id)
        if connection is not None:
            await inbound.make_current(session_id, attached.fencing_epoch)
        refusal = attached.refusal
        if inbound.peer.modern and connection is None:
            # The replay waits for the session's next listen stream.
            waits_from = attached.head if refusal is not None else last
            change = SetWaitsFrom(cast(SessionEventId, waits_from))
            await self._store.change(session_id, change)
        elif connection is None:
            refusal = Refusal.NO_STREAM
        result: dict[str, Any] = {
            "resumed": True,
            "catchup": refusal is None,
            "sessionEventId": attached.head,
            "replayed": len(attached.replay) if refusal is None else 0,
            "expiresAt": record.expires_text,
        }
        if refusal is not None:
            result["reason"] = refusal.value
        if logger.isEnabledFor(logging.DEBUG):
            outcome = f"{len(attached.replay)} events" if refusal is None else refusal.value
            logger.debug("session %s resumed: %s", digest(session_id), outcome)
        return result

    async def _end(self, params: dict[str, Any] | None, inbound: Inbound) -> dict[str, Any]:
        return await self._finish_owned(session_id_member(params, "params.sessionId"), inbound)

    async def _delete(self, request: Message, inbound: Inbound) -> dict[str, Any]:
        named = request.named()
        if isinstance(named, NotNamed):
            raise InvalidParams(f"_meta[{SESSION_META!r}] is missing")
        await self._sealed.check_token(request, named, inbound)
        return await self._finish_owned(named, inbound)

    async def _finish_owned(self, session_id: SessionId, inbound: Inbound) -> dict[str, Any]:
        await self._owned(session_id, inbound)
        current = await inbound.current()
        if not await self._lifecycle.finish(session_id, EndReason.CLIENT) and self._store.remembers:
            raise SessionNotFound(session_id)
        if current is not None and current.session_id == session_id:
            # Ended by that same connection: later requests there belong to no session.
            await inbound.set_current(None)
        return {}

    async def _owned(self, session_id: SessionId, inbound: Inbound) -> SessionRecord:
        """Return the caller's protocol-mode session. Ownership is checked before the mode."""
        admitted = await self._store.admit(
            session_id,
            inbound.principal,
            mode=Mode.PROTOCOL,
            now=self._clock(),
            held=session_id in self._held,
        )
        if admitted is None:
            raise SessionNotFound(session_id)
        if admitted.record.mode is not Mode.PROTOCOL:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT, "this session belongs to its transport"
            )
        return admitted.record
