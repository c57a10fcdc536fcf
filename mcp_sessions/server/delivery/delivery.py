"""The objects that deliver what a server says: one server has one of each."""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.hearing import Hearing
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.questions import PendingQuestions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Delivery:
    connections: ConnectionRegistry
    attachments: Attachments
    publisher: Publisher
    broadcaster: ChangeBroadcaster
    hearing: Hearing
    questions: PendingQuestions
    owed: Owed
