"""Request keys that hosts send under names of their own, and where such a key counts (KEY22).

Rules, owned by ``tests/server/dispatch/stages/test_host_keys.py``:

1. In a session of the client's, it is a request key of that session.
2. Otherwise it counts among the requests of its principal; of these, among those of one
   conversation.
3. Without authentication it counts in the conversation, or in the session of ``Mcp-Session-Id``, or
   on the pipe that it came by. Else it counts for nobody: the key of a stranger would have
   somebody's answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcp_sessions import method_names
from mcp_sessions.core.conversation_keys import Rule, among, home_of, host_key
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import LimitReached, OutcomeUnknown, SessionNotFound
from mcp_sessions.ids import RequestKey
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.calls.table import Call, Keyed, KeyScope, Outcome, Stage
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.stages.idempotency import Idempotency
from mcp_sessions.server.requests.joining import BeginAnew

logger = logging.getLogger(__name__)

_STORED_AS = Principal(issuer="mcp-sessions", client_id="request-keys")
"""The principal of the sessions that have such keys. So they are no sessions of the sender's."""

_OF_NONE = frozenset({method_names.PING, method_names.DISCOVER, method_names.LISTEN})
"""Methods that a key means nothing for (KEY14), or that change nothing."""


@dataclass(slots=True, eq=False, repr=False)
class HostKeys(Stage):
    """Finds the key that a host sent. It stands before the stages of request keys."""

    _places: Sequence[Rule]

    async def before(self, call: Call) -> Outcome | None:
        request = call.request
        if request.key is None and request.method not in _OF_NONE:
            headers = self._headers(call)
            key = host_key(self._places, request.params, request.meta, headers)
            if key is not None:
                call.keyed = call.keyed or Keyed()
                call.keyed.of_host = key
        return None

    def _headers(self, call: Call) -> Mapping[str, str | None]:
        """Return the headers that may have a key. One that comes with two values has none."""
        http = call.inbound.http.request
        if http is None:
            # Those of a WebSocket's handshake are about none of its requests.
            return {}
        named = (place.name for place in self._places if place.source == "header")
        given = ((name, {*http.headers.getlist(name)}) for name in named)
        return {name: said.pop() if len(said) == 1 else None for name, said in given if said}


@dataclass(slots=True, eq=False, repr=False)
class KeyOutside(Stage):
    """Serves such a key if its request belongs to no session of its client's."""

    _idempotency: Idempotency
    _lifecycle: Lifecycle
    _begin_anew: BeginAnew
    _has_said: bool = field(init=False, default=False)

    async def before(self, call: Call) -> Outcome | None:
        keyed = call.keyed
        if keyed is None or keyed.of_host is None or call.record is not None:
            return None
        found = _scope_of(call, keyed.of_host)
        if found is None:
            if not self._has_said:
                self._has_said = True
                logger.warning(
                    "a host's request key is ignored: without authentication it counts in a "
                    "session or a conversation only"
                )
            return None
        keyed.scope, call.key = scope, key = found
        if keyed.known_in not in (None, scope.session_id):
            raise OutcomeUnknown
        await self._idempotency.hold(keyed, scope.session_id, key)
        try:
            call.admitted = await self._idempotency.admit(call, scope.session_id, key)
        except SessionNotFound:
            if scope.mode is not Mode.KEYS:
                raise
            await self._make(scope)
            call.admitted = await self._idempotency.admit(call, scope.session_id, key)
        return await self._idempotency.again(call, self._begin_anew)

    def may_have_begun(self, call: Call) -> bool:
        return call.keyed is not None and call.keyed.was_seen

    async def _make(self, scope: KeyScope) -> None:
        try:
            await self._lifecycle.create(scope.mode, scope.principal, None, scope.session_id)
        except LimitReached as reached:
            # Its sender has one at the most: the limit is the server's.
            raise LimitReached("max_sessions", reached.most) from reached


def _scope_of(call: Call, key: RequestKey) -> tuple[KeyScope, RequestKey] | None:
    principal, connection = call.inbound.principal, call.inbound.connection
    conversation = None
    # One that this request started is none: sent again, it would start another one.
    if call.conversation is not None and call.conversation.started is None:
        conversation = call.conversation.record
    if principal != ANONYMOUS:
        own = home_of(principal.issuer, principal.subject, principal.client_id)
        if conversation is not None:
            key = among(key, conversation.session_id)
        return KeyScope(own, Mode.KEYS, _STORED_AS), key
    if conversation is not None:
        return KeyScope(home_of(conversation.session_id), Mode.KEYS, _STORED_AS), key
    if connection is None:
        return None
    if connection.transport_session is not None:
        return KeyScope(connection.transport_session, Mode.TRANSPORT, principal), key
    if call.inbound.scope is None:
        # At the other end of a pipe there is no stranger.
        return KeyScope(home_of("connection", connection.id), Mode.KEYS, _STORED_AS), key
    return None
