"""What a replica says of itself when the page asks. Nothing here runs before that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp_sessions import metrics
from mcp_sessions.core.availability import Availability
from mcp_sessions.ids import SessionId, digest, replica_name
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.reporting.stories import word_of
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.upstream.external.launcher import memory_of
from mcp_sessions.stores.probe import Clocked

_CALLS = 50
"""Running calls that are named, the oldest ones."""

_CHILDREN = 200
"""Processes that are named."""


_READINGS = ("waiting_messages", "slow_clients")
"""Gauges that the page shows."""


class Described(Protocol):
    """The processes behind the layer."""

    def described(self) -> Sequence[dict[str, Any]]:
        """What is known of each, but for its memory."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class OwnFacts:
    _replica: Replica
    _connections: ConnectionRegistry
    _runner: RequestRunner
    _availability: Availability
    _title: str
    """Name of the wrapped server."""

    _gauges: metrics.Read
    _children: Described | None
    _started: float = field(init=False)
    _clock: Callable[[], float] = field(init=False)

    def __post_init__(self) -> None:
        self._clock = self._replica.clock
        self._started = self._clock()

    async def read(self, session_id: SessionId | None = None) -> dict[str, Any]:
        """Return plain values, as JSON has them: no id, and nothing that a client sent.

        Args:
            session_id: Return what is known of this session alone.
        """
        if session_id is not None:
            latest = self._runner.calls.latest_in(session_id)
            return {"latest": (latest[0], word_of(latest[1])) if latest is not None else None}
        replica, now = self._replica, self._clock()
        running = [each for each in self._runner.active if not each.is_listen]
        children = list(self._children.described())[:_CHILDREN] if self._children else []
        # The system takes some milliseconds for each process.
        pids = [os.getpid(), *(each["pid"] for each in children)]
        own, *sizes = await asyncio.to_thread(_sizes, pids)
        for child, size in zip(children, sizes, strict=True):
            child["memory"] = size
        store: object = getattr(replica.store, "inner", replica.store)
        return {
            "name": replica_name(replica.process),
            "process": replica.process,
            "pid": os.getpid(),
            "age": now - self._started,
            "clock_off": store.clock_ahead if isinstance(store, Clocked) else 0.0,
            "memory": own,
            "server": self._title,
            "draining": self._availability.is_leaving,
            "connections": len(self._connections.all()),
            "running": len(running),
            "calls": [
                {
                    "method": word_of(each.request.method),
                    "session": digest(each.sessions[0]) if each.sessions else None,
                    "age": now - each.started_at,
                }
                for each in running[:_CALLS]
            ],
            "children": children,
            "readings": [
                [each.gauge, each.value, each.attribute[1] if each.attribute else ""]
                for each in (*metrics.read_outboxes(), *self._gauges())
                if each.gauge in _READINGS
            ],
            "counts": metrics.tally(),
            "strangers": replica.strangers.read(),
            "refused": replica.refused.read(),
        }


def _sizes(pids: Sequence[int | None]) -> list[int | None]:
    return [memory_of(pid) if pid is not None else None for pid in pids]
