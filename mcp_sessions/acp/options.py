from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Durations in seconds."""

    connect_servers: bool
    connect_timeout: float
    grace: float
