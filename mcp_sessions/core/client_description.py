"""Store a client's description of itself, and bound its size.

A client describes itself once, in its handshake. Another process must be able to serve its session,
so the description is stored. The client decides what it sends. Members that no code reads are
dropped, and the rest has a bound.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mcp_sessions.core.messages import encode, members_of

MEMBERS = ("protocolVersion", "capabilities", "clientInfo")
"""The stored params of ``initialize``: they are enough to make the connection again."""

ENVELOPE = frozenset(
    f"io.modelcontextprotocol/{name}"
    for name in ("protocolVersion", "clientInfo", "clientCapabilities", "logLevel")
)
"""The description in ``params._meta`` of each request of the modern era."""

ASKED_FOR = ("sampling", "elicitation", "roots")
"""Capabilities that decide whether a client is asked something."""

_NAME = 256
"""Characters of a client's name and version that a protocol-mode session keeps."""


def described(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: params[name] for name in MEMBERS if name in params} if params else {}


def outlined(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a client's description that a protocol-mode session keeps.

    It has the client's capabilities to answer questions, and its name for people. Each later client
    of the session sends its own description.
    """
    if params is None:
        return None
    declared, info = members_of(params.get("capabilities")), members_of(params.get("clientInfo"))
    outline: dict[str, Any] = {"capabilities": {name: {} for name in ASKED_FOR if name in declared}}
    named = {name: info[name] for name in ("name", "version") if isinstance(info.get(name), str)}
    if named:
        outline["clientInfo"] = {name: text[:_NAME] for name, text in named.items()}
    return outline


def size_of(params: Mapping[str, Any] | None) -> int:
    """Bytes of a description, as JSON. A description with too many levels to be written counts as
    larger than any bound.
    """
    try:
        return len(encode(params)) if params else 0
    except TypeError:
        return sys.maxsize
