"""Choose the requests that enter a connection and its current session in one step.

This process predicts which requests do so before it calls the store. Only the store's answer
decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions import method_names
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import NotNamed
from mcp_sessions.core.request_keys import KeyUse, content_digest
from mcp_sessions.errors import WireError
from mcp_sessions.ids import ConnectionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.connection.joint_admission import JointAdmission
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.dispatch.stages.idempotency import Idempotency
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.records import CurrentUse

_OTHERWISE = method_names.OF_SESSIONS | {method_names.INITIALIZE, method_names.PING}
"""Methods that are not served in the current session, or not only."""


@dataclass(slots=True, eq=False, repr=False)
class JointAdmissions:
    _connections: ConnectionRegistry
    _runner: RequestRunner
    _idempotency: Idempotency

    def admission_for(
        self, message: Message, session_header: str, principal: Principal
    ) -> JointAdmission | None:
        """Return the joint admission of a message on a transport-mode session.

        None: the message takes two steps, or is refused on the way.
        """
        connection = self._connections.local(ConnectionId(session_header))
        if message.is_notification or not isinstance(connection, StoredConnection):
            return None
        session_id = connection.last_current
        runner = self._runner
        if (
            session_id is None
            or message.method in _OTHERWISE
            or connection.principal != principal
            # A request that is refused here is not recorded.
            or runner.draining
            or runner.calls.is_full(connection.id)
            or runner.calls.has(connection.id, message.id)
        ):
            return None
        try:
            if message.named() is not NotNamed.ABSENT:
                return None
            key, use, lock = message.keyed(), None, None
            if key is not None:
                # A later refusal leaves a run that never began. If the request is sent again, it
                # begins then (Runs).
                digest = content_digest(message.method, message.params)
                run = runner.runs.mint()
                use = KeyUse(key, digest, runner.process, principal.scopes, run)
                lock = self._idempotency.begin_of((session_id, key))
        except WireError:
            return None
        return JointAdmission(
            CurrentUse(session_id, session_id in runner.held, use), runner.runs.settle, lock
        )
