"""Add the client's members to the application's messages, and remove the server's.

The messages are raw JSON, because the SDK's typed models drop these members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from mcp_sessions.client.dialer import Json
from mcp_sessions.core.messages import (
    EXTENSION,
    INSTANCE_META,
    PROTOCOL_VERSION_META,
    REQUEST_KEY_META,
    SESSION_META,
    RequestId,
    members_of,
    meta_of,
    with_meta,
)
from mcp_sessions.core.messages import without_session as without_session_members
from mcp_sessions.core.named import header_value, repeated_name
from mcp_sessions.core.resume import SessionView, is_sendable

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


def stamped(
    message: Json, wire_id: RequestId, session: SessionView, key: str | None, modern: bool
) -> Json:
    added: Json = {SESSION_META: session.metadata()}
    if key is not None:
        added[REQUEST_KEY_META] = key
    if modern:
        capabilities = meta_of(message.get("params")).get(CLIENT_CAPABILITIES_META)
        if isinstance(capabilities, dict):
            added[CLIENT_CAPABILITIES_META] = declaring(cast("Json", capabilities))
    return {**marked(message, added), "id": wire_id}


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


def session_headers(session: SessionView) -> dict[str, str]:
    """Return the headers that repeat the session's id over HTTP in the modern era (HTP4)."""
    return {SESSION_HEADER: session.session_id} if is_sendable(session.session_id) else {}


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
