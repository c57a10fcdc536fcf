"""The HTTP headers that repeat the facts of a modern request.

A tool's input schema says which arguments they repeat (``x-mcp-header``), so a caller must have
read it.

An intermediary may trust such a header only because the server refuses a request in which the
header and the body differ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, cast

from mcp_sessions.core.messages import encode, entries_of, members_of
from mcp_sessions.core.named import header_value, repeated_name
from mcp_sessions.core.recent import Recent
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.upstream.sdk.sdk_modern_rules import param_headers

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_KEY: Final = b'"x-mcp-header"'
_SCHEMAS: Final = 1_000
"""Schemas that are kept, at most."""

_BYTES: Final = 65_536
"""Bytes of the input schema of one tool, at most."""


def headers_of(message: Mapping[str, Any]) -> dict[str, str]:
    method: str = message["method"]
    headers = {"mcp-method": method}
    name = repeated_name(method, message["params"])
    if name is not None:
        headers["mcp-name"] = header_value(name)
    return headers


class DeclaredHeaders:
    """The input schemas of the tools whose arguments headers repeat."""

    def __init__(self) -> None:
        self._schemas = Recent[str, Mapping[str, Any]](_SCHEMAS)
        self._is_said = False

    def schema_of(self, tool: str) -> Mapping[str, Any] | None:
        return self._schemas.get(tool)

    def headers_for(self, params: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that repeat the arguments of a call."""
        name: object = params.get("name")
        schema = self._schemas.get(name) if isinstance(name, str) else None
        return param_headers(schema, members_of(params.get("arguments"))) if schema else {}

    def learn(self, result: Mapping[str, Any]) -> None:
        for members in map(members_of, entries_of(result.get("tools"))):
            name, schema = members.get("name"), members.get("inputSchema")
            if not isinstance(name, str):
                continue
            self._schemas.pop(name, None)
            said = encode(schema)
            if not isinstance(schema, dict) or _KEY not in said:
                continue
            if len(said) <= _BYTES:
                self._schemas.keep(name, cast("dict[str, Any]", schema))
            elif not self._is_said:
                self._is_said = True
                text = "no header repeats arguments of tool %.200r: its schema has over %d bytes"
                logger.warning(text, name, _BYTES)
