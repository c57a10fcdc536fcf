"""Find a request's conversation by the key that its host sends with it.

A key is a name, not a credential. It selects one of its sender's own conversations. Hosts send the
key in a member of ``_meta`` or in a header, each under its own name. A host that starts the server
may put it into the environment of the process. The same text under two names is two keys.

A host may also send the key of a request under a name of its own. The operator names the places:
hosts send such values for other purposes, too. Such a key counts among the requests of its own
sender, and nowhere else. Rules, owned by ``tests/core/test_host_keys.py``:

1. The same text in two places is two keys.
2. A further round of a call (``requestState``) is another request, though its host sends the same
   text again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from mcp_sessions.core.messages import MAX_REQUEST_KEY, encode
from mcp_sessions.core.request_keys import content_digest
from mcp_sessions.errors import ConfigurationError, InvalidParams
from mcp_sessions.ids import RequestKey, SessionId

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


def place_of(where: str) -> Rule:
    """Parse ``header:NAME`` or ``meta:NAME``. ``meta:NAME:MEMBER`` is a member of an object there.

    Raises:
        ConfigurationError: It is neither.
    """
    source, _, rest = where.partition(":")
    name, _, member = rest.partition(":")
    if name and source == "meta":
        return Rule("meta", name, member)
    if rest and source == "header":
        return Rule("header", rest.lower())
    raise ConfigurationError(f"must be header:NAME or meta:NAME, not {where!r}")


def host_key(
    places: Sequence[Rule],
    params: Mapping[str, Any] | None,
    meta: Mapping[str, Any],
    headers: Mapping[str, str | None],
) -> RequestKey | None:
    """Return the key of a request. None: its host sends none.

    Args:
        headers: Those of its own HTTP request. None: it came with several values.

    Raises:
        InvalidParams: The value is no string of 1 to 256 characters. The sender expects protection.
    """
    said = said_by(places, meta, headers)
    if said is None:
        return None
    place, text = said
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_REQUEST_KEY:
        wanted = f"one string of 1 to {MAX_REQUEST_KEY} characters"
        raise InvalidParams(f"the request key in {place.name} must be {wanted}")
    asked = params or {}
    turn = asked.get("requestState", asked.get("inputResponses"))
    return _named(list(place), text, turn and content_digest("", {"": turn}).hex())


def among(key: RequestKey, conversation: str) -> RequestKey:
    """Return the name that a key of one conversation has among all of its principal."""
    return _named(key, conversation)


def home_of(*owner: str | None) -> SessionId:
    """Return the id of the session that has the keys of a principal, or of a conversation."""
    return SessionId(_digest("home", *owner))


def _named(*parts: Any) -> RequestKey:
    return RequestKey(_digest(*parts))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(encode(parts)).hexdigest()
