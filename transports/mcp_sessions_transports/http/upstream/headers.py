"""The HTTP headers that repeat what a request of the modern era is."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final

from mcp_sessions.server.upstream.external.modern import NAMED

_PLAIN: Final = re.compile(r"(?!=\?base64\?)(?! )[\x20-\x7e]*(?<! )")


def headers_of(message: Mapping[str, Any]) -> dict[str, str]:
    """Of a request."""
    method: str = message["method"]
    headers = {"mcp-method": method}
    name: object = message["params"].get(NAMED.get(method))
    if isinstance(name, str):
        encoded = base64.b64encode(name.encode("utf-8", "replace")).decode()
        headers["mcp-name"] = name if _PLAIN.fullmatch(name) else f"=?base64?{encoded}?="
    return headers
