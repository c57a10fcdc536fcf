"""Send the requests of one client, and describe the failure of an exchange that brought no answer.

An application sees the SDK's own errors. They name the address and the cause. The
:class:`~mcp_sessions.client.dialer.Failure` has the further facts that a reconnecting client needs.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import cast

import anyio
import httpx2

from mcp_sessions import method_names
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Failure, LinkSettings
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.core.messages import Json, RequestId, encode, error_body, members_of
from mcp_sessions.core.nearness import past_proxies
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.errors import INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND
from mcp_sessions.http_client.connect_errors import reason_of, retry_after, without_credentials
from mcp_sessions.http_client.exchange import FAILURES, refused_with
from mcp_sessions.http_client.session import (
    SESSION_HEADER,
    VERSION_HEADER,
    BoundedJar,
    HttpSession,
    closing,
)

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


_PING: Json = {"jsonrpc": "2.0", "id": "mcp-sessions-ping", "method": method_names.PING}
_TIMEOUT = 30.0


@cache
def _trusted(cert_file: str | None, cert_dir: str | None) -> ssl.SSLContext:
    """Load the trusted certificates once for all clients: loading takes 50 ms of CPU."""
    return httpx2.create_ssl_context()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Access:
    url: str
    client: httpx2.AsyncClient | None
    """Used and never closed; None: each link has its own."""

    headers: Mapping[str, str]
    auth: httpx2.Auth | None
    policy: ReconnectPolicy


class Requester:
    def __init__(self, access: Access) -> None:
        self.name = without_credentials(access.url)
        self.settings = LinkSettings()
        self._session: HttpSession | None = None
        self._access = access
        self._policy = access.policy
        self._version: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        if self._access.client is not None:
            self._session = HttpSession(self._access.url, self._access.client)
            yield
            return
        timeout = httpx2.Timeout(_TIMEOUT, read=self._policy.response_silence)
        trusted = _trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        client = httpx2.AsyncClient(
            timeout=timeout,
            verify=trusted,
            cookies=BoundedJar(),
            mounts=past_proxies(self._access.url),
        )
        self._session = HttpSession(self._access.url, client)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await client.aclose()

    def configure(self, settings: LinkSettings) -> None:
        self.settings = settings

    @property
    def session(self) -> HttpSession:
        if self._session is None:
            raise AssertionError("a link is used before it runs")
        return self._session

    @property
    def is_in_session(self) -> bool:
        session = self._session
        # If the caller was cancelled, the HTTP client ended with the link, before it could leave.
        return session is not None and session.id is not None and not session.client.is_closed

    def note_version(self, message: Json, headers: Mapping[str, str]) -> None:
        if message.get("method") == method_names.INITIALIZE:
            # It is the negotiation: what a probe before it said does not hold.
            self._version = None
        if self.settings.protocol_version is not None:
            # A handshake said it for the link; of the other era it is each request's own.
            return
        version = next((v for k, v in headers.items() if k.lower() == VERSION_HEADER), None)
        if version is not None:
            self._version = version

    async def post(self, message: Json, headers: Mapping[str, str]) -> Failure | None:
        try:
            with anyio.fail_after(self._policy.connect_timeout):
                async with self.stream("POST", message, headers) as response:
                    if response.status_code >= 400:
                        return await self.refused(response, None)
        except TimeoutError:
            seconds = self._policy.connect_timeout
            text = f"{self.name}: the server did not take a message within {seconds:g} s"
            return Failure(FailureCause.SILENT, text)
        except FAILURES as error:
            return describe(error, name=self.name)
        return None

    async def refused(self, response: httpx2.Response, request_id: RequestId | None) -> Failure:
        """Return the failure that a response without success means.

        Args:
            request_id: The request it responds to; None: it was no request of a handler.
        """
        sent = response.request.headers
        # In the modern era the header repeats what the message says, and names no transport
        # session.
        is_gone = (
            response.status_code == 404 and SESSION_HEADER in sent and METHOD_HEADER not in sent
        )
        if is_gone and request_id is not None:
            # A handler, or what it asked, may have answered so.
            again = await self.post(_PING, {SESSION_HEADER: sent[SESSION_HEADER]})
            is_gone = again is not None and again.status == 404
        return await failure_of(response, request_id, name=self.name, is_gone=is_gone)

    @asynccontextmanager
    async def stream(
        self, method: str, message: Json | None, headers: Mapping[str, str], *, silent: bool = False
    ) -> AsyncGenerator[httpx2.Response]:
        """Send a request.

        Args:
            silent: A stream on which nothing may come for long, but not for too long.
        """
        said = message or {}
        is_request = "id" in said and "method" in said
        # A server with keys shows a sign of life on each open response.
        is_watched = self.settings.has_keys if is_request else silent and self.settings.has_sessions
        watched = httpx2.Timeout(_TIMEOUT, read=self._policy.stream_silence)
        is_agreed = said.get("method") != method_names.INITIALIZE
        response = await self.session.open(
            method,
            encode(message) if message is not None else None,
            always={**self._access.headers, **self.settings.headers},
            headers=headers,
            version=(self._version or self.settings.protocol_version) if is_agreed else None,
            auth=self._access.auth,
            timeout=watched if is_watched else None,
        )
        async with closing(response):
            yield response
