"""Name response streams, in their store and in the SSE ids that clients send back.

1. A name has the process that runs the request, and the scopes that reading it takes. So any
   process can check them without asking (SEC3). A forged name gains nothing: no stream has it.
2. An SSE id names its request, so that a client with a long forgotten stream can still be
   answered (HTL11).
3. A header that is no id of ours, or longer than any, is an unknown position (HTL9): no store is
   asked for it (ERR6).
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.messages import RequestId, decode, encode
from mcp_sessions.ids import StreamName, parse_position
from mcp_sessions.security import mint_connection_id

MAX_EVENT_ID = 8_192
"""Bytes of a ``Last-Event-ID`` that is looked at."""

MAX_REQUEST_ID = 512
"""Characters of a request's id in an SSE id: however it is spelled, that is then no longer than
``MAX_EVENT_ID``."""

_MAX_SCOPES = 512
"""Characters in a name for scopes; of more it has a digest."""

_NAME = re.compile(r"post(?:~([A-Za-z0-9_=-]{1,600})~)?-[A-Za-z0-9_@-]{1,256}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PostPosition:
    stream: StreamName
    event_id: str
    request_id: RequestId


def post_stream_name(process: str | None, beyond: frozenset[str]) -> StreamName:
    """Make the name of a new response stream.

    Args:
        process: The process that runs its request.
        beyond: The scopes of who sent the request that are not needed for its transport
            session anyway.
    """
    kind = f"post~{_spelled(beyond)}~" if beyond else "post"
    return StreamName(mint_connection_id(kind, process))


def may_read(stream: StreamName, beyond: frozenset[str]) -> bool:
    """Whether the reader's scopes suffice for a stream.

    Args:
        beyond: The reader's, but for those that its transport session needs anyway.
    """
    match = _NAME.fullmatch(stream)
    spelled = match[1] if match is not None else None
    if spelled is None:
        return True
    if spelled.startswith("="):
        # Too many to be distinguished: the very same.
        return spelled == _spelled(beyond)
    needed: Any = _unwrapped(spelled)
    return isinstance(needed, list) and beyond.issuperset(needed)  # pyright: ignore[reportUnknownArgumentType]


def post_position_of(last_event_id: str) -> PostPosition | None:
    if len(last_event_id) > MAX_EVENT_ID:
        return None
    position_text, dot, encoded = last_event_id.partition(".")
    stream, slash, event_id = position_text.partition("/")
    if not dot or not slash or parse_position(event_id) is None or not _NAME.fullmatch(stream):
        return None
    request_id = _unwrapped(encoded)
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int)):
        return None
    return PostPosition(StreamName(stream), event_id, request_id)


def post_event_id(stream: StreamName, event_id: str, request_id: RequestId) -> str:
    return f"{stream}/{event_id}.{_wrapped(encode(request_id))}"


def _spelled(scopes: frozenset[str]) -> str:
    text = encode(sorted(scopes))
    spelled = _wrapped(text)
    return spelled if len(spelled) <= _MAX_SCOPES else "=" + hashlib.sha256(text).hexdigest()


def _wrapped(text: bytes) -> str:
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def _unwrapped(text: str) -> Any:
    try:
        return decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        return None
