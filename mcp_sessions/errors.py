"""The tree of errors, by the side that caused them.

::

    SessionsError
    ├── ConfigurationError      the operator: a setting that cannot be served
    │   └── StoreInUse          another process serves from the same file
    ├── SessionRequired         the handler: it asked for a session outside of one
    ├── DataConflict            the handler: somebody else changed session.data first
    ├── StateTooLarge           the handler: the client is not asked to keep that much
    ├── WireError               the peer: refused, with a JSON-RPC code for the answer
    │   ├── SessionNotFound     -32043  unknown, expired, ended or somebody else's
    │   ├── SessionRequiredByServer -31044  the server gated this method or tool
    │   ├── SessionDetached     -31010  this connection was displaced
    │   ├── LimitReached        -31011  sessions per process or principal, keys per session
    │   ├── OutcomeUnknown      -31012  started, and nobody can know how it ended
    │   ├── InvalidParams       -32602  malformed params or metadata
    │   │   └── InvalidState -32602 a ``state`` that is not one of ours; one text for each cause
    │   └── InvalidRequest      -32600  mode_conflict, key_reused, duplicate_id
    └── StoreUnavailable        the store: unknown whether the last write happened
        ├── StoreRefused        it is there and refuses: full, read-only, a wrong password
        └── NotBegun            it failed before a request began

Sentences hold nothing secret: no session id, no token, no key.
"""

from __future__ import annotations

import math
from enum import Enum, IntEnum
from typing import Any

SESSION_NOT_FOUND = -32043
SESSION_REQUIRED = -31044
SESSION_DETACHED = -31010
LIMIT_REACHED = -31011
OUTCOME_UNKNOWN = -31012

KEY_BYTES = "request_key_bytes"
"""The limit of a session's request keys, in ``data.limit`` of -31011."""

STORE_UNAVAILABLE = "store_unavailable"
"""``data.reason`` of a request that the store failed (ERR17)."""

HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
"""The protocol's: a header is not what the body says, and a client lacks a capability."""

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

REQUEST_CANCELLED = -32800
"""The SDK's answer to a cancelled request on the handshake era's HTTP wire, which ends a
response stream with a response only."""


class Refusal(Enum):
    """Why a resume replays nothing; the value is the wire's ``reason``."""

    NO_POSITION = "no_position"
    EVICTED = "evicted"
    EXPIRED = "expired"
    UNKNOWN_POSITION = "unknown_position"
    AHEAD = "ahead"
    LOG_REPLACED = "log_replaced"
    NO_STREAM = "no_stream"


class Detached(Enum):
    """Why a connection lost a session; the value is the wire's ``reason``."""

    TAKEN_OVER = "taken_over"
    DRAINING = "draining"
    EVICTED = "evicted"


class InvalidReason(Enum):
    """``data.reason`` of an Invalid Request of ours; the value is the wire's spelling."""

    MODE_CONFLICT = "mode_conflict"
    KEY_REUSED = "key_reused"
    DUPLICATE_ID = "duplicate_id"


class Status(IntEnum):
    """HTTP statuses that we answer with, by the name of their cause."""

    OK = 200
    ACCEPTED = 202
    BAD_REQUEST = 400
    NOT_FOUND = 404


class SessionsError(Exception):
    """The root: everything that this library raises on purpose."""


class ConfigurationError(SessionsError):
    """A setting, a store URL or a wrapped server that cannot be served as it is."""


class StoreInUse(ConfigurationError):
    """A store that serves one process at a time serves another one, which the text names."""


class SessionRequired(SessionsError):
    """``current_session()`` was called outside of a session."""

    def __str__(self) -> str:
        return (
            "this request belongs to no session: call current_session(default=None) if that may be"
        )


class DataConflict(SessionsError):
    """``session.data`` was changed by somebody else during the edit; nothing was stored."""

    def __str__(self) -> str:
        return (
            "another request changed session.data during this edit, and nothing was stored: "
            "read it again, and repeat the edit"
        )


