"""What a JSON-RPC message is about that is too large to be kept: its ``id``, its ``method``.

Found while its bytes go by: no more is kept of them than `KEPT`.
"""

from __future__ import annotations

import re
from typing import Any

from mcp_sessions.core.messages import RequestId, decode, id_of, members_of

KEPT = 8_192
"""Bytes of the outermost members that are kept; more than that, and nothing is known."""

_IN_STRING = re.compile(rb'["\\]')
_OUTSIDE = re.compile(rb'["{}\[\]]')


class Outline:
    """One message: its outermost members, with whatever they hold left out."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kept", "size")

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the message so far."""

        self._kept = bytearray()
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the message."""
        self.size += len(data)
        at = 0
        while at < len(data):
            if self._escaped:
                self._escaped = False
                self._keep(data, at, at + 1)
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(data, at)
            if found is None:
                self._keep(data, at, len(data))
                return
            place = found.start()
            self._keep(data, at, place)
            at = place + 1
            match data[place:at]:
                case b'"':
                    self._in_string = not self._in_string
                case b"\\":
                    self._escaped = True
                case b"{" | b"[":
                    self._keep(data, place, at)
                    self._depth += 1
                    continue
                case _:
                    self._depth -= 1
            self._keep(data, place, at)

    def _keep(self, data: bytes, start: int, end: int) -> None:
        if self._depth <= 1 and len(self._kept) <= KEPT:
            self._kept += data[start : min(end, start + KEPT + 1)]

    def _members(self) -> dict[str, Any]:
        if len(self._kept) > KEPT:
            return {}
        try:
            return members_of(decode(bytes(self._kept)))
        except ValueError:
            return {}

    @property
    def id(self) -> RequestId | None:
        """Its id; None: it has none, or it could not be found."""
        return id_of(self._members())

    @property
    def has_method(self) -> bool:
        """It is a request or a notification; False: an answer, or what could not be found out."""
        return "method" in self._members()
