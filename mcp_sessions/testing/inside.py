"""Expose the parts of a layer, which are private to other code, for this project's own tests.

The parts and their names change with any release.
"""

from __future__ import annotations

from mcp_sessions.assembly import Assembly
from mcp_sessions.layer import SessionLayer


def inside(layer: SessionLayer) -> Assembly:
    return layer._assembly  # pyright: ignore[reportPrivateUsage]
