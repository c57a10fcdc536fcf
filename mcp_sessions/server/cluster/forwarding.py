"""Forward a client's answer, report or cancellation to the process that waits for it.

The id of the question has the name of that process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_sessions.core.messages import Answer
from mcp_sessions.ids import process_of
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.codec import understands
from mcp_sessions.server.cluster.replica_messages import QuestionAnswered, QuestionProgress


async def forward_answer(bus: ClusterBus, answer: Answer, principal: Principal) -> bool:
    """Hand on the answer to a request of another process; False if no such one lives.

    Raises:
        StoreUnavailable: Unknown whether it was handed on.
    """
    if not isinstance(answer.id, str):
        return False
    process = process_of(answer.id)
    if not bus.is_remote(process) or not understands(process):
        return False
    if not await bus.is_alive(process):
        return False
    answered = QuestionAnswered(
        id=answer.id, result=answer.result, error=answer.error, principal=principal
    )
    await bus.send(answered, to=process)
    return True


async def forward_progress(
    bus: ClusterBus, params: Mapping[str, Any] | None, principal: Principal
) -> None:
    token = (params or {}).get("progressToken")
    process = process_of(token) if isinstance(token, str) else None
    if bus.is_remote(process):
        await bus.try_send(QuestionProgress(params=params, principal=principal), to=process)
