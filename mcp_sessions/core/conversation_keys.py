"""Find a request's conversation by the key that its host sends with it.

A key is a name, not a credential. It selects one of its sender's own conversations. Hosts send the
key in a member of ``_meta`` or in a header, each under its own name. A host that starts the server
may put it into the environment of the process. The same text under two names is two keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

MAX_KEY = 512
"""Characters."""


class Rule(NamedTuple):
    source: Literal["meta", "header"]
    name: str
    """The member, or the header in lower case."""

    member: str = ""
    """The member of that member, if that is an object."""


class ConversationKey(NamedTuple):
    source: str
    """The name that it was said under."""

    text: str


KNOWN_HOSTS: Sequence[Rule] = (
    Rule("meta", "openai/session"),  # ChatGPT
    Rule("meta", "vscode.conversationId"),  # VS Code
    Rule("meta", "threadId"),  # Codex
    Rule("meta", "ai.opencode/sessionID"),  # OpenCode
    Rule("meta", "sessionID"),  # OpenCode, first versions of 2
    Rule("meta", "antigravity.google/conversation_id"),  # Antigravity
    Rule("meta", "com.zcode/request-context", "session_id"),  # ZCode
    Rule("meta", "agent-session-id"),  # goose, and who follows it
    Rule("header", "agent-session-id"),
    Rule("meta", "contextId"),  # agents over A2A
    Rule("header", "x-librechat-conversation-id"),
    Rule("header", "x-openhands-conversation-id"),
    Rule("header", "x-databricks-conversation-id"),
    Rule("header", "x-conversation-id"),
)
"""The first that is there counts. ``docs/hosts.md`` has the source of each."""

PLATFORM = Rule("header", "mcp-session-id")
"""An id that a platform in front of the server invents, and sends with every request."""


def conversation_key(
    rules: Sequence[Rule], meta: Mapping[str, Any], headers: Mapping[str, str]
) -> ConversationKey | None:
    """The key that a request was sent with; None: none.

    Args:
        meta: The ``_meta`` of its params.
        headers: Those of its HTTP request, or of its WebSocket's handshake, in lower case.

    Raises:
        ValueError: The value is no key. The text is the rule's name.
    """
    said = said_by(rules, meta, headers)
    return checked_key(said[0].name, said[1]) if said is not None else None


def said_by(
    rules: Sequence[Rule], meta: Mapping[str, Any], headers: Mapping[str, str | None]
) -> tuple[Rule, Any] | None:
    """Return the first value that is there, and its rule. None: none is."""
    for rule in rules:
        said: Mapping[str, Any] = meta if rule.source == "meta" else headers
        if rule.name in said:
            value = said[rule.name]
            if rule.member and isinstance(value, dict):
                inner = cast("dict[str, Any]", value)
                if rule.member not in inner:
                    continue
                value = inner[rule.member]
            return rule, value
    return None


def checked_key(source: str, value: object) -> ConversationKey:
    """A value as a key.

    Raises:
        ValueError: It is no text, is empty, has more than :data:`MAX_KEY` characters, or one that
            cannot be printed.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_KEY or not value.isprintable():
        raise ValueError(source)
    return ConversationKey(source, value)
