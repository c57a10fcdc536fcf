"""Whether a layer serves, and what is on its way in when it begins to stop.

Written by what starts and stops the layer, read by what serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mcp_sessions.errors import ConfigurationError


class Arrivals:
    """Requests on their way in: an HTTP POST from the first that is known of it until it runs or
    was answered. A request that arrived before a layer begins to stop is served, if it is soon
    authenticated, read and looked up.
    """

    def __init__(self) -> None:
        self.inside: set[object] = set()
        """Those on their way."""

        self._on_none: Callable[[], None] | None = None

    def enter(self) -> object | None:
        """Return a token for an arriving request. None: it arrives too late."""
        if self._on_none is not None:
            return None
        arrival = object()
        self.inside.add(arrival)
        return arrival

    def arrived(self, arrival: object) -> None:
        """Note that a request runs, or was answered. To repeat it changes nothing."""
        self.inside.discard(arrival)
        if self._on_none is not None:
            self._notify()

    def close(self, on_none: Callable[[], None]) -> None:
        """Accept no more arrivals.

        Args:
            on_none: Called when nothing is on its way any more, now or later; in place of an
                earlier one.
        """
        self._on_none = on_none
        self._notify()

    def _notify(self) -> None:
        if self._on_none is not None and not self.inside:
            self._on_none()


@dataclass(slots=True)
class Availability:
    is_running: bool = False
    """Its lifespan was entered, and was not left."""

    is_leaving: bool = False
    """The process is about to stop: no new request should be sent to it."""

    retry_after: float | None = None
    """While it drains: seconds after which who is new should come back."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    """The requests that it is about to serve."""

    def check_running(self) -> None:
        if not self.is_running:
            raise ConfigurationError(
                "the SessionLayer does not run: pass layer.lifespan to the application that "
                "mounts it"
            )