class StateTooLarge(SessionsError):
    """``session.state`` would make a token larger than the limit; nothing was changed.

    Args:
        size: Characters that the token would have.
        limit: Characters that it may have.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"session.state is too large: its token would have {self.size} characters of at most "
            f"{self.limit}; keep large values in session.data"
        )


class StoreUnavailable(SessionsError):
    """The store did not answer; whether its last write happened is unknown."""

    @property
    def client_text(self) -> str:
        """The text for clients. It names no address, no file and no secret."""
        return "the session store is away"


class StoreRefused(StoreUnavailable):
    """The store is there and refuses: it is full, read-only or damaged, or wants other credentials.
    The text says which, and what to do.

    Args:
        why: The reason in one word, for clients; None: the log alone says it.
    """

    def __init__(self, text: str, why: str | None = None) -> None:
        super().__init__(text)
        self.why = why

    @property
    def client_text(self) -> str:
        because = f" ({self.why})" if self.why is not None else ""
        return f"the session store refuses requests{because}"


class NotBegun(StoreUnavailable):
    """The store failed before a request began. The request may be sent again.

    Args:
        failed: The store's failure.
    """

    def __init__(self, failed: StoreUnavailable) -> None:
        super().__init__(str(failed))
        self._client_text = failed.client_text

    @property
    def client_text(self) -> str:
        return self._client_text


class WireError(SessionsError):
    """The peer gets this refusal as a JSON-RPC error.

    Args:
        data: The error's ``data`` member; holds nothing that the peer did not send.
        status: The HTTP status, where the answer goes over HTTP.
    """

    code: int = INTERNAL_ERROR
    message: str = "Internal error"

    def __init__(self, data: dict[str, Any] | None = None, *, status: int = Status.OK) -> None:
        # Not ``data``: it may hold a session id, and an exception's repr ends up in logs.
        super().__init__(self.code)
        self.data = data
        self.status = status

    def __str__(self) -> str:
        return self.message


class SessionNotFound(WireError):
    """Unknown, expired, ended or somebody else's: one answer for all four (ERR2).

    Args:
        session_id: What the caller sent, as it sent it.
        status: 404 where 2025-11-25 demands it.
    """

    code = SESSION_NOT_FOUND
    message = "Session not found"

    def __init__(self, session_id: str, *, status: int = Status.OK) -> None:
        super().__init__({"sessionId": session_id}, status=status)


class SessionRequiredByServer(WireError):
    """The server gated this method or tool and the request has no protocol-mode session."""

    code = SESSION_REQUIRED
    message = "Session required"


class SessionDetached(WireError):
    """Another connection took the current session of this one."""

    code = SESSION_DETACHED
    message = "Session detached"


class LimitReached(WireError):
    """A limit of ``SessionPolicy`` is reached.

    Args:
        limit: Its name; ``data.limit``.
        most: How large it is; ``data.max``.
        retry_after: Seconds after which the same request may be served; ``data.retryAfter``. None:
            time alone changes nothing.
    """

    code = LIMIT_REACHED
    message = "Limit reached"

    def __init__(self, limit: str, most: float, retry_after: float | None = None) -> None:
        data: dict[str, Any] = {"limit": limit, "max": most}
        if retry_after is not None:
            data["retryAfter"] = math.ceil(retry_after)
        super().__init__(data)
        self.limit = limit
        self.most = most
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.message}: {self.limit} is {self.most}"


class OutcomeUnknown(WireError):
    """The request was started and nobody can know how it ended. It was not run again."""

    code = OUTCOME_UNKNOWN
    message = "Outcome unknown"


class InvalidParams(WireError):
    """Malformed params or metadata.

    Args:
        explanation: The wrong member, in words; goes into ``message``.
        reason: ``data.reason``, where the protocol names one.
    """

    code = INVALID_PARAMS
    message = "Invalid params"

    def __init__(self, explanation: str, *, reason: str | None = None) -> None:
        super().__init__({"reason": reason} if reason else None)
        self.message = f"Invalid params: {explanation}"


class InvalidRequest(WireError):
    """A request that contradicts what went before; ``data.reason`` says how."""

    code = INVALID_REQUEST

    def __init__(self, reason: InvalidReason, explanation: str, *, status: int = Status.OK) -> None:
        super().__init__({"reason": reason.value}, status=status)
        self.message = f"Invalid request: {explanation}"


class InvalidState(InvalidParams):
    """A ``state`` token that is forged, foreign, truncated, expired or oversized.

    The wire has one text for every cause; ``cause`` is for the log.
    """

    def __init__(self, cause: str) -> None:
        super().__init__("the session's state is not valid", reason="invalid_state")
        self.cause = cause
