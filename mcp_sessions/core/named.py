"""Say by which member of its params a request names something of the server."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NAMED: Mapping[str, str] = MappingProxyType(
    {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
)
"""Methods whose name a header repeats, and whose result may ask for input (2026-07-28)."""

SUBSCRIBING: Mapping[str, str] = MappingProxyType(
    {"resources/subscribe": "uri", "resources/unsubscribe": "uri"}
)
