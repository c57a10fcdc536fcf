"""Raw messages of the client: what it adds to a request, and which requests it makes.

Raw, because the SDK's typed models drop what this is about: ``capabilities.sessions`` and
``sessionEventId``.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions.client.dialer import Json
from mcp_sessions.core.messages import (
    EVENT_ID_META,
    EXTENSION,
    INSTANCE_META,
    REQUEST_KEY_META,
    SESSION_META,
    Malformed,
    RequestId,
    answer_in_place_of,
    decode,
    error_body,
    meta_of,
    parse,
)
from mcp_sessions.core.messages import without_session as without_session_members
from mcp_sessions.core.outline import Outline
from mcp_sessions.core.resume import EventId, SessionView, is_event_id, is_sendable, is_session_id
from mcp_sessions.errors import INVALID_PARAMS, INVALID_REQUEST, OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)

INITIALIZE = "initialize"
INITIALIZED = "notifications/initialized"
DISCOVER = "server/discover"
CANCELLED = "notifications/cancelled"
DETACHED = "notifications/sessions/detached"
LISTEN = "subscriptions/listen"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
SUBSCRIBE = "resources/subscribe"
UNSUBSCRIBE = "resources/unsubscribe"
RESOURCE_UPDATED = "notifications/resources/updated"
TOOL_CALL = "tools/call"

PROTOCOL_VERSION_META = "io.modelcontextprotocol/protocolVersion"
CLIENT_CAPABILITIES_META = "io.modelcontextprotocol/clientCapabilities"
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
_ENVELOPE = (
    PROTOCOL_VERSION_META,
    "io.modelcontextprotocol/clientInfo",
    CLIENT_CAPABILITIES_META,
)

OUR_METHODS = frozenset(
    {"session/start", "session/resume", "session/end", "sessions/create", "sessions/delete"}
)
"""An application that calls these itself manages sessions of its own: they pass as they are."""

SESSION_HEADER = "mcp-session-id"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every request of the modern era carries, learnt from the application's own."""

    meta: Mapping[str, Any]
    protocol_version: str


def envelope_of(message: Json) -> Envelope | None:
    """The modern era's envelope of a request; None: it has none, it is of the other era."""
    meta = meta_of(cast("Json | None", message.get("params")))
    version = meta.get(PROTOCOL_VERSION_META) if meta else None
    if meta is None or not isinstance(version, str):
        return None
    members = {name: meta[name] for name in _ENVELOPE if name in meta}
    capabilities = members.get(CLIENT_CAPABILITIES_META)
    if isinstance(capabilities, dict):
        members[CLIENT_CAPABILITIES_META] = declaring(cast(Json, capabilities))
    return Envelope(members, version)


def declaring(capabilities: Mapping[str, Any]) -> Json:
    """Client capabilities, and our extension among them."""
    extensions = capabilities.get("extensions")
    known = cast("Json", extensions) if isinstance(extensions, dict) else {}
    return {**capabilities, "extensions": {**known, EXTENSION: known.get(EXTENSION, {})}}


def declared(message: Json) -> Json:
    """An ``initialize`` request that also declares our extension: we hear of detachments."""
    params = cast("Json", message.get("params") or {})
    capabilities = params.get("capabilities")
    if not isinstance(capabilities, dict):
        return message
    own = declaring(cast("Json", capabilities))
    return {**message, "params": {**params, "capabilities": own}}


def with_meta(message: Json, added: Mapping[str, Any]) -> Json:
    """A copy of a message with more in its ``_meta``."""
    params = cast("Json", message.get("params") or {})
    meta = dict(meta_of(params) or {})
    return {**message, "params": {**params, "_meta": {**meta, **added}}}


def stamped(
    message: Json, wire_id: RequestId, session: SessionView, key: str | None, modern: bool
) -> Json:
    """A request as it goes out: its id there, its session, its key."""
    added: Json = {SESSION_META: session.metadata()}
    if key is not None:
        added[REQUEST_KEY_META] = key
    if modern:
        capabilities = (meta_of(message.get("params")) or {}).get(CLIENT_CAPABILITIES_META)
        if isinstance(capabilities, dict):
            added[CLIENT_CAPABILITIES_META] = declaring(cast("Json", capabilities))
    return {**with_meta(message, added), "id": wire_id}


def without_session(message: Json) -> Json:
    """A message of the server as the application sees it: without the session's ``_meta`` and
    an event's id, which are for us. Whatever else it holds stays as it is.
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


def session_headers(session: SessionView) -> dict[str, str]:
    """What mirrors the session's id over HTTP in the modern era (HTP4)."""
    return {SESSION_HEADER: session.session_id} if is_sendable(session.session_id) else {}


def naming(message: Json, instance: str) -> Json:
    """A request that takes a session, and which client sends it (TKO12)."""
    return with_meta(message, {INSTANCE_META: instance})


