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


COME_BACK: dict[CloseCode, bool] = {
    CloseCode.NORMAL: False,
    CloseCode.GOING_AWAY: True,
    CloseCode.UNSUPPORTED_DATA: False,
    CloseCode.POLICY_VIOLATION: False,
    CloseCode.TOO_BIG: False,
    CloseCode.INTERNAL_ERROR: True,
    CloseCode.SERVICE_RESTART: True,
    CloseCode.TRY_AGAIN_LATER: True,
}
"""Whether the same client, doing the same, may hope for better. After 1008 only with
another credential."""


def should_come_back(code: int | None) -> bool:
    """Whether to reconnect after that code; None: the connection broke without one.

    An unknown code is a server's that knows more than we do: come back, with back-off.
    """
    try:
        return COME_BACK[CloseCode(code if code is not None else CloseCode.GOING_AWAY)]
    except ValueError:
        return True
