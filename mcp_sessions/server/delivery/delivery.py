from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.hidden_updates import HiddenUpdates
from mcp_sessions.server.delivery.pending_writes import PendingWrites
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.questions import PendingQuestions, RemoteQuestions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Delivery:
    connections: ConnectionRegistry
    attachments: Attachments
    publisher: Publisher
    broadcaster: ChangeBroadcaster
    hidden_updates: HiddenUpdates
    questions: PendingQuestions
    remote_questions: RemoteQuestions
    pending_writes: PendingWrites