def names_own_session(message: Json) -> bool:
    """Whether the application put a session, or null, into the request itself."""
    meta = meta_of(cast("Json | None", message.get("params")))
    return meta is not None and SESSION_META in meta


def request(
    request_id: str, method: str, params: Json | None, envelope: Envelope | None
) -> tuple[Json, dict[str, str]]:
    """A request of our own, and the headers that go with it over HTTP."""
    message: Json = {"jsonrpc": "2.0", "id": request_id, "method": method}
    if params is not None:
        message["params"] = params
    headers: dict[str, str] = {}
    if envelope is not None:
        message = with_meta(message, envelope.meta)
        headers = {"mcp-protocol-version": envelope.protocol_version, "mcp-method": method}
    return message, headers


_NAMED_BY = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_HEADER_SAFE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?", re.ASCII)


def modern_headers(message: Json, envelope: Envelope) -> dict[str, str]:
    """The headers of a modern-era request over HTTP, for an application that gives none: one
    that speaks stdio to a bridge.
    """
    method: str = message["method"]
    headers = {"mcp-protocol-version": envelope.protocol_version, "mcp-method": method}
    params = cast("Json", message.get("params") or {})
    name = params.get(_NAMED_BY.get(method, ""))
    if isinstance(name, str):
        safe = _HEADER_SAFE.fullmatch(name) and not name.startswith("=?")
        encoded = base64.b64encode(name.encode()).decode("ascii")
        headers["mcp-name"] = name if safe else f"=?base64?{encoded}?="
    return headers


def received(data: bytes) -> Json | None:
    """A message of the server, read.

    What is no message, but names a request, shall not leave anybody waiting: an answer is
    replaced by an error, and a question goes to the application's side, which refuses it.

    Returns:
        The message; None: there is nothing in it that could be used, which is logged.
    """
    value: object = None
    try:
        value = decode(data)
        parse(value)
    except (ValueError, Malformed) as error:
        logger.warning("received what is no message: %s", error)
        answer = answer_in_place_of(value, str(error))
        members = cast("Json", value)
        return members if answer and isinstance(members.get("method"), str) else answer
    return cast("Json", value)


def in_place_of_dropped(
    outline: Outline, name: str, limit: int, *, answers: RequestId | None = None
) -> Json | None:
    """What to do about a message that was too large to be kept, which is logged.

    Args:
        name: Its server's address.
        limit: ``ReconnectPolicy.max_message``.
        answers: What it answers if it is an answer, whatever it says itself.

    Returns:
        An answer: to our request, whose outcome is unknown; or, for a question of the server
        (``outline.has_method``), for the server. None: nobody waits for one.
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
    """A notification."""
    message: Json = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    return message


def error_answer(request_id: RequestId, code: int, text: str, data: Any = None) -> Json:
    """What a request gets that the server never answers."""
    return {"jsonrpc": "2.0", "id": request_id, "error": error_body(code, text, data)}


def result_answer(request_id: RequestId, result: Json) -> Json:
    """A result that is ours to give."""
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def session_of_start(result: Mapping[str, Any]) -> tuple[SessionView, EventId | None] | None:
    """The session in a ``session/start`` result, and its head; None: there is none in it."""
    session_id = result.get("sessionId")
    if not is_session_id(session_id):
        return None
    expires_at = result.get("expiresAt")
    view = SessionView(session_id, expires_at=expires_at if isinstance(expires_at, str) else None)
    return view, _event_id(result.get("sessionEventId"))


def session_of_create(result: Mapping[str, Any]) -> tuple[SessionView, EventId | None] | None:
    """The session in a ``sessions/create`` result, and its head if it has one."""
    session = result.get("session")
    if not isinstance(session, dict):
        return None
    members = cast("Json", session)
    session_id = members.get("sessionId")
    if not is_session_id(session_id):
        return None
    state, expires_at = members.get("state"), members.get("expiresAt")
    head = _event_id((meta_of(result) or {}).get(EVENT_ID_META))
    view = SessionView(
        session_id,
        state if isinstance(state, str) else None,
        expires_at if isinstance(expires_at, str) else None,
        resumable=head is not None,
    )
    return view, head


def says_not_begun(error: Mapping[str, Any]) -> bool:
    """Whether a server that shuts down refused a request before it began (ERR15)."""
    data = error.get("data")
    members = cast("Json", data) if isinstance(data, dict) else {}
    return members.get("reason") == "draining" and members.get("started") is False


def says_state_refused(error: Mapping[str, Any]) -> bool:
    """Whether the ``state`` that a request was sent with is not one of the server's."""
    data = error.get("data")
    reason = cast("Json", data).get("reason") if isinstance(data, dict) else None
    return error.get("code") == INVALID_PARAMS and reason == "invalid_state"


def head_of(result: Mapping[str, Any]) -> EventId | None:
    """The head in a ``session/resume`` result."""
    return _event_id(result.get("sessionEventId"))


def _event_id(value: object) -> EventId | None:
    return value if is_event_id(value) else None
