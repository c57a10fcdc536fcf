"""What a client can be asked by a server: of its capabilities those that matter here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mcp_sessions.core.messages import members_of

_MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "elicitation": ("form", "url"),
    "sampling": ("context", "tools"),
    "roots": (),
}
"""What a client can be asked → in which ways."""

Asks = Mapping[str, Mapping[str, Any]]
"""Of a client's capabilities those that let a server ask. A process is started for each that
differs: they hold names of the protocol only, and nothing else that a client wrote.
"""


def asks_of(capabilities: object) -> Asks:
    """Of what a client declared."""
    declared = members_of(capabilities)
    return {
        name: {mode: {} for mode in modes if members_of(declared[name]).get(mode) is not None}
        for name, modes in _MODES.items()
        if declared.get(name) is not None
    }


def kind_of(asks: Asks) -> frozenset[str]:
    """The same for clients that can be asked the same: to name no way of elicitation is to name
    forms.
    """
    return frozenset(
        f"{name}/{mode}" for name, modes in asks.items() for mode in modes or ("form",)
    )
