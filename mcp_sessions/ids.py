"""Names of things: each kind of id is its own type, so that none can stand in for another.

Nothing here mints an id (``security.py`` does, it needs randomness); here is only what an
id looks like and how it is read.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import NewType

SessionId = NewType("SessionId", str)
"""Names a session on the wire: 0x21–0x7E, at least 256 random bits. A credential where
there is no other; log :func:`digest` of it, never the id."""

SessionEventId = NewType("SessionEventId", str)
"""``<log epoch>-<number>``, fixed width, so that byte order is the order of issue."""

ConnectionId = NewType("ConnectionId", str)
"""Names one connection inside the server; a transport-mode session's own id over HTTP."""

FencingEpoch = NewType("FencingEpoch", int)
"""Counts the attachments of one session. The newest is the only one that may write."""

LogEpoch = NewType("LogEpoch", str)
"""Names one incarnation of an event log: 13 digits of milliseconds, then 6 random digits."""

RequestKey = NewType("RequestKey", str)
"""A client's own name for a request that must run at most once in its session."""

StreamName = NewType("StreamName", str)
"""Names one event log inside a session."""

EVENTS = StreamName("events")
"""The log of a protocol-mode session's events."""

GET_STREAM = StreamName("get")
"""The log of a transport-mode session's GET stream."""

NUMBER_WIDTH = 12
_EPOCH_WIDTH = 19
_EVENT_ID = re.compile(rf"([0-9]{{{_EPOCH_WIDTH}}})-([0-9]{{{NUMBER_WIDTH}}})", re.ASCII)
_PROCESS = re.compile(r".+@(process-[A-Za-z0-9_-]{1,64})", re.ASCII)
_VERSION = re.compile(r"process-v([0-9]{1,9})-", re.ASCII)
SESSION_ID = re.compile(r"[\x21-\x7e]{1,1024}", re.ASCII)
"""What a session's id looks like. :func:`parse_session_id` reads one."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in an event log: the log, and the number of an event.

    The two are one value. A number from another log would look valid as soon as the new
    log grew past it, and everything up to it would be lost in silence (CUP8).
    """

    log_epoch: LogEpoch
    number: int
    """The last event before this position; 0 is the position before the first event."""

    def event_id(self) -> SessionEventId:
        return SessionEventId(f"{self.log_epoch}-{self.number:0{NUMBER_WIDTH}d}")


IN_NO_LOG = Position(LogEpoch("9" * _EPOCH_WIDTH), 0)
"""The value for a text that is no position: no log ever had it."""


def parse_position(text: str) -> Position | None:
    match = _EVENT_ID.fullmatch(text)
    if match is None:
        return None
    return Position(LogEpoch(match[1]), int(match[2]))


def position_of(event_id: str) -> Position:
    position = parse_position(event_id)
    if position is None:
        raise AssertionError("the store read from this position")
    return position


def parse_session_id(value: object) -> SessionId | None:
    if isinstance(value, str) and SESSION_ID.fullmatch(value):
        return SessionId(value)
    return None


def process_of(name: str) -> str | None:
    """The process in the name of something that lives in one (a WebSocket, a response
    stream, a request to a client), or None: it lives in the store, or says nothing.
    """
    match = _PROCESS.fullmatch(name)
    return match[1] if match is not None else None


def version_of(process: str) -> int | None:
    """Return the version of the messages that a process sends. None: its name does not have it."""
    match = _VERSION.match(process)
    return int(match[1]) if match is not None else None


def replica_name(process: str) -> str:
    """Return a few characters of a process's name, which are found in it."""
    return process.removeprefix("process-").partition("-")[2][:8] or "-"


DIGEST_LENGTH = 12


def digest(session_id: str) -> str:
    """Twelve hexadecimal digits that name a session in logs and metrics.

    The digest is not the credential: it cannot be used to resume (SEC2).
    """
    return name_for_handlers(session_id)[:DIGEST_LENGTH]


def name_for_handlers(session_id: str) -> str:
    """64 hexadecimal digits that name a session, always the same, to code that may log them: they
    open nothing either. The first twelve are its :func:`digest`.
    """
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()
