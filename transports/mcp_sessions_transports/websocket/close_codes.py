from __future__ import annotations

from enum import IntEnum


class CloseCode(IntEnum):
    """RFC 6455, 7.4.1, as we use it."""

    NORMAL = 1000
    GOING_AWAY = 1001
    UNSUPPORTED_DATA = 1003
    """A binary frame: messages are text."""

    POLICY_VIOLATION = 1008
    """The credential is good no more, or the client said nothing."""

    TOO_BIG = 1009
    INTERNAL_ERROR = 1011
    SERVICE_RESTART = 1012
    """The server drains."""

    TRY_AGAIN_LATER = 1013
    """The client took nothing for too long, or too many connections are open."""


FINAL = frozenset(
    (CloseCode.NORMAL, CloseCode.UNSUPPORTED_DATA, CloseCode.POLICY_VIOLATION, CloseCode.TOO_BIG)
)
"""Codes after which the same client would fail in the same way. After 1008 another credential may
help.
"""


def should_come_back(code: int | None) -> bool:
    """Whether to reconnect after that code; None: the connection broke without one.

    An unknown code is a server's that knows more than we do: come back, with back-off.
    """
    return code not in FINAL
