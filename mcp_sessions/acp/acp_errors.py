"""Build the errors for a refused peer: ACP's codes, with a sentence that says what to do.

The codes are JSON-RPC's and ACP's own (-32002, ACP's "resource not found"). One code is this
project's: -31010, if another client took over the conversation.
"""

from __future__ import annotations

from typing import Any

from acp import RequestError

from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    SESSION_DETACHED,
    WireError,
)

RESOURCE_NOT_FOUND = -32002


def invalid_params(explanation: str) -> RequestError:
    return RequestError(INVALID_PARAMS, f"Invalid params: {explanation}")


def invalid_request(explanation: str, reason: str) -> RequestError:
    return RequestError(INVALID_REQUEST, f"Invalid request: {explanation}", {"reason": reason})


def method_not_found(method: str) -> RequestError:
    return RequestError(METHOD_NOT_FOUND, f"Method not found: {method}", {"method": method})


def session_not_found(session_id: str) -> RequestError:
    return RequestError(RESOURCE_NOT_FOUND, "Session not found", {"sessionId": session_id})


def not_open(session_id: str) -> RequestError:
    return RequestError(
        INVALID_REQUEST,
        "Invalid request: this session is not open here; call session/load or session/resume first",
        {"reason": "not_open", "sessionId": session_id},
    )


def taken_over(session_id: str) -> RequestError:
    return RequestError(
        SESSION_DETACHED,
        "Session detached: another client has loaded it; load or resume it to take it back",
        {"reason": "taken_over", "sessionId": session_id},
    )


def store_unavailable() -> RequestError:
    """The store failed; the cause is for the log of this process."""
    return RequestError(
        INTERNAL_ERROR,
        "The conversation could not be stored; what was answered before is kept",
        {"reason": "store_unavailable"},
    )


def internal_error(details: str) -> RequestError:
    return RequestError(INTERNAL_ERROR, "Internal error", {"details": details})


def of_wire_error(error: WireError) -> RequestError:
    return RequestError(error.code, error.message, error.data)


def body(error: RequestError) -> dict[str, Any]:
    return error_body(error.code, str(error), error.data)
