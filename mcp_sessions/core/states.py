"""Define the life of a session, as a table (SES18).

``TRANSITIONS`` has every change of a session's state. Other changes cannot happen. A session begins
by :data:`BEGINS`. Stores ask it by ``attachment.py``, and the count of ends by ``ends.py``. A store
keeps live sessions only (END2): it forgets a session at ``END`` and ``EXPIRE``, whatever its state.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Final


class Mode(Enum):
    """How a session is named on the wire. It never changes (SES1)."""

    # Not the enum's, which is a call in Python: each request looks something up by its mode.
    __hash__ = object.__hash__

    PROTOCOL = "protocol"
    """Made by ``session/start`` or ``sessions/create``."""

    TRANSPORT = "transport"
    """Made by ``initialize`` over Streamable HTTP, named by ``Mcp-Session-Id``."""

    CONVERSATION = "conversation"
    """Made by the server for a conversation that its client names. No message names the session by
    its id."""

    CONNECTION = "connection"
    """Made by the server for a pipe or a WebSocket, in a store of that connection's own. It never
    expires: it ends with the connection. No message names it."""

    TASK = "task"
    """Made by the server for a call that became a task. Its id is the task's id."""

    KEYS = "keys"
    """Made by the server for the request keys that a host sends outside of sessions. It ends when
    it is unused, and at no other time. No message names it."""

    AGENT = "agent"
    """Made by ACP's ``session/new``. It never expires, and its event log has no bound."""


UNNAMED: Final = frozenset({Mode.CONVERSATION, Mode.TASK, Mode.KEYS})
"""Modes of sessions that no message names as a session. They have no event log of their own."""


class State(Enum):
    DETACHED = "detached"
    """Alive, and nobody listens: its events wait in the window."""

    ATTACHED = "attached"
    """Alive, and one connection receives its events."""

    ENDED = "ended"
    """Over on purpose, for ever."""

    EXPIRED = "expired"
    """Over by time, for ever."""


class Change(Enum):
    ATTACH = "attach"
    """A connection that can be pushed to resumes it, or uses it while nobody listens."""

    DISPLACE = "displace"
    """It is resumed where nothing can be pushed to."""

    DETACH = "detach"
    """Its connection is gone, or detached it."""

    END = "end"
    EXPIRE = "expire"


BEGINS = State.DETACHED
"""Every session begins with nobody listening; ``session/start`` attaches it at once where
the connection can be pushed to."""

TRANSITIONS = MappingProxyType(
    {
        (State.DETACHED, Change.ATTACH): State.ATTACHED,
        (State.DETACHED, Change.DISPLACE): State.DETACHED,
        (State.DETACHED, Change.DETACH): State.DETACHED,
        (State.DETACHED, Change.END): State.ENDED,
        (State.DETACHED, Change.EXPIRE): State.EXPIRED,
        (State.ATTACHED, Change.ATTACH): State.ATTACHED,
        (State.ATTACHED, Change.DISPLACE): State.DETACHED,
        (State.ATTACHED, Change.DETACH): State.DETACHED,
        (State.ATTACHED, Change.END): State.ENDED,
        (State.ATTACHED, Change.EXPIRE): State.EXPIRED,
    }
)
"""(state, change) → state. ``ENDED`` and ``EXPIRED`` have no way out: a late write or
attach never brings a session back (SES18)."""


def after(state: State, change: Change) -> State | None:
    return TRANSITIONS.get((state, change))
