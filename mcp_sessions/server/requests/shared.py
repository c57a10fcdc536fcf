"""Hold what the requests of one layer share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.background import Background
from mcp_sessions.server.calls.detached import DetachedRequests
from mcp_sessions.server.calls.table import Calls
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.reporting.loggable import KnownNames
from mcp_sessions.server.requests.outcome import Outcomes


@dataclass(eq=False, repr=False)
class Shared:
    calls: Calls[Any]
    detached: DetachedRequests
    background: Background
    """The tasks of the requests."""

    outcomes: Outcomes
    questions: PendingQuestions
    names: KnownNames = field(init=False, default_factory=KnownNames)
    loop: asyncio.AbstractEventLoop | None = None
    """Kept: asking for the running loop costs a system call per question."""
