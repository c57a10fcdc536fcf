"""Decide which sessions get an event for a change of the server (EVT1)."""

from __future__ import annotations

from collections.abc import Collection

from mcp_sessions.core.states import Mode


def is_entitled(
    mode: Mode,
    *,
    uri: str | None,
    listed: str | None,
    is_subscribed: bool,
    lists: Collection[str] | None,
    carries: bool,
) -> bool:
    """Whether a session gets a change.

    Args:
        mode: The session's.
        uri: The resource that was updated; None: a list changed.
        listed: The list that changed; None: a resource did.
        is_subscribed: Whether the session is subscribed to ``uri``.
        lists: The list changes that the session asked for; None: all.
        carries: Transport-mode: whether its GET stream carries other sessions' events, among
            which are those of list changes.
    """
    if mode not in (Mode.PROTOCOL, Mode.TRANSPORT):
        return False
    if uri is not None:
        return is_subscribed  # EVT1
    if mode is Mode.TRANSPORT:
        return not carries
    return lists is None or listed in lists  # EVT1
