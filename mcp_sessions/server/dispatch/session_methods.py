"""The methods of both documents that make, resume and end sessions.

``session/start``, ``session/resume`` and ``session/end``, ``sessions/create``
and ``sessions/delete`` (STA, RES, END, CRE, DEL). One kind of session, one id namespace.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, cast

from mcp_sessions import metrics
from mcp_sessions.core.client_description import outlined
from mcp_sessions.core.messages import (
    EVENT_ID_META,
    SESSION_META,
    NotNamed,
    Request,
    RequestId,
    decode_kept,
    error_body,
    instance_of,
    meta_of,
    named_session,
    session_id_member,
)
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    METHOD_NOT_FOUND,
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    InvalidState,
    LimitReached,
    Refusal,
    SessionNotFound,
)
from mcp_sessions.ids import ConnectionId, SessionEventId, SessionId, digest, parse_position
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import SessionSecurity
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.messages import SessionEnded
from mcp_sessions.server.connection import Inbound
from mcp_sessions.server.delivery.hub import Hub
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import Waiter
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attached, CurrentSession, Peer, SessionRecord

logger = logging.getLogger(__name__)

SESSION_METHODS = frozenset(
    {"session/start", "session/resume", "session/end", "sessions/create", "sessions/delete"}
)

_TOKENS_KEPT = 10_000
"""Tokens that need not be sealed anew, since their session's state did not change."""


