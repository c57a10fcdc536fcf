"""The eras of the protocol that a layer speaks."""

from typing import Final, Literal, get_args

Eras = Literal["2025", "2026", "both"]
"""``2025``: MCP up to 2025-11-25, with a handshake. ``2026``: from 2026-07-28, without one."""

ERAS: Final[tuple[Eras, ...]] = get_args(Eras)
