"""Raw messages: what the client reads out of the server's, what it adds to the application's, and
those that it makes itself.

Raw JSON, because the SDK's typed models drop these members: ``capabilities.sessions``,
``sessionEventId``, and the session's ``_meta``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions import method_names
from mcp_sessions.client.dialer import Failure
from mcp_sessions.core.messages import (
    EXTENSION,
    INSTANCE_META,
    PROTOCOL_VERSION_META,
    REQUEST_KEY_META,
    SESSION_META,
    Json,
    Malformed,
    RequestId,
    answer_instead_of,
    decode,
    error_body,
    members_of,
    meta_of,
    parse,
    with_meta,
)
from mcp_sessions.core.messages import without_session as without_session_members
from mcp_sessions.core.named import header_value, repeated_name
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import FailureCause, SessionView, is_sendable, is_session_id
from mcp_sessions.errors import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    OUTCOME_UNKNOWN,
    STORE_UNAVAILABLE,
    InvalidReason,
)
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

# --- what the client adds to the application's, and takes out of the server's ------------------

CLIENT_CAPABILITIES_META = "io.modelcontextprotocol/clientCapabilities"
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
ENVELOPE = (
    PROTOCOL_VERSION_META,
    "io.modelcontextprotocol/clientInfo",
    CLIENT_CAPABILITIES_META,
)

SESSION_HEADER = "mcp-session-id"


@dataclass(frozen=True, slots=True)
class Envelope:
    meta: Mapping[str, Any]
    protocol_version: str


def envelope_of(message: Json) -> Envelope | None:
    meta = meta_of(cast("Json | None", message.get("params")))
    version = meta.get(PROTOCOL_VERSION_META)
    if not isinstance(version, str):
        return None
    members = {name: meta[name] for name in ENVELOPE if name in meta}
    capabilities = members.get(CLIENT_CAPABILITIES_META)
    if isinstance(capabilities, dict):
        members[CLIENT_CAPABILITIES_META] = declaring(cast(Json, capabilities))
    return Envelope(members, version)


def declaring(capabilities: Mapping[str, Any]) -> Json:
    known = members_of(capabilities.get("extensions"))
    return {**capabilities, "extensions": {**known, EXTENSION: known.get(EXTENSION, {})}}


def declared(message: Json) -> Json:
    """Return an ``initialize`` request that declares our extension too, so that we learn of
    detachments.
    """
    params = cast("Json", message.get("params") or {})
    capabilities = params.get("capabilities")
    if not isinstance(capabilities, dict):
        return message
    own = declaring(cast("Json", capabilities))
    return {**message, "params": {**params, "capabilities": own}}


def marked(message: Json, added: Mapping[str, Any]) -> Json:
    """The message with more members in the ``_meta`` of its params."""
    return {**message, "params": with_meta(cast("Json | None", message.get("params")), added)}


def listened(message: Json, app_id: RequestId) -> Json:
    """A notification on the listen stream that the application knows by that id."""
    return marked(message, {SUBSCRIPTION_ID: app_id})


def stamped(message: Json, session: SessionView, key: str | None, modern: bool) -> Json:
    added: Json = {SESSION_META: session.metadata()}
    if key is not None:
        added[REQUEST_KEY_META] = key
    if modern:
        capabilities = meta_of(message.get("params")).get(CLIENT_CAPABILITIES_META)
        if isinstance(capabilities, dict):
            added[CLIENT_CAPABILITIES_META] = declaring(cast("Json", capabilities))
    return marked(message, added)


def without_session(message: Json) -> Json:
    """A message of the server as the application sees it: without the session's ``_meta`` and an
    event's id, which are for us. All other members stay as they are.
    """
    name = "params" if "method" in message else "result"
    members = message.get(name)
    if not isinstance(members, dict):
        return message
    left = without_session_members(cast("Json", members)) or {}
    if name == "params":
        left = {member: value for member, value in left.items() if member != "sessionEventId"}
        if not left:
            return {member: value for member, value in message.items() if member != "params"}
    return {**message, name: left}


def session_headers(session_id: str) -> dict[str, str]:
    """Return the headers that repeat the session's id over HTTP in the modern era (HTP4)."""
    return {SESSION_HEADER: session_id} if is_sendable(session_id) else {}


def naming(message: Json, instance: str) -> Json:
    """A request that takes a session, and which client sends it (TKO12)."""
    return marked(message, {INSTANCE_META: instance})


def names_own_session(message: Json) -> bool:
    return SESSION_META in meta_of(cast("Json | None", message.get("params")))


def request(
    request_id: str, method: str, params: Json | None, envelope: Envelope | None
) -> tuple[Json, dict[str, str]]:
    message: Json = {"jsonrpc": "2.0", "id": request_id, "method": method}
    if params is not None:
        message["params"] = params
    headers: dict[str, str] = {}
    if envelope is not None:
        message = marked(message, envelope.meta)
        headers = {"mcp-protocol-version": envelope.protocol_version, "mcp-method": method}
    return message, headers


def modern_headers(message: Json, envelope: Envelope) -> dict[str, str]:
    """The headers of a modern-era request over HTTP, for an application that gives none: one
    that speaks stdio to a bridge.
    """
    method: str = message["method"]
    headers = {"mcp-protocol-version": envelope.protocol_version, "mcp-method": method}
    name = repeated_name(method, message.get("params"))
    if name is not None:
        headers["mcp-name"] = header_value(name)
    return headers


def as_handshake(message: Json) -> Json:
    params = cast("Json", message.get("params") or {})
    meta = cast("Json", params.get("_meta") or {})
    left = {name: value for name, value in meta.items() if name not in ENVELOPE}
    if len(left) == len(meta):
        return message
    rest = {name: value for name, value in params.items() if name != "_meta"}
    return {**message, "params": {**rest, "_meta": left} if left else rest}


def as_modern(answer: Json) -> Json:
    """Return an answer as the modern era has it (HTM13)."""
    result = answer.get("result")
    if not isinstance(result, dict):
        return answer
    return {**answer, "result": {"resultType": "complete", **cast("Json", result)}}


# --- what the server says, and what the client says itself ----------------------------------------


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


def says_not_begun(error: Mapping[str, Any]) -> bool:
    """Whether a server refused a request before it began (ERR15, ERR17)."""
    members = members_of(error.get("data"))
    is_away = members.get("reason") in ("draining", STORE_UNAVAILABLE)
    return is_away and members.get("started") is False


def away(error: Mapping[str, Any]) -> Failure | None:
    """Return what an error says that has the status 503 over HTTP (ERR15, ERR17). None: it is an
    answer.
    """
    never_ran, reason = says_not_begun(error), members_of(error.get("data")).get("reason")
    if not never_ran and not (says_unknown(error) and reason == STORE_UNAVAILABLE):
        return None
    text = "the server is shutting down"
    if reason == STORE_UNAVAILABLE:
        text = "the session store of the server is away"
    return Failure(FailureCause.STATUS, text, status=503, error=dict(error), never_ran=never_ran)


def says_unknown(error: Mapping[str, Any]) -> bool:
    """Whether a server says no more than that nobody knows how a request ended (ERR7)."""
    return error.get("code") == OUTCOME_UNKNOWN and error.get("message") == "Outcome unknown"


def says_state_refused(error: Mapping[str, Any]) -> bool:
    said = members_of(error.get("data"))
    is_refused = error.get("code") == INVALID_PARAMS and said.get("reason") == "invalid_state"
    return is_refused and said.get("started") is not True
