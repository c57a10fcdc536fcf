"""What every binding of a server serves, and with what: one object, made by the layer."""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.core.availability import Availability
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.conversations import BoundSessions
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions_transports.credentials import CredentialWatch


@dataclass(frozen=True, slots=True)
class Served:
    """What a binding serves, and with what."""

    router: Router
    connections: ConnectionRegistry
    attachments: Attachments
    runner: RequestRunner
    lifecycle: Lifecycle
    listening: Listening
    transport_sessions: TransportSessions
    conversations: BoundSessions | None
    """None: requests have no other sessions than those that their clients start."""

    policy: SessionPolicy
    remembers: bool
    """False: nothing is stored, so that no session outlives its request."""

    max_body: int
    """Bytes."""

    credentials: CredentialWatch
    availability: Availability
    bus: ClusterBus
