"""The versions of MCP, by era.

The MCP SDK says which versions a server in Python accepts (``server/upstream/sdk/kernel.py``).
``tests/server/test_eras.py`` compares these lists with the SDK's.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

Eras = Literal["2025", "2026", "both"]
"""``2025``: MCP up to 2025-11-25, with a handshake. ``2026``: from 2026-07-28, without one."""

ERAS: Final[tuple[Eras, ...]] = get_args(Eras)

HANDSHAKE_ERA: Final = ("2025-03-26", "2025-06-18", "2025-11-25")
MODERN_ERA: Final = ("2026-07-28",)

NEWEST_HANDSHAKE: Final = HANDSHAKE_ERA[-1]
NEWEST_MODERN: Final = MODERN_ERA[-1]

DEFAULT_VERSION: Final = "2025-03-26"
"""The version of a client that names none (2025-11-25, transports)."""


def versions_of(eras: Eras) -> dict[str, tuple[str, ...]]:
    """Return the versions that are spoken, by the name of their era."""
    spoken: dict[str, tuple[str, ...]] = {}
    if eras != "2026":
        spoken["handshake"] = HANDSHAKE_ERA
    if eras != "2025":
        spoken["modern"] = MODERN_ERA
    return spoken
