"""Whether a layer serves: written by what starts and stops it, read by what serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcp_sessions.core.arrivals import Arrivals
from mcp_sessions.errors import ConfigurationError


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
