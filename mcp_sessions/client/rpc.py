"""Raw messages: what the client reads out of the server's, and those that it makes itself.

Raw, because the SDK's typed models drop what this is about: ``capabilities.sessions`` and
``sessionEventId``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from mcp_sessions import method_names
from mcp_sessions.client.dialer import Json
from mcp_sessions.core.messages import (
    EVENT_ID_META,
    Malformed,
    RequestId,
    answer_instead_of,
    decode,
    error_body,
    members_of,
    meta_of,
    parse,
)
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import EventId, SessionView, is_event_id, is_session_id
from mcp_sessions.errors import INVALID_PARAMS, INVALID_REQUEST, OUTCOME_UNKNOWN, InvalidReason

logger = logging.getLogger(__name__)


def session_asked(message: Json) -> str | None:
    named = members_of(message.get("params")).get("sessionId")
    return named if is_session_id(named) else None


ENDS_SESSION = frozenset({method_names.END_SESSION, method_names.DELETE_SESSION})


def received(data: bytes) -> Json | None:
    """Read a message of the server.

    Text that is no message may still name a request, whose sender must not wait for ever. An error
    replaces an answer. A question goes to the application's side, which refuses it.

    Returns:
        The message; None: there is nothing in it that could be used, which is logged.
    """
    value: object = None
    try:
        value = decode(data)
        parse(value)
    except (ValueError, Malformed) as error:
        logger.warning("received an invalid message: %s", error)
        answer = answer_instead_of(value, str(error))
        members = cast("Json", value)
        return members if answer and isinstance(members.get("method"), str) else answer
    return cast("Json", value)


def instead_of_dropped(
    outline: Outline, name: str, limit: int, *, answers: RequestId | None = None
) -> Json | None:
    """Return the replacement of a message that was too large to be kept. Log the message.

    Args:
        name: Its server's address.
        limit: ``ReconnectPolicy.max_message``.
        answers: The request that it answers if it is an answer, whatever it says itself.

    Returns:
        An answer: to our request, whose outcome is unknown; or, for a question of the server
        (``outline.has_method``), for the server. None: no answer is awaited.
    """
    size = outline.size
    logger.warning(
        "%s: a message of %d bytes was dropped: ReconnectPolicy.max_message is %d",
        name,
        size,
        limit,
    )
    text = f"too large: {size} bytes, and ReconnectPolicy.max_message is {limit}"
    if outline.has_method:
        if outline.id is None:
            return None
        return error_answer(outline.id, INVALID_REQUEST, "Invalid request: too large")
    request_id = answers if answers is not None else outline.id
    if request_id is None:
        return None
    data = {"reason": "too_large", "size": size, "limit": limit}
    return error_answer(request_id, OUTCOME_UNKNOWN, f"Outcome unknown: the answer is {text}", data)


def notification(method: str, params: Json | None = None) -> Json:
    message: Json = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    return message


def error_answer(request_id: RequestId, code: int, text: str, data: Any = None) -> Json:
    return {"jsonrpc": "2.0", "id": request_id, "error": error_body(code, text, data)}


def duplicate_id(request_id: RequestId) -> Json:
    """Build the error for a request with the id of an open one (REQ2)."""
    text = "Invalid request: a request with this id is open"
    data = {"reason": InvalidReason.DUPLICATE_ID.value}
    return error_answer(request_id, INVALID_REQUEST, text, data)


def session_of_start(result: Mapping[str, Any]) -> tuple[SessionView, EventId | None] | None:
    session_id = result.get("sessionId")
    if not is_session_id(session_id):
        return None
    expires_at = result.get("expiresAt")
    view = SessionView(session_id, expires_at=expires_at if isinstance(expires_at, str) else None)
    return view, _event_id(result.get("sessionEventId"))


def session_of_create(
    result: Mapping[str, Any], *, may_resume: bool
) -> tuple[SessionView, EventId | None] | None:
    """The session in a ``sessions/create`` result, and its head if it has one.

    Args:
        may_resume: The server knows ``session/resume``.
    """
    members = members_of(result.get("session"))
    session_id = members.get("sessionId")
    if not is_session_id(session_id):
        return None
    state, expires_at = members.get("state"), members.get("expiresAt")
    head = _event_id(meta_of(result).get(EVENT_ID_META))
    view = SessionView(
        session_id,
        state if isinstance(state, str) else None,
        expires_at if isinstance(expires_at, str) else None,
        resumable=head is not None and may_resume,
    )
    return view, head


def says_not_begun(error: Mapping[str, Any]) -> bool:
    """Whether a server that shuts down refused a request before it began (ERR15)."""
    members = members_of(error.get("data"))
    return members.get("reason") == "draining" and members.get("started") is False


def says_unknown(error: Mapping[str, Any]) -> bool:
    """Whether a server says no more than that nobody knows how a request ended (ERR7)."""
    return error.get("code") == OUTCOME_UNKNOWN and error.get("message") == "Outcome unknown"


def says_state_refused(error: Mapping[str, Any]) -> bool:
    said = members_of(error.get("data"))
    is_refused = error.get("code") == INVALID_PARAMS and said.get("reason") == "invalid_state"
    return is_refused and said.get("started") is not True


def head_of(result: Mapping[str, Any]) -> EventId | None:
    return _event_id(result.get("sessionEventId"))


def _event_id(value: object) -> EventId | None:
    return value if is_event_id(value) else None
