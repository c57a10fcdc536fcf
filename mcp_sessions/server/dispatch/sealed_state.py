"""Describe a session to its client: its id, its deadline, and its ``state`` as a sealed token.

A token is sealed again when the session's state changed. The last one is kept, and need not be
opened when it comes back.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any

from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import SESSION_META, with_meta
from mcp_sessions.core.recent import Recent
from mcp_sessions.core.visibility import STATE_KEY
from mcp_sessions.errors import InvalidState, SessionNotFound
from mcp_sessions.ids import SessionId
from mcp_sessions.security import SessionSecurity
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Mode, SessionRecord

_TOKENS_KEPT = 10_000
"""Tokens that need not be sealed anew, since their session's state did not change."""


class SealedState:
    def __init__(
        self, store: SessionStore, security: SessionSecurity, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._security = security
        self._clock = clock
        self._tokens = Recent[SessionId, tuple[int, str]](_TOKENS_KEPT)

    def forget(self, session_id: SessionId) -> None:
        self._tokens.pop(session_id, None)

    def stamp(self, result: dict[str, Any], record: SessionRecord) -> dict[str, Any]:
        """``result`` with the session's ``_meta`` (ASC12)."""
        return with_meta(result, {SESSION_META: self.metadata(record)})

    def check_state(self, record: SessionRecord, state: Mapping[str, Any]) -> None:
        """Whether a session's state could be sent.

        Raises:
            StateTooLarge: Its token would be larger than a client is asked to keep.
        """
        self._seal(record, state, record.state.version + 1)

    async def check_token(
        self, message: Message, session_id: SessionId, inbound: Inbound
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
        token = message.state
        if token is None:
            return None
        if isinstance(token, str) and self._is_last(token, session_id):
            return None
        now = self._clock()
        try:
            return self._security.open_state(
                token, session_id=session_id, principal=inbound.principal, now=now
            )
        except InvalidState:
            # Its cause is in the log.
            if not await self._is_owned(session_id, inbound, now):
                raise SessionNotFound(session_id) from None
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

    def metadata(self, record: SessionRecord) -> dict[str, Any]:
        """A session as ``sessions/create`` describes it (CRE1): strings only."""
        return {
            "sessionId": record.session_id,
            "expiresAt": record.expires_text,
            "state": self._token(record),
        }

    def _token(self, record: SessionRecord) -> str:
        if not self._store.remembers:
            return self._seal(record, record.state.values, record.state.version)
        known = self._tokens.get(record.session_id)
        if known is not None and known[0] == record.state.version:
            return known[1]
        token = self._seal(record, record.state.values, record.state.version)
        self._tokens.keep(record.session_id, (record.state.version, token))
        return token

    def _seal(self, record: SessionRecord, state: Mapping[str, Any], version: int) -> str:
        # The client does not see the layer's own values.
        shown = {key: value for key, value in state.items() if key != STATE_KEY}
        return self._security.seal_state(
            shown,
            session_id=record.session_id,
            principal=record.principal,
            version=version,
            expires_at=record.life.ends_at,
        )
