"""Names that clients choose, in logs, audit and spans: those that exist, and no others.

A client may send anything as the name of a tool or a method, also a session id. So a name is
written down only after the server has shown that it has it: in a list, or by serving it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcp_sessions.core.messages import members_of
from mcp_sessions.security import is_minted

_MOST = 200
"""Characters of a name."""

_KEPT = 10_000
"""Names that are remembered. Any more are written down by nobody."""

_METHODS = frozenset({
    "completion/complete", "initialize", "logging/setLevel", "ping", "prompts/get", "prompts/list",
    "resources/list", "resources/read", "resources/subscribe", "resources/templates/list",
    "resources/unsubscribe", "server/discover", "session/end", "session/resume", "session/start",
    "sessions/create", "sessions/delete", "subscriptions/listen", "tools/call", "tools/list",
    "notifications/cancelled", "notifications/initialized", "notifications/progress",
    "notifications/roots/list_changed",
})  # fmt: skip

_LISTS = {"tools/list": ("tools/call", "tools"), "prompts/list": ("prompts/get", "prompts")}


class KnownNames:
    def __init__(self) -> None:
        self._names: set[tuple[str, str]] = set()

    def served(self, method: str, params: Mapping[str, Any] | None, result: Any) -> None:
        self._add("", method)
        name = (params or {}).get("name")
        if isinstance(name, str):
            self._add(method, name)
        if method in _LISTS:
            calls, member = _LISTS[method]
            entries: object = members_of(result).get(member)
            if isinstance(entries, list):
                for entry in cast("list[Any]", entries):
                    self._add(calls, str(members_of(entry).get("name")))

    def name(self, method: str, name: str) -> str | None:
        return name if (method, name) in self._names else None

    def method(self, method: str) -> str | None:
        return method if method in _METHODS or ("", method) in self._names else None

    def _add(self, method: str, name: str) -> None:
        if len(name) <= _MOST and not is_minted(name) and len(self._names) < _KEPT:
            self._names.add((method, name))


def loggable_method(method: str) -> str:
    return method if method in _METHODS else "a method that is not the protocol's"
