"""``initialize``: which version is spoken, and who can do what (ACP, Initialization).

Nothing here waits or remembers; `tests/acp/test_documents.py` owns the rules:

1. The requested version if we support it, else our latest.
2. A capability that is not declared is not supported.
3. The agent's declarations are kept, and the layer's are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from acp import PROTOCOL_VERSION

from mcp_sessions.acp.acp_errors import invalid_params
from mcp_sessions.core.messages import members_of

SUPPORTED = frozenset({PROTOCOL_VERSION})
"""The versions of ACP that are spoken here."""

NEEDED = {
    "fs/read_text_file": ("fs", "readTextFile"),
    "fs/write_text_file": ("fs", "writeTextFile"),
}
"""Method of a client → the capability that says it is there."""


def negotiated(params: Mapping[str, Any]) -> int:
    """The version to answer to a client's ``initialize``.

    Raises:
        RequestError: ``protocolVersion`` is missing, or no whole number of at least 0.
    """
    requested = params.get("protocolVersion")
    # JSON's true is Python's 1.
    if not isinstance(requested, int) or isinstance(requested, bool) or requested < 0:
        raise invalid_params("protocolVersion must be a whole number")
    return requested if requested in SUPPORTED else max(SUPPORTED)


def client_capabilities(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capabilities that the client declares; empty if it declares none.

    Raises:
        RequestError: ``clientCapabilities`` is no object.
    """
    value = params.get("clientCapabilities")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_params("clientCapabilities must be an object")
    return cast("dict[str, Any]", value)


def may_be_called(method: str, params: Mapping[str, Any], declared: Mapping[str, Any]) -> bool:
    if method in NEEDED:
        group, member = NEEDED[method]
        return members_of(declared.get(group)).get(member) is True
    if method.startswith("terminal/"):
        return declared.get("terminal") is True
    if method == "elicitation/create":
        modes, mode = declared.get("elicitation"), params.get("mode")
        return isinstance(modes, dict) and isinstance(
            cast("dict[object, Any]", modes).get(mode), dict
        )
    # A permission can always be asked for; of an extension's method nothing is known here.
    return method == "session/request_permission" or method.startswith("_")


def with_ours(
    result: Mapping[str, Any],
    version: int,
    *,
    connects_servers: bool,
    survives: bool,
    forks: bool,
) -> dict[str, Any]:
    """The agent's answer to ``initialize``, with what the layer adds.

    Args:
        result: The agent's.
        version: The negotiated version.
        connects_servers: Whether the layer connects the MCP servers.
        survives: Whether the store keeps conversations over a restart. A client that reads
            ``loadSession`` counts on that.
        forks: Whether a copy of a conversation is one that the agent knows.
    """
    declared = members_of(result.get("agentCapabilities"))
    sessions = dict(members_of(declared.get("sessionCapabilities")))
    provided = ["resume", "list", "close", "delete"]
    if forks:
        provided.append("fork")
    else:
        sessions.pop("fork", None)
    ours: dict[str, Any] = {
        **declared,
        "loadSession": survives,
        "sessionCapabilities": {
            **sessions,
            **{
                name: members_of(sessions.get(name))  # also what the agent says about it
                for name in provided
            },
        },
    }
    if connects_servers:
        servers = members_of(declared.get("mcpCapabilities"))
        ours["mcpCapabilities"] = {**servers, "http": True, "sse": True}
    return {**result, "protocolVersion": version, "agentCapabilities": ours}
