from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.stores.contract import SessionStore


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Replica:
    """One of several processes that share a store, or the only one.

    Args:
        clock: Seconds since 1970.
    """

    store: SessionStore
    bus: ClusterBus
    policy: SessionPolicy
    clock: Callable[[], float]

    @property
    def process(self) -> str:
        return self.bus.process
