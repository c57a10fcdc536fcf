"""Read ``subscriptions/listen`` requests, build their messages, and compare log levels.

Each event of a listen carries the id of its request. The request's answer comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcp_sessions import method_names
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import SESSION_META, RequestId, decode, encode

SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
"""``_meta`` key of every message on a listen stream: the listen request's id."""

LEVELS = (
    "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency",
)  # fmt: skip
"""Levels of log messages, the lowest first."""

FLAGS = {
    "tools": "toolsListChanged",
    "prompts": "promptsListChanged",
    "resources": "resourcesListChanged",
}
_SESSION_KEY = b'"' + SESSION_META.encode() + b'":'


class Filter:
    def __init__(self, params: Mapping[str, Any], task_ids: Sequence[str] = ()) -> None:
        """Read a listen's filter.

        Args:
            task_ids: The tasks that the listen names, and that are reported on it.
        """
        self._task_ids = task_ids
        wanted: Mapping[str, Any] = params.get("notifications") or {}
        self._uri_list: list[str] = list(wanted.get("resourceSubscriptions") or ())
        self.uris = frozenset(self._uri_list)
        self.lists = frozenset(name for name, flag in FLAGS.items() if wanted.get(flag) is True)

    def honored(self) -> dict[str, Any]:
        honored: dict[str, Any] = {flag: True for name, flag in FLAGS.items() if name in self.lists}
        if self._uri_list:
            honored["resourceSubscriptions"] = self._uri_list
        if self._task_ids:
            honored["taskIds"] = self._task_ids
        return honored

    def admits(self, event: LoggedEvent) -> bool:
        method: str = decode(event.payload)["method"]
        if method.endswith(method_names.LIST_CHANGED):
            return method_names.CHANGED_KIND.get(method) in self.lists
        # An update of a resource was stored because the session subscribed, or because a
        # handler sent it to this very session: it is delivered, and so is all else.
        return True


def level_of(params: Mapping[str, Any] | None) -> str | None:
    level: object = (params or {}).get("level")
    return level if isinstance(level, str) and level in LEVELS else None


def acknowledgement(wanted: Filter, request_id: RequestId) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "method": method_names.ACKNOWLEDGED,
        "params": {"notifications": wanted.honored(), "_meta": {SUBSCRIPTION_ID: request_id}},
    }


def completion(
    request_id: RequestId,
    error: dict[str, Any] | None,
    result: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The last message of a listen.

    Args:
        error: Why it ended; None: in order.
        result: Adds what its result carries in addition to the subscription's id.
    """
    if error is not None:
        return {"jsonrpc": "2.0", "id": request_id, "error": error}
    members = {"_meta": {SUBSCRIPTION_ID: request_id}}
    return {"jsonrpc": "2.0", "id": request_id, "result": result(members)}


def stamped(payload: bytes, request_id: RequestId) -> bytes:
    stamp = b'"' + SUBSCRIPTION_ID.encode() + b'":' + encode(request_id) + b","
    before, key, after = payload.rpartition(_SESSION_KEY)
    if key:
        return before + stamp + key + after
    message = decode(payload)
    params: dict[str, Any] = message.setdefault("params", {})
    params["_meta"] = {**(params.get("_meta") or {}), SUBSCRIPTION_ID: request_id}
    return encode(message)
