"""Find the request key that a host sends under a name of its own.

The operator names the places: hosts send such values for other purposes, too. A key is a name and
no credential. So it counts among the requests of its own sender, and nowhere else.

Rules, owned by ``tests/core/test_host_keys.py``:

1. The same text in two places is two keys.
2. A further round of a call (``requestState``) is another request, though its host sends the same
   text again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_sessions.core.conversation_keys import Rule, said_by
from mcp_sessions.core.messages import MAX_REQUEST_KEY, encode
from mcp_sessions.core.request_keys import content_digest
from mcp_sessions.errors import ConfigurationError, InvalidParams
from mcp_sessions.ids import RequestKey, SessionId


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
