"""What is kept of what a client says of itself, and how much that may be.

A client describes itself once, in its handshake, and its session must be able to serve it in
another process, so the description is stored. It is the client's to write: what nobody reads is
not kept, and the rest has a bound.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mcp_sessions.core.messages import encode, members_of

MEMBERS = ("protocolVersion", "capabilities", "clientInfo")
"""Of the params of ``initialize``: what a connection that is made again is made from."""

ENVELOPE = frozenset(
    f"io.modelcontextprotocol/{name}"
    for name in ("protocolVersion", "clientInfo", "clientCapabilities", "logLevel")
)
"""Of ``params._meta``: the description that comes with each request of the modern era."""

ASKED_FOR = ("sampling", "elicitation", "roots")
"""Capabilities that decide whether a client is asked something."""

_NAME = 256
"""Characters of a client's name and version that a protocol-mode session keeps."""


def described(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is kept of a handshake for the connection that it made."""
    return {name: params[name] for name in MEMBERS if name in params} if params else {}


def of_envelope(capabilities: object, info: object) -> dict[str, Any]:
    """What a request of the modern era says of its client, under the names of a handshake."""
    client = {"capabilities": capabilities}
    return {**client, "clientInfo": info} if isinstance(info, dict) else client


def outlined(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a protocol-mode session keeps of the client that made it: what that can be asked, and
    its name for people. Whoever uses the session later comes with a description of its own.
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
    """Bytes of a description, as JSON. What nobody can write, since it has too many levels, is
    larger than any bound.
    """
    try:
        return len(encode(params)) if params else 0
    except TypeError:
        return sys.maxsize
