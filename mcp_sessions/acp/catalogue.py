"""Keep a summary of each conversation, and answer ``session/list`` in pages.

The summary is in the session's ``state``. The store returns it with the session itself, so a list
of conversations reads no record.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, cast

from mcp_sessions.acp.acp_errors import invalid_params
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import digest
from mcp_sessions.stores.records import SessionRecord

CWD = "cwd"
TITLE = "title"
UPDATED_AT = "updatedAt"
DIRECTORIES = "additionalDirectories"
AGENT_SESSION = "agentSession"
"""The agent's own id of the session, which it is asked with when it loads it."""

REPORTED = "reportedServers"
"""The MCP servers whose failure is the last thing that the record says of them."""

PAGE = 50
"""Conversations per page of ``session/list``."""

MAX_TITLE = 80
"""Characters of a title that is made of the first message."""

Key = tuple[float, str]


def at(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")


def used_at(record: SessionRecord) -> float:
    """Return when a conversation was opened or asked last, in seconds since 1970."""
    said = record.state.values.get(UPDATED_AT)
    try:
        return datetime.fromisoformat(str(said)).timestamp()
    except ValueError:
        # It is only just being made.
        return record.life.created_at


def title_of(prompt: Iterable[dict[str, Any]]) -> str | None:
    for block in prompt:
        text = block.get("text")
        if block.get("type") == "text" and isinstance(text, str) and text.strip():
            line = " ".join(text.strip().splitlines()[0].split())
            return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"
    return None


def described(record: SessionRecord) -> dict[str, Any]:
    state = record.state.values
    return {
        "sessionId": record.session_id,
        "cwd": state.get(CWD, ""),
        **{name: state[name] for name in (TITLE, UPDATED_AT, DIRECTORIES) if state.get(name)},
    }


def page(
    records: Iterable[SessionRecord], *, cwd: str | None, cursor: str | None
) -> dict[str, Any]:
    """The answer to ``session/list``: newest first, by when they were made.

    The order never changes: a conversation that is used between two pages is still on exactly one.

    Args:
        records: Every session of whoever asks.
        cwd: Only conversations of this directory; None: all.
        cursor: Where the page before ended; None: the first page.

    Raises:
        RequestError: ``cursor`` is none of ours.
    """
    before = _key_of(cursor) if cursor is not None else None
    wanted = None if cwd is None else os.path.normpath(cwd)
    found = [
        (_key(record), record)
        for record in records
        if record.mode is Mode.AGENT
        # One without a directory is only just being made.
        and record.state.values.get(CWD)
        and (wanted is None or os.path.normpath(str(record.state.values[CWD])) == wanted)
    ]
    found.sort(key=lambda entry: entry[0], reverse=True)
    rest = [entry for entry in found if before is None or entry[0] < before]
    answer: dict[str, Any] = {"sessions": [described(record) for _, record in rest[:PAGE]]}
    if len(rest) > PAGE:
        answer["nextCursor"] = _cursor(rest[PAGE - 1][0])
    return answer


def _key(record: SessionRecord) -> Key:
    return record.life.created_at, digest(record.session_id)


def _cursor(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _key_of(cursor: str) -> Key:
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        value = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError, binascii.Error):
        value = None
    if isinstance(value, list):
        match cast("list[Any]", value):
            case [float() | int() as created_at, str() as short]:
                return float(created_at), short
            case _:
                pass
    raise invalid_params("cursor is none that this agent gave out")
