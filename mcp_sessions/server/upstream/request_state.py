"""Write and read the ``requestState`` of a call that waits here.

It is a random name, and holds nothing. It reads as none of a wrapped server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_PREFIX: Final = "mcp-sessions-call:"
"""Prefix of a ``requestState``. The rest names a call that waits here."""

_PASSED: Final = "mcp-sessions-passed:"
"""Prefix of a server's own ``requestState`` that begins with one of these prefixes: the server is
behind another layer.
"""


def named(name: str) -> str:
    return _PREFIX + name


def waiting_call(params: Mapping[str, Any] | None) -> str | None:
    state: object = (params or {}).get("requestState")
    is_ours = isinstance(state, str) and state.startswith(_PREFIX)
    return state.removeprefix(_PREFIX) if isinstance(state, str) and is_ours else None


def set_apart(result: dict[str, Any]) -> dict[str, Any]:
    """Return a server's result with a ``requestState`` that cannot be taken for one of this
    layer's.
    """
    state: object = result.get("requestState")
    if not (isinstance(state, str) and state.startswith((_PREFIX, _PASSED))):
        return result
    return {**result, "requestState": _PASSED + state}


def restored_params(params: dict[str, Any] | None) -> dict[str, Any] | None:
    state: object = (params or {}).get("requestState")
    if not (isinstance(state, str) and state.startswith(_PASSED)):
        return params
    return {**(params or {}), "requestState": state.removeprefix(_PASSED)}
