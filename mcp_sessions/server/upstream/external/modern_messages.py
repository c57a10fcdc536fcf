"""Build and read what only messages of the modern era (2026-07-28) have.

Each request names its client. The log level is part of that. A listen names the wanted changes. A
question of the server to its client is a result, and the answer is a new request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, cast
from uuid import uuid4

from mcp_sessions import method_names
from mcp_sessions.core.listen_messages import FLAGS, SUBSCRIPTION_ID
from mcp_sessions.core.messages import (
    PROTOCOL_VERSION_META,
    Notification,
    entries_of,
    error_body,
    members_of,
    meta_of,
)
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.upstream.port import PeerError, UpstreamError

_PREFIX: Final = PROTOCOL_VERSION_META.rpartition("/")[0]
_LEVEL: Final = f"{_PREFIX}/logLevel"

_ROUNDS: Final = 10
"""Times that one request may need input, at most."""

_STATE_ONLY: Final = 0.1
"""Seconds after which a request is sent again that needs no input."""

_OF_INPUT: Final = frozenset({"inputResponses", "requestState"})

Send = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
AskClient = Callable[[str, Mapping[str, Any] | None], Awaitable[dict[str, Any]]]


def handshake_of(
    found: Mapping[str, Any], wanted: object, versions: frozenset[str]
) -> dict[str, Any] | None:
    """Return the answer that ``initialize`` would have given. None: the server does not speak
    this version.

    Args:
        found: The result of ``server/discover``.
        wanted: The version that the client asked for.
        versions: Those with a handshake.
    """
    if NEWEST_MODERN not in entries_of(found.get("supportedVersions")):
        return None
    info: object = meta_of(found).get(f"{_PREFIX}/serverInfo")
    capabilities = members_of(found.get("capabilities"))
    if isinstance(capabilities.get("resources"), dict):
        # The modern era has no such member. A listen names resources, and the answer says which
        # are accepted.
        resources = {**members_of(capabilities["resources"]), "subscribe": True}
        capabilities = {**capabilities, "resources": resources}
    result = {
        "protocolVersion": wanted if wanted in versions else max(versions),
        "capabilities": capabilities,
        "serverInfo": info or {"name": "", "version": ""},
    }
    return {**result, **{name: found[name] for name in ("instructions",) if name in found}}


def envelope(client: Mapping[str, Any], level: str | None) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        PROTOCOL_VERSION_META: NEWEST_MODERN,
        f"{_PREFIX}/clientInfo": client.get("clientInfo"),
        f"{_PREFIX}/clientCapabilities": client.get("capabilities") or {},
    }
    return {**envelope, _LEVEL: level} if level is not None else envelope


async def with_inputs(params: dict[str, Any], send: Send, ask: AskClient | None) -> dict[str, Any]:
    """Send a request until it needs no more input, and return its result.

    Args:
        ask: Asks the client. None: the client cannot be asked, and the question is the result.

    Raises:
        UpstreamError: The server's error, or the client's. Or the server needs input without end.
    """
    for sent in range(_ROUNDS + 1):
        result = await send(params)
        kind = result.get("resultType", "complete")
        if kind == "complete":
            return {name: value for name, value in result.items() if name != "resultType"}
        if kind != "input_required" or ask is None:
            return result
        if sent == _ROUNDS:
            break
        try:
            more = await _inputs(result, ask)
        except PeerError as failed:
            error = error_body(failed.code, failed.message, failed.data)
            raise UpstreamError(error) from failed
        if "inputResponses" not in more:
            await asyncio.sleep(_STATE_ONLY)
        params = {name: it for name, it in params.items() if name not in _OF_INPUT} | more
    raise UpstreamError(error_body(INTERNAL_ERROR, "the server needs input without end"))


async def _inputs(result: Mapping[str, Any], ask: AskClient) -> dict[str, Any]:
    more: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for name, question in members_of(result.get("inputRequests")).items():
        asked = members_of(question)
        method, params = asked.get("method"), asked.get("params")
        if not isinstance(method, str) or not (params is None or isinstance(params, dict)):
            raise UpstreamError(error_body(INTERNAL_ERROR, "what the server needs is malformed"))
        known = cast("dict[str, Any] | None", params)
        answers[name] = await ask(method, _of_the_era_before(method, known))
    if answers:
        more["inputResponses"] = answers
    if "requestState" in result:
        more["requestState"] = result["requestState"]
    return more


def _of_the_era_before(method: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a question as the handshake era asks it, in which an elicitation at a URL has an
    id.
    """
    if method != method_names.ELICIT or params is None or params.get("mode") != "url":
        return params
    return {"elicitationId": str(uuid4()), **params}


def wanted_changes(capabilities: Mapping[str, Any], uris: set[str]) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        flag: True
        for name, flag in FLAGS.items()
        if members_of(capabilities.get(name)).get("listChanged")
    }
    if uris:
        wanted["resourceSubscriptions"] = sorted(uris)
    return {"notifications": wanted}


def without_subscription(notification: Notification) -> Notification:
    meta = {k: v for k, v in meta_of(notification.params).items() if k != SUBSCRIPTION_ID}
    params = {name: value for name, value in (notification.params or {}).items() if name != "_meta"}
    if meta:
        params["_meta"] = meta
    return Notification(notification.method, params or None)
