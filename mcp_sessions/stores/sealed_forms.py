"""How an encrypted store seals what it keeps and what it sends, and opens it again.

::

    ff | 01 or 02 | length of the next (4) | key id (8) | nonce (12) | ciphertext | tag (16)

No JSON text begins with ``ff``. ``01`` opens in its place, and ``02`` in each session. The parts of
an event are sealed: the store below gives the id that stands between two of them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.messages import encode
from mcp_sessions.errors import InvalidState, StoreRefused
from mcp_sessions.ids import SessionId, StreamName
from mcp_sessions.sealing import Binding, SealedValues
from mcp_sessions.stores.sql.session_rows import loads

_IN_ITS_PLACE = b"\xff\x01"
_IN_EACH_SESSION = b"\xff\x02"
_HEADER = 6

OVERHEAD = _HEADER + SealedValues.OVERHEAD
"""Bytes that a sealed answer has more. An event has up to nine more."""

MEMBER = "mcp_sessions.sealed"
"""The one member of sealed data, and of sealed state."""

_CHANGE: Binding = ("change",)
MESSAGE: Binding = ("message",)


class Sealing:
    values: SealedValues
    """They are there once the store is open."""

    def seal(self, value: bytes, binding: Binding, kind: bytes = _IN_ITS_PLACE) -> bytes:
        sealed = self.values.seal(value, binding=binding)
        return kind + len(sealed).to_bytes(4, "big") + sealed

    def open(self, stored: bytes, binding: Binding) -> bytes:
        """Return the value; ``stored`` itself if it is not sealed.

        Raises:
            StoreRefused: It cannot be opened.
        """
        if not stored.startswith((_IN_ITS_PLACE, _IN_EACH_SESSION)):
            return stored
        end = _HEADER + int.from_bytes(stored[2:_HEADER], "big")
        try:
            if end != len(stored) and (end > len(stored) or stored.startswith(_IN_ITS_PLACE)):
                raise InvalidState("changed")
            return self.values.open(stored[_HEADER:end], binding=binding)
        except InvalidState as failed:
            raise StoreRefused(f"a value cannot be decrypted: {failed.cause}") from failed

    def members(self, values: Mapping[str, Any], binding: Binding) -> dict[str, str]:
        return {MEMBER: base64.b64encode(self.seal(encode(dict(values)), binding)).decode()}

    def members_of(self, stored: Mapping[str, Any], binding: Binding) -> dict[str, Any]:
        """Raises:
        StoreRefused: They cannot be opened.
        """
        values = dict(stored)
        try:
            sealed = base64.b64decode(values[MEMBER], validate=True)
        except (LookupError, ValueError, TypeError):
            return values
        if len(values) > 1 or not sealed.startswith(_IN_ITS_PLACE):
            # An application's own, from before the store was encrypted.
            return values
        return loads(self.open(sealed, binding))

    def event(self, session_id: SessionId, stream: StreamName, parts: Sequence[bytes]) -> bytes:
        return self.seal(_joined(parts), ("event", session_id, stream))

    def change(self, parts: Sequence[bytes]) -> bytes:
        return self.seal(_joined(parts), _CHANGE, _IN_EACH_SESSION)

    def opened(self, session_id: SessionId, stream: StreamName, event: LoggedEvent) -> LoggedEvent:
        """Raises:
        StoreRefused: It cannot be opened.
        """
        stored = event.payload
        if stored.startswith(_IN_ITS_PLACE):
            parts = _parts(self.open(stored, ("event", session_id, stream)))
        elif stored.startswith(_IN_EACH_SESSION):
            parts = _parts(self.open(stored, _CHANGE))
        else:
            return event
        match parts:
            case [whole]:
                payload = whole
            case [before, after]:
                payload = before + event.event_id.encode() + after
            case _:
                name = encode(session_id)[1:-1]
                payload = parts[0] + name + parts[1] + event.event_id.encode() + parts[2]
        return event._replace(payload=payload)


def _joined(parts: Sequence[bytes]) -> bytes:
    lengths = [len(part).to_bytes(4, "big") for part in parts[:-1]]
    return b"".join([bytes([len(parts)]), *lengths, *parts])


def _parts(joined: bytes) -> Sequence[bytes]:
    count, at = joined[0], 1 + 4 * (joined[0] - 1)
    parts: list[bytes] = []
    for each in range(count - 1):
        size = int.from_bytes(joined[1 + 4 * each : 5 + 4 * each], "big")
        parts.append(joined[at : at + size])
        at += size
    return [*parts, joined[at:]]
