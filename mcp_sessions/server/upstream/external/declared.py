"""Remember the arguments that a wrapped server wants repeated in headers, from its lists of tools.

An intermediary may trust such a header only because the server refuses a request in which the
header and the body differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from mcp_sessions.core.messages import encode, entries_of, members_of
from mcp_sessions.core.recent import Recent

_KEY: Final = b'"x-mcp-header"'
_TOOLS: Final = 1_000
_BYTES: Final = 65_536
"""Bytes of the input schema of one tool, at most."""


class DeclaredHeaders:
    def __init__(self) -> None:
        self._schemas = Recent[str, Mapping[str, Any]](_TOOLS)

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
