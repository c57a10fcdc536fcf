"""Describe the failure of an HTTP exchange that brought no answer.

An application sees the SDK's own errors. They name the address and the cause. The
:class:`~mcp_sessions.client.dialer.Failure` has the further facts that a reconnecting client needs.
"""

from __future__ import annotations

import logging
from typing import cast

import httpx2

from mcp_sessions.client.dialer import CONNECTION_CLOSED, Failure
from mcp_sessions.core.messages import Json, RequestId, error_body, members_of
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.errors import INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND
from mcp_sessions.http_client.connect_errors import reason_of, retry_after
from mcp_sessions.http_client.exchange import refused_with

logger = logging.getLogger(__name__)

METHOD_HEADER = "mcp-method"
"""Each request of the modern era has it."""


async def failure_of(
    response: httpx2.Response, request_id: RequestId | None, *, name: str, is_gone: bool
) -> Failure:
    """Return the failure that a response without success means.

    Two statuses prove that the request did not run: 404 if the transport session is gone, and 503
    with an error whose ``data.started`` is false (HTP6). No other status does, and no text:
    a handler, or what stands before the server, may answer with any.

    Args:
        request_id: The request it responds to; None: it was no request.
        name: Its server's address, without credentials.
        is_gone: The server does not know the transport session that the request named.
    """
    status = response.status_code
    answer = await refused_with(response)
    error = answer.error if answer is not None else None
    is_of_request = answer is not None and request_id is not None and answer.id == request_id
    is_answer = error is not None and is_of_request and not is_gone
    if error is None and is_gone:
        error = error_body(INVALID_REQUEST, "Session terminated")
    elif error is None and status == 404:
        error = error_body(METHOD_NOT_FOUND, f"Not Found: {name}")
    elif error is None:
        text = f"Server returned an error response: {name}: HTTP status {status}"
        error = error_body(INTERNAL_ERROR, text)
    if status in (401, 403):
        # The application gets the SDK's sentence, which does not say it.
        logger.warning("%s: the server answered %d: the credential was not accepted", name, status)
    return Failure(
        FailureCause.STATUS,
        f"{name}: the server answered with HTTP status {status}",
        status=status,
        retry_after=retry_after(response.headers.get("retry-after", "")),
        error=error,
        is_answer=is_answer,
        never_ran=is_gone or (status == 503 and _says_not_started(error)),
    )


def _says_not_started(error: Json) -> bool:
    return members_of(error.get("data")).get("started") is False


def describe(error: Exception, *, name: str, was_sent: bool = False) -> Failure:
    """Return the failure that an exception of an exchange means.

    Args:
        name: The server's address, without credentials.
        was_sent: The server has the request already.
    """
    text = f"{name}: {reason_of(error, seconds=_waited(error))}"
    closed = error_body(CONNECTION_CLOSED, f"Connection closed: {text}")
    unsent = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
    if not was_sent and isinstance(error, unsent):
        cause = FailureCause.UNREACHABLE
    elif isinstance(error, httpx2.TimeoutException):
        cause = FailureCause.SILENT
    else:
        cause = FailureCause.CUT
    return Failure(cause, text, error=closed)


def _waited(error: Exception) -> float | None:
    """Seconds after which a request timed out; None: it did not, or that is not known."""
    if not isinstance(error, httpx2.TimeoutException):
        return None
    try:
        limits = cast(Json, error.request.extensions.get("timeout") or {})
    except RuntimeError:
        # It was raised outside of a request.
        return None
    seconds = limits.get("connect" if isinstance(error, httpx2.ConnectTimeout) else "read")
    return seconds if isinstance(seconds, (int, float)) else None


def refusal(status: int, code: int, text: str, data: Json | None = None) -> Failure:
    error = error_body(code, text, data)
    return Failure(FailureCause.STATUS, text, status=status, error=error, is_answer=True)
