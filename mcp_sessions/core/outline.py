"""Find the ``id`` and the ``method`` of a JSON-RPC message that cannot be read whole.

Some messages are too large, and some are not JSON. The outline is found while the bytes
pass. No more is kept of them than `KEPT`.

A message that has a result or an error counts as an answer, whatever else it has: some servers
write the request into their answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from mcp_sessions.core.messages import RequestId, id_of

KEPT = 8_192
"""Bytes of the outermost members that are kept; more than that, and nothing is known."""

_DIGITS: Final = 18
"""The most digits of a number that can be an id."""

_BOM: Final = b"\xef\xbb\xbf"
_IN_STRING = re.compile(rb'["\\]')
_OUTSIDE = re.compile(rb'["{}\[\]]')
_TOKEN = re.compile(rb'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+)', re.DOTALL)


class Outline:
    """One message: its outermost members, with whatever they hold left out. Bytes after its end are
    ignored.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_kept", "is_whole", "size")

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the message so far."""

        self._kept = bytearray()
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_whole = False
        """Its end is known."""

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        at = 0
        while at < len(data) and not self.is_whole:
            if self._escaped:
                self._escaped = False
                self._keep(data, at, at + 1)
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(data, at)
            if found is None:
                self._keep(data, at, len(data))
                return
            position = found.start()
            self._keep(data, at, position)
            at = position + 1
            match data[position:at]:
                case b'"':
                    self._in_string = not self._in_string
                case b"\\":
                    self._escaped = True
                case b"{" | b"[":
                    self._keep(data, position, at)
                    self._depth += 1
                    continue
                case _:
                    self._depth -= 1
                    self.is_whole = self._depth <= 0
            self._keep(data, position, at)

    def _keep(self, data: bytes, start: int, end: int) -> None:
        if self._depth <= 1 and len(self._kept) <= KEPT:
            self._kept += data[start : min(end, start + KEPT + 1)]

    def _members(self) -> dict[str, Any]:
        """The outermost members, also of a message that broke off. A null member is left out."""
        if len(self._kept) > KEPT:
            return {}
        tokens = [found[1] for found in _tokens(bytes(self._kept).removeprefix(_BOM))]
        if tokens[:1] != [b"{"]:
            return {}
        depth, members = 0, dict[str, Any]()
        for at, token in enumerate(tokens):
            is_name = depth == 1 and token.startswith(b'"') and tokens[at + 1 : at + 2] == [b":"]
            if is_name:
                # If it breaks off in a value, there is one.
                value = _value(tokens[at + 2]) if at + 2 < len(tokens) else True
                if value is not None:
                    members[str(_value(token))] = value
            elif token in (b"{", b"["):
                depth += 1
            elif token in (b"}", b"]"):
                depth -= 1
        return members

    @property
    def id(self) -> RequestId | None:
        return id_of(self._members())

    @property
    def has_method(self) -> bool:
        """Whether it is a request or a notification; False: an answer, or unknown."""
        members = self._members()
        return "method" in members and not _answers(members)

    @property
    def is_answer(self) -> bool:
        """Whether it is an answer; False: a request or a notification, or unknown."""
        return _answers(self._members())


def _answers(members: dict[str, Any]) -> bool:
    return "result" in members or "error" in members


def _tokens(kept: bytes) -> Iterator[re.Match[bytes]]:
    at = 0
    while (found := _TOKEN.match(kept, at)) is not None:
        yield found
        at = found.end()


def _value(token: bytes) -> Any:
    """A string, or a whole number that is not too long; None: null; True: anything else."""
    if token == b"null":
        return None
    if token.startswith(b'"') or len(token) <= _DIGITS:
        try:
            value: object = json.loads(token)
        except ValueError:
            return True
        if isinstance(value, (str, int)):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return True
