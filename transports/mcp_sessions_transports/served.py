"""Define the port between bindings and the layer that they serve."""

from __future__ import annotations

from typing import Protocol

from mcp_sessions.core.availability import Availability
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.cluster.replica import ClusterBus
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.conversation_sessions import ConversationSessions
from mcp_sessions.server.dispatch.joint_admissions import JointAdmissions
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.upstream.modern_rules import ModernRules


class Served(Protocol):
    router: Router
    connections: ConnectionRegistry
    attachments: Attachments
    runner: RequestRunner
    lifecycle: Lifecycle
    listening: Listening
    transport_sessions: TransportSessions
    joint_admissions: JointAdmissions | None
    """None: the store is in this process, where two steps cost what one does."""

    conversations: ConversationSessions | None
    """None: requests have no other sessions than those that their clients start."""

    rules: ModernRules
    policy: SessionPolicy
    remembers: bool
    """False: nothing is stored, so that no session outlives its request."""

    availability: Availability
    bus: ClusterBus
