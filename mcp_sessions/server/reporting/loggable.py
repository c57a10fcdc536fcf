"""Names that clients choose, in logs, audit and spans: those that exist, and no others.

A client may send anything as the name of a tool or a method, also a session id. So a name is
written down only after the server has shown that it has it: in a list, or by serving it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.messages import entries_of, members_of
from mcp_sessions.core.named import LISTS
from mcp_sessions.security import is_minted

_MOST = 200
"""Characters of a name."""

_KEPT = 10_000
"""Names that are remembered. Any more are written down by nobody."""

_METHODS = (
    method_names.OPENING
    | method_names.LISTING
    | method_names.SUBSCRIPTIONS
    | method_names.OF_SESSIONS
    | {
        method_names.COMPLETE,
        method_names.SET_LEVEL,
        method_names.PING,
        method_names.GET_PROMPT,
        method_names.READ_RESOURCE,
        method_names.LISTEN,
        method_names.CALL_TOOL,
        method_names.CANCELLED,
        method_names.INITIALIZED,
        method_names.PROGRESS,
        method_names.ROOTS_CHANGED,
    }
)

_NAME = "name"
"""The member that has a name. A URI is never written down."""


class KnownNames:
    def __init__(self) -> None:
        self._names: set[tuple[str, str]] = set()

    def served(self, method: str, name: str | None, result: Any) -> None:
        """Remember what was served, and what a list has.

        Args:
            name: See :func:`loggable_name`.
        """
        self._add("", method)
        if name is not None:
            self._add(method, name)
        listing = LISTS.get(method)
        if listing is not None and listing.name == _NAME:
            for entry in entries_of(members_of(result).get(listing.entries)):
                self._add(listing.named_by, str(members_of(entry).get(_NAME)))

    def name(self, method: str, name: str) -> str | None:
        return name if (method, name) in self._names else None

    def method(self, method: str) -> str | None:
        return method if method in _METHODS or ("", method) in self._names else None

    def _add(self, method: str, name: str) -> None:
        if len(name) <= _MOST and not is_minted(name) and len(self._names) < _KEPT:
            self._names.add((method, name))


def loggable_name(params: Mapping[str, Any] | None) -> str | None:
    """Return what a request of any method names by a name, not by a URI."""
    name = (params or {}).get(_NAME)
    return name if isinstance(name, str) else None


def loggable_method(method: str) -> str:
    return method if method in _METHODS else "a method that is not the protocol's"
