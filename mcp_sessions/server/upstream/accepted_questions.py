"""List the requests that a client accepts from a server: the part of its capabilities used here.

A client of the 2026 era gets them in the result of its own request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mcp_sessions import method_names
from mcp_sessions.core.messages import members_of

_MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "elicitation": ("form", "url"),
    "sampling": ("context", "tools"),
    "roots": (),
}
"""Kind of request to a client → its modes."""

INPUT_REQUIRED: Final = "input_required"
"""The type of a result that asks."""

Askable = Mapping[str, Mapping[str, Any]]
"""Part of a client's capabilities that lets a server ask. Each different value has a process of its
own, so values hold only names of the protocol, and no other text of a client.
"""

NOTHING_ASKED: Final[Askable] = {}


def asks_of(capabilities: object) -> Askable:
    declared = members_of(capabilities)
    return {
        name: {mode: {} for mode in modes if members_of(declared[name]).get(mode) is not None}
        for name, modes in _MODES.items()
        if declared.get(name) is not None
    }


def kind_of(asks: Askable) -> frozenset[str]:
    """Return a key, equal for clients that accept the same requests. Elicitation without a mode
    means forms.
    """
    return frozenset(
        f"{name}/{mode}" for name, modes in asks.items() for mode in modes or ("form",)
    )


def accepts(asks: Askable, method: str, params: Mapping[str, Any] | None) -> bool:
    """Whether a client accepts that request. One that declares no mode of elicitation accepts
    forms.
    """
    need = method_names.QUESTIONS.get(method)
    if need is None or need not in asks:
        return False
    if need != "elicitation":
        return True
    mode: object = (params or {}).get("mode", "form")
    return mode in (asks[need] or ("form",))
