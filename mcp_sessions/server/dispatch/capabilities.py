from __future__ import annotations

from typing import Any

from mcp_sessions.core.messages import EXTENSION, ROUTE_HEADER
from mcp_sessions.core.task import EXTENSION as TASKS
from mcp_sessions.policy import SessionPolicy


def advertise(
    result: dict[str, Any], policy: SessionPolicy, *, remembers: bool, tasks: bool = False
) -> None:
    """Add our capabilities to a result. Raw: the SDK's models drop them.

    Args:
        result: The wrapped server's; it is changed itself.
        policy: Its limits are among them.
        remembers: Whether there is a store.
        tasks: Whether calls may become tasks. Only the modern era has them.
    """
    capabilities = result.setdefault("capabilities", {})
    capabilities["sessions"] = {}
    extensions = capabilities.setdefault("extensions", {})
    if tasks:
        extensions[TASKS] = {}
    if not remembers:
        extensions[EXTENSION] = {
            "transports": ["streamable-http", "websocket", "stdio"],
            "features": ["create", "delete", "state"],
        }
        return
    extensions[EXTENSION] = {
        "window": {
            "maxEvents": policy.max_events,
            "maxBytes": policy.max_bytes,
            "maxAge": policy.max_age,
        },
        "requestKeys": {
            "lifetime": policy.request_key_lifetime,
            "maxBytes": policy.request_key_bytes,
        },
        "routing": {"header": ROUTE_HEADER},
        "transports": ["streamable-http", "websocket", "stdio"],
        "features": ["start", "resume", "end", "create", "delete", "state", "requestKey"],
        "level": "full",
    }
