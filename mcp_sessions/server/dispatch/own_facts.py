"""What a replica says of itself: to the page when it asks, and as gauges to an exporter's thread.

Nothing here runs before that. The size of the store is what a round of the process has asked last,
while metrics are exported. Each process that shares the store has about the same size: do not add
it up.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp_sessions import metrics
from mcp_sessions.core.availability import Availability
from mcp_sessions.ids import SessionId, digest, replica_name
from mcp_sessions.metrics import Reading
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.reporting.store_watch import StoreWatch
from mcp_sessions.server.reporting.stories import word_of
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.upstream.external.launcher import memory_of
from mcp_sessions.stores.outage import outage_of
from mcp_sessions.stores.probe import Clocked, StoreSize, measure

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


class Gauges:
    def __init__(
        self, replica: Replica, delivery: Delivery, runner: RequestRunner, watch: StoreWatch
    ) -> None:
        self._store, self._clock = replica.store, replica.clock
        self._connections, self._pending_writes = delivery.connections, delivery.pending_writes
        self._runner, self._watch = runner, watch
        self._size: StoreSize | None = None

    async def measure(self) -> None:
        """Ask the store for its size.

        Raises:
            StoreUnavailable: The size stays the one before.
        """
        self._size = await measure(self._store)

    def read(self) -> Iterator[Reading]:
        streams = [
            each
            for each in self._connections.all()
            if each.transport_session is None or each.is_streaming
        ]
        yield from _by_transport("streams", streams, lambda _: 1)
        yield from _by_transport("attached", streams, _attached)
        yield Reading("open_calls", self._runner.calls.opened)
        yield Reading("longest_call", self._longest())
        waits = ("for", "store")
        yield Reading("waiting_messages", self._pending_writes.count, waits)
        yield Reading("waiting", self._pending_writes.size, waits)
        store = ("store", self._store.name)
        if outage_of(self._store) is not None:
            yield Reading("store_away", self._watch.away, store)
        if self._size is not None:
            yield Reading("store_sessions", self._size.sessions, store)
            if self._size.bytes is not None:
                yield Reading("store", self._size.bytes, store)

    def _longest(self) -> float:
        started = [each.started_at for each in list(self._runner.active) if not each.is_listen]
        return max(0.0, self._clock() - min(started)) if started else 0.0


def _attached(connection: ClientConnection) -> int:
    """Over HTTP a connection is a session. Those that it carries besides are in the store."""
    return 1 if connection.transport_session is not None else len(connection.attached)


def _by_transport(
    gauge: str, streams: list[ClientConnection], count: Callable[[ClientConnection], int]
) -> Iterator[Reading]:
    # A transport that has none now is 0, and not missing.
    counts = Counter[str](dict.fromkeys(("http", "websocket", "stdio", "listen"), 0))
    for each in streams:
        counts[each.kind] += count(each)
    for kind, value in counts.items():
        yield Reading(gauge, value, ("transport", kind))
