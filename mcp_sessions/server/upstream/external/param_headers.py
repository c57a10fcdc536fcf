"""The HTTP headers that repeat the facts of a modern request: built, and known of its tools.

A tool's input schema says which arguments they repeat (``x-mcp-header``), so a caller must have
read it.

An intermediary may trust such a header only because the server refuses a request in which the
header and the body differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from mcp_sessions.core.messages import encode, entries_of, members_of
from mcp_sessions.core.named import header_value, repeated_name
from mcp_sessions.core.recent import Recent

_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ANNOTATION: Final = "x-mcp-header"
_TYPES: Final = frozenset({"string", "integer", "boolean"})
_TOOLS: Final = 1_000
"""Those whose headers are kept in mind, of one child."""

ArgumentPath = tuple[str, ...]


def headers_of(message: Mapping[str, Any]) -> dict[str, str]:
    method: str = message["method"]
    headers = {"mcp-method": method}
    name = repeated_name(method, message["params"])
    if name is not None:
        headers["mcp-name"] = header_value(name)
    return headers


class ParamHeaders:
    def __init__(self) -> None:
        self._tools = Recent[str, Mapping[ArgumentPath, str]](_TOOLS)

    def learn(self, listed: Mapping[str, Any]) -> None:
        for tool in entries_of(listed.get("tools")):
            members = members_of(tool)
            name, found = members.get("name"), _annotated(members.get("inputSchema"))
            if not isinstance(name, str):
                continue
            self._tools.pop(name, None)
            if found:
                self._tools.keep(name, found)

    def headers_for(self, params: Mapping[str, Any]) -> dict[str, str]:
        name: object = params.get("name")
        annotated = self._tools.get(name) if isinstance(name, str) else None
        headers: dict[str, str] = {}
        for path, token in (annotated or {}).items():
            value: object = params.get("arguments")
            for step in path:
                value = members_of(value).get(step)
            text = _text(value)
            if text is not None:
                headers[f"mcp-param-{token.lower()}"] = header_value(text)
        return headers


def _annotated(schema: object) -> dict[ArgumentPath, str]:
    """Return the arguments that headers repeat, and the header of each.

    If one of them is invalid, return none: clients that heed the annotations do not call such a
    tool.
    """
    found: dict[ArgumentPath, str] = {}
    waiting: list[tuple[ArgumentPath, object]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        members = members_of(node)
        if _ANNOTATION in members:
            token: object = members[_ANNOTATION]
            # A list of types is none of them, and can be no key.
            kind: object = members.get("type")
            if not (path and isinstance(token, str) and _TOKEN.fullmatch(token)):
                return {}
            if not (isinstance(kind, str) and kind in _TYPES):
                return {}
            if token.lower() in {known.lower() for known in found.values()}:
                return {}
            found[path] = token
        properties = members_of(members.get("properties"))
        waiting.extend(((*path, name), each) for name, each in properties.items())
    return found


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int, float)):
        return None
    try:
        return str(value)
    except ValueError:
        # A number with too many digits for Python.
        return None


_KEY: Final = b'"x-mcp-header"'
_SCHEMAS: Final = 1_000
_BYTES: Final = 65_536
"""Bytes of the input schema of one tool, at most."""


class DeclaredHeaders:
    def __init__(self) -> None:
        self._schemas = Recent[str, Mapping[str, Any]](_SCHEMAS)

    def schema_of(self, tool: str) -> Mapping[str, Any] | None:
        return self._schemas.get(tool)

    def learn(self, result: Mapping[str, Any]) -> None:
        for members in map(members_of, entries_of(result.get("tools"))):
            name, schema = members.get("name"), members.get("inputSchema")
            if not isinstance(name, str):
                continue
            self._schemas.pop(name, None)
            said = encode(schema)
            if isinstance(schema, dict) and _KEY in said and len(said) <= _BYTES:
                self._schemas.keep(name, cast("dict[str, Any]", schema))
