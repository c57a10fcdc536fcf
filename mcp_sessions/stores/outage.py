"""Notice that a store fails the calls of this process: each engine counts its failures here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcp_sessions import metrics
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.stores.contract import SessionStore


@dataclass(slots=True, eq=False)
class Outage:
    store: str
    on_failure: Callable[[bool], object] | None = None
    """Called for each failure, by any thread: whether the store is away, and does not just refuse.
    None: nobody wants to know."""

    def failed(self, failure: StoreUnavailable, calls: int = 1) -> None:
        """Count calls that the store failed. Any thread may call this."""
        metrics.store_failed(self.store, calls)
        on_failure = self.on_failure
        if on_failure is not None:
            on_failure(not isinstance(failure, StoreRefused))


def outage_of(store: SessionStore) -> Outage | None:
    """Return what notices the failures of a store; None: it cannot be away, or does not say so."""
    found: object = getattr(store, "outage", None)
    return found if isinstance(found, Outage) else None