class SessionMethods:
    """The methods that make, resume and end sessions."""

    def __init__(
        self,
        store: SessionStore,
        hub: Hub,
        runner: RequestRunner,
        clock: Callable[[], float],
        security: SessionSecurity,
        owed: Owed,
        bus: ClusterBus,
    ) -> None:
        self._store = store
        self._hub = hub
        self._runner = runner
        self._clock = clock
        self._security = security
        self._owed = owed
        self._bus = bus
        self._tokens: OrderedDict[SessionId, tuple[int, str]] = OrderedDict()
        self.make_room: Callable[[bool], Awaitable[None]] = _no_room
        """Ends what has expired, and (if told so) sessions that are nobody's and hold nothing;
        called when a limit is reached, before it is refused."""

    async def serve(self, request: Request, inbound: Inbound) -> dict[str, Any]:
        """The result of a ``session/*`` request.

        Raises:
            WireError: What the caller is told instead.
        """
        if not self._store.remembers and request.method.startswith("session/"):
            # SLS1: without a store, only ``sessions/*`` is spoken.
            raise UpstreamError(error_body(METHOD_NOT_FOUND, "Method not found", request.method))
        match request.method:
            case "session/start":
                return await self._start(inbound)
            case "session/resume":
                return await self._resume(request.params, inbound)
            case "session/end":
                return await self._end(request.params, inbound)
            case "sessions/create":
                return await self._create(request.params, inbound)
            case "sessions/delete":
                return await self._delete(request.params, inbound)
            case _:
                raise AssertionError(f"{request.method} is no session method")

    async def create(self, mode: Mode, principal: Principal, peer: Peer | None) -> SessionRecord:
        """A new session.

        Raises:
            LimitReached: Too many are open, even after those were ended that can be (SES20); or
                the client says too much of itself.
        """
        if mode is Mode.PROTOCOL and peer is not None:
            peer = replace(peer, initialize_params=outlined(peer.initialize_params))
        try:
            record = await self._store.create(mode, principal, peer=peer, now=self._clock())
        except LimitReached as reached:
            if reached.limit == "max_client_bytes":
                raise
            # Where it is one principal's own limit, others' sessions are not in the way.
            await self.make_room(reached.limit == "max_sessions" or principal == ANONYMOUS)
            record = await self._store.create(mode, principal, peer=peer, now=self._clock())
        metrics.session_made(mode.value)
        return record

    async def finish(self, session_id: SessionId) -> bool:
        """End a session for ever; False if it was not there.

        The log is closed first: whatever is appended or written from then on is refused.
        """
        record = await self._store.end(session_id)
        if record is None:
            return False
        # It is over, and nobody can end it again: what is at work for it ends, if not now then
        # when the store is back.
        await self._owed.settle({("forget", session_id): partial(self.forget, record)})
        metrics.session_over(record.mode.value, "ended")
        logger.info("session %s ended", digest(session_id))
        return True

    async def forget(self, record: SessionRecord) -> None:
        """A session is over in the store: end what is at work for it, everywhere."""
        self._tokens.pop(record.session_id, None)
        # Answered first (END6): a connection that is over ends the streams that answers go on.
        await self._runner.abort_session(record.session_id)
        await self._hub.forget(record)
        attachment = record.attachment
        connection_id = attachment.connection_id if attachment is not None else None
        ended = SessionEnded(session_id=record.session_id, connection_id=connection_id)
        await self._bus.tell(ended)

    async def forget_here(self, session_id: SessionId, connection_id: ConnectionId | None) -> None:
        """Another process ended a session: end what is at work for it here."""
        self._tokens.pop(session_id, None)
        await self._runner.abort_session(session_id)
        await self._hub.forget_here(session_id, connection_id)

    def stamp(self, result: dict[str, Any], record: SessionRecord) -> dict[str, Any]:
        """``result`` with the session's ``_meta`` (ASC12)."""
        meta = {**(meta_of(result) or {}), SESSION_META: self._metadata(record)}
        return {**result, "_meta": meta}

    def check_state(self, record: SessionRecord, state: Mapping[str, Any]) -> None:
        """Whether a session's state could be sent.

        Raises:
            StateTooLarge: Its token would be larger than a client is asked to keep.
        """
        self._seal(record, state, record.state_version + 1)

    async def check_token(
        self, params: Mapping[str, Any] | None, session_id: SessionId, inbound: Inbound
    ) -> tuple[dict[str, Any], int] | None:
        """Look at the ``state`` that came with a session.

        With a store the stored state is the state: a genuine token is accepted and not
        read back, so that replaying an old one rolls nothing back.

        Returns:
            The state and its version; None: none came, or the one that this session was
            given last, and it is not to be read back.

        Raises:
            SessionNotFound: The session is not the caller's, whatever the token is.
            InvalidState: The token is not one of ours for this session and principal.
        """
        named = (meta_of(params) or {}).get(SESSION_META)
        token = cast("dict[str, Any]", named).get("state") if isinstance(named, dict) else None
        if token is None:
            return None
        if isinstance(token, str) and self._is_last(token, session_id):
            return None
        now = self._clock()
        try:
            if not isinstance(token, str):
                raise InvalidState("not a string")
            return self._security.open_state(
                token, session_id=session_id, principal=inbound.principal, now=now
            )
        except InvalidState as invalid:
            if not await self._is_owned(session_id, inbound, now):
                raise SessionNotFound(session_id) from None
            logger.warning("session %s: state refused: %s", digest(session_id), invalid.cause)
            raise

    def _is_last(self, token: str, session_id: SessionId) -> bool:
        """Whether it was sealed here, for this session, and is the last one. It does not have to
        be opened then: whether the session is the caller's, and is alive, the store says next.
        """
        known = self._tokens.get(session_id)
        return known is not None and hmac.compare_digest(
            known[1].encode(), token.encode("utf-8", "surrogatepass")
        )

    async def _is_owned(self, session_id: SessionId, inbound: Inbound, now: float) -> bool:
        if not self._store.remembers:
            opened = await self._store.admit(
                session_id, inbound.principal, mode=Mode.PROTOCOL, now=now
            )
            return opened is not None
        record = await self._store.load(session_id, now=now)
        return record is not None and record.principal == inbound.principal

    def _metadata(self, record: SessionRecord) -> dict[str, Any]:
        """A session as ``sessions/create`` describes it (CRE1): strings only."""
        return {
            "sessionId": record.session_id,
            "expiresAt": timestamp(record.expires_at),
            "state": self._token(record),
        }

    def _token(self, record: SessionRecord) -> str:
        if not self._store.remembers:
            return self._seal(record, record.state, record.state_version)
        known = self._tokens.get(record.session_id)
        if known is not None and known[0] == record.state_version:
            return known[1]
        token = self._seal(record, record.state, record.state_version)
        self._tokens[record.session_id] = (record.state_version, token)
        if len(self._tokens) > _TOKENS_KEPT:
            self._tokens.popitem(last=False)
        return token

    def _seal(self, record: SessionRecord, state: Mapping[str, Any], version: int) -> str:
        return self._security.seal_state(
            state,
            session_id=record.session_id,
            principal=record.principal,
            version=version,
            expires_at=record.ends_at,
        )

    def kept_answer(
        self, outcome: bytes, request_id: RequestId, waiter: Waiter, record: SessionRecord
    ) -> tuple[bytes, int | None]:
        """A kept outcome as the answer to a request that was sent again; its error code."""
        kept = decode_kept(outcome)
        if "error" in kept:
            return waiter.inbound.error(request_id, kept["error"]), kept["error"]["code"]
        result = kept["result"]
        if waiter.named:
            result = self.stamp(result, record)
        return waiter.inbound.result(request_id, waiter.inbound.of_its_era(result)), None

    async def _start(self, inbound: Inbound) -> dict[str, Any]:
        record = await self.create(Mode.PROTOCOL, inbound.principal, inbound.peer)
        session_id, connection = record.session_id, inbound.connection
        if connection is not None:
            attached = await self._hub.attach(session_id, connection)
            if attached is not None:
                await _make_current(inbound, session_id, attached)
        return {
            "sessionId": session_id,
            "sessionEventId": await self._begin(record, inbound),
            "expiresAt": timestamp(record.expires_at),
        }

    async def _create(self, params: dict[str, Any] | None, inbound: Inbound) -> dict[str, Any]:
        if not isinstance(named_session(params), NotNamed):
            raise InvalidParams("sessions/create takes no session in _meta")
        record = await self.create(Mode.PROTOCOL, inbound.principal, inbound.peer)
        if inbound.connection is not None:
            # It hears its events here, but does not become the current session.
            await self._hub.attach(record.session_id, inbound.connection)
        result: dict[str, Any] = {"session": self._metadata(record)}
        if self._store.remembers:
            result["_meta"] = {EVENT_ID_META: await self._begin(record, inbound)}
        return result

    async def _begin(self, record: SessionRecord, inbound: Inbound) -> SessionEventId:
        """The head of a new session: a valid position before its first event."""
        logger.info("session %s started", digest(record.session_id))
        head = await self._store.head(record.session_id)
        if head is None:
            raise SessionNotFound(record.session_id)
        if inbound.modern and inbound.connection is None:
            await self._store.set_waits_from(record.session_id, head.event_id())
        return head.event_id()

    async def _resume(self, params: dict[str, Any] | None, inbound: Inbound) -> dict[str, Any]:
        session_id = session_id_member(params, "params.sessionId")
        position = None
        if params is not None and "lastSessionEventId" in params:
            position = params["lastSessionEventId"]
            if not isinstance(position, str):
                raise InvalidParams("params.lastSessionEventId must be a string")
            if parse_position(position) is None:
                # Unknown, however long it is: no store is sent what is no id (SEC8).
                position = "unknown"
        record = await self._owned(session_id, inbound)
        if not inbound.principal.scopes >= record.principal.scopes:
            # A weaker credential does not read what a stronger one may hear (SEC3).
            logger.warning("session %s: resume with fewer scopes refused", digest(session_id))
            raise SessionNotFound(session_id)
        if inbound.resumes_stream or inbound.session_header == session_id:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT,
                "session/resume goes with neither Last-Event-ID nor its own Mcp-Session-Id",
            )
        connection = inbound.connection if inbound.has_stream else None
        release = connection.transport.hold() if connection is not None else None
        if release is not None:
            # "The result is written before the first replayed event."
            inbound.channel.after_answer(release)
        attached = await self._hub.attach(
            session_id,
            connection,
            position=position,
            instance=instance_of(params),
            had=record.attachment,
        )
        if attached is None:
            raise SessionNotFound(session_id)
        if connection is not None:
            await _make_current(inbound, session_id, attached)
        refusal = attached.refusal
        if inbound.modern and connection is None:
            # The replay waits for the session's next listen stream.
            waits_from = attached.head if refusal is not None else position
            await self._store.set_waits_from(session_id, cast(SessionEventId, waits_from))
        elif connection is None:
            refusal = Refusal.NO_STREAM
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
        return await self._finish_owned(session_id_member(params, "params.sessionId"), inbound)

    async def _delete(self, params: dict[str, Any] | None, inbound: Inbound) -> dict[str, Any]:
        named = named_session(params)
        if isinstance(named, NotNamed):
            raise InvalidParams(f"_meta[{SESSION_META!r}] is missing")
        await self.check_token(params, named, inbound)
        return await self._finish_owned(named, inbound)

    async def _finish_owned(self, session_id: SessionId, inbound: Inbound) -> dict[str, Any]:
        await self._owned(session_id, inbound)
        current = await inbound.current()
        if not await self.finish(session_id) and self._store.remembers:
            raise SessionNotFound(session_id)
        if current is not None and current.session_id == session_id:
            # Ended by that same connection: later requests there belong to no session.
            await inbound.set_current(None)
        return {}

    async def _owned(self, session_id: SessionId, inbound: Inbound) -> SessionRecord:
        """The caller's protocol-mode session. Ownership comes before mode."""
        admitted = await self._store.admit(
            session_id,
            inbound.principal,
            mode=Mode.PROTOCOL,
            now=self._clock(),
            held=session_id in self._runner.held,
        )
        if admitted is None:
            raise SessionNotFound(session_id)
        if admitted.record.mode is not Mode.PROTOCOL:
            raise InvalidRequest(
                InvalidReason.MODE_CONFLICT, "this session belongs to its transport"
            )
        return admitted.record


async def _make_current(inbound: Inbound, session_id: SessionId, attached: Attached) -> None:
    """Rule 2 begins to hold; in the modern era every request names its session."""
    if inbound.connection is not None and not inbound.modern:
        current = CurrentSession(session_id, attached.fencing_epoch)
        await inbound.set_current(current)


def timestamp(seconds: float) -> str:
    """``expiresAt``: ISO 8601, UTC, in whole seconds, never later than the truth."""
    return _whole_second(int(seconds))


@lru_cache(maxsize=1_024)
def _whole_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _no_room(evicts: bool) -> None:
    return None
