"""How many replicas, how many shards of Redis, how much memory and network a load takes, from what
a call, an event and a stream cost where they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

BUSY = 0.6
"""The part of a core that a replica or a shard is planned for."""


def measured(default: float, bench: str, row: str) -> Any:
    """A figure of a bench.

    Args:
        default: Its value when this was written; see `Costs.read`.
    """
    return field(default=default, metadata={"bench": bench, "row": row})


@dataclass(frozen=True)
class Costs:
    """CPU in µs, memory and network in bytes, of one."""

    call: float = measured(355, "replicas", "a call in a session: CPU of its replica")
    call_redis: float = measured(51.4, "replicas", "a call in a session: CPU of Redis")
    call_network: float = measured(713, "replicas", "a call in a session: network")
    event: float = measured(372, "replicas", "an event to its stream: CPU of its replica")
    event_redis: float = measured(133, "replicas", "an event to its stream: CPU of Redis")
    event_network: float = measured(2174, "replicas", "an event to its stream: network")
    event_memory: float = measured(4807, "replicas", "an event to its stream: memory of Redis")
    change_received: float = measured(125, "replicas", "an event to its stream: CPU of another")
    """At every other replica, of a change that any session may learn of."""

    opens: float = measured(1006, "replicas", "a stream opens: CPU of its replica")
    opens_redis: float = measured(336, "replicas", "a stream opens: CPU of Redis")
    opens_received: float = measured(137, "replicas", "a stream opens: CPU of another")
    opens_network: float = measured(3051, "replicas", "a stream opens: network")
    stream_memory: float = measured(392, "replicas", "a stream opens: memory of Redis")
    session_memory: float = measured(1702, "replicas", "a session begins: memory of Redis")
    subscription_memory: float = measured(1093, "replicas", "a subscription: memory of Redis")
    bus: float = measured(1.55, "replicas", "a published message: CPU of each other node")
    """At every other shard, of each message and each event."""

    notified: float = measured(33, "fanout", "redis, 8,000 sessions: CPU of each")
    """For each session that one change is asked to, of many."""

    idle: float = measured(25, "idle", "redis, GET")
    """For an open stream in a second."""

    idle_redis: float = measured(8.4, "idle", "redis, GET: Redis")

    @staticmethod
    def read(results: Mapping[str, Any]) -> Costs:
        """Read one run of the benches, ``docs/figures.json``; other figures stay as they are."""
        found = {
            (bench["name"], row["name"]): row["measured"]
            for bench in results["benches"]
            for row in bench["rows"]
            if row["measured"] is not None
        }
        # A row about idle streams is percent of a core for each 1,000.
        scale = {"idle": 10.0}
        known = {
            each.name: found[position] * scale.get(position[0], 1.0)
            for each in fields(Costs)
            if (position := (each.metadata["bench"], each.metadata["row"])) in found
        }
        return replace(Costs(), **known)


@dataclass(frozen=True, kw_only=True)
class Load:
    sessions: int = 1_000_000
    streams: int = 100_000
    """Sessions with an open stream, among these."""

    calls: float = 20_000
    events: float = 100_000
    changes: float = 0
    """Server-wide ones among the events: each is asked to all replicas. The others are of one
    session, such as what its handler says."""

    lifetime: float = 600
    """Seconds after which a stream is cut and comes back."""

    @property
    def opens(self) -> float:
        return self.streams / self.lifetime


@dataclass(frozen=True)
class Size:
    replicas: float
    """Processes, a core each; infinite: no number is enough."""

    shards: float
    memory: float
    """Bytes of all shards."""

    network: float
    """Bytes in a second between replicas and Redis."""

    received: float
    """Part of each replica's core that goes for what happened at others."""

    bus: float
    """Part of each shard's core that goes for what was published at others."""


def size(load: Load, costs: Costs, busy: float = BUSY) -> Size:
    """So that no core is busier than that."""
    work = (
        load.calls * costs.call
        + load.events * costs.event
        + load.opens * costs.opens
        + load.streams * costs.idle
    ) / 1e6
    redis = (
        load.calls * costs.call_redis
        + load.events * costs.event_redis
        + load.opens * costs.opens_redis
        + load.streams * costs.idle_redis
    ) / 1e6
    received = (load.changes * costs.change_received + load.opens * costs.opens_received) / 1e6
    bus = published(load) * costs.bus / 1e6
    return Size(
        _among(work, busy - received),
        _among(redis, busy - bus),
        load.sessions * (costs.session_memory + costs.subscription_memory + costs.event_memory)
        + load.streams * costs.stream_memory,
        load.calls * costs.call_network
        + load.events * costs.event_network
        + load.opens * costs.opens_network,
        received,
        bus,
    )


def published(load: Load) -> float:
    """Messages in a second: each event, and each message to all replicas."""
    return load.events + load.changes + load.opens


def _among(work: float, room: float) -> float:
    return math.ceil(work / room) if room > 0 else math.inf


def most_changes(costs: Costs, busy: float = BUSY) -> float:
    """Server-wide changes in a second that a replica learns of and does nothing else."""
    return busy / costs.change_received * 1e6


def most_published(costs: Costs, busy: float = BUSY) -> float:
    """Messages in a second that a shard passes by and does nothing else."""
    return busy / costs.bus * 1e6


def most_of_one(costs: Costs) -> float:
    """Events in a second of one session: they are in one slot, which is on one core."""
    return 1 / costs.event_redis * 1e6
