"""The gauges of one layer, from what its process has at hand. An exporter's thread reads them.

The size of the store is what a round of the process has asked last, while metrics are exported.
Each process that shares the store has about the same size: do not add it up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from mcp_sessions.metrics import Reading
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.reporting.store_watch import StoreWatch
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.stores.outage import outage_of
from mcp_sessions.stores.probe import StoreSize, measure


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
