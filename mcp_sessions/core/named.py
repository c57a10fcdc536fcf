"""Name the member of the params by which each method names a thing of the server."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from types import MappingProxyType

from mcp_sessions import method_names

NAMED: Mapping[str, str] = MappingProxyType(
    {
        method_names.CALL_TOOL: "name",
        method_names.GET_PROMPT: "name",
        method_names.READ_RESOURCE: "uri",
    }
)
"""Methods whose name a header repeats, and whose result may ask for input (2026-07-28)."""

SUBSCRIBING: Mapping[str, str] = MappingProxyType(
    {method_names.SUBSCRIBE: "uri", method_names.UNSUBSCRIBE: "uri"}
)

_PLAIN = re.compile(r"(?!=\?base64\?)(?! )[\x20-\x7e]*(?<! )")


def header_value(text: str) -> str:
    """Return a text as a header has it. Text that no header may have is encoded."""
    if _PLAIN.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'replace')).decode()}?="
