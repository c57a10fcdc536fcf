from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from mcp_sessions.acp.conversation import Conversation
from mcp_sessions.acp.link import Link
from mcp_sessions.acp.open_conversation import OpenConversation, Turn
from mcp_sessions.errors import SessionRequired

Default = TypeVar("Default")


@dataclass(slots=True, eq=False)
class Opening:
    """A ``session/new``, ``session/load`` or ``session/resume`` that is being answered."""

    is_new: bool
    held: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Messages that the agent sends meanwhile. They are sent after the answer."""

    ended: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    link: Link
    conversation: OpenConversation | None = None
    turn: Turn | None = None
    opening: Opening | None = None


CALL: ContextVar[Call | None] = ContextVar("mcp_sessions_acp_call", default=None)


class _Required:
    """Stands for "no default was given"."""


@overload
def current_conversation() -> Conversation: ...
@overload
def current_conversation(*, default: Default) -> Conversation | Default: ...
def current_conversation(*, default: object = _Required) -> object:
    """The conversation that the agent's method was called for.

    In ``new_session`` and ``load_session`` it is the one that is being opened.

    Args:
        default: The value outside of a conversation.

    Raises:
        SessionRequired: There is none, and no default was given.
    """
    call = CALL.get()
    if call is not None and call.conversation is not None:
        return call.conversation.handle
    if default is _Required:
        raise SessionRequired
    return default
