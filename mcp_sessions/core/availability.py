"""Whether a layer serves, or is about to stop.

Written by what starts and stops the layer, read by what serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcp_sessions.errors import ConfigurationError


@dataclass(slots=True)
class Availability:
    is_running: bool = False
    """Its lifespan was entered, and was not left."""

    is_leaving: bool = False
    """The process is about to stop: no new request should be sent to it."""

    retry_after: float | None = None
    """While it drains: seconds after which who is new should come back."""


def not_running() -> ConfigurationError:
    return ConfigurationError(
        "the SessionLayer does not run: pass layer.lifespan to the application that mounts it"
    )
