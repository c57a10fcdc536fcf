"""Send the requests of one session at a URL, and judge what a refusal proves.

This table is about requests of clients. No text of an answer counts. The table is owned by
``tests/server/upstream/external/url/test_refusals.py``.

==================================================  ===============================================
what happens                                        what it proves
==================================================  ===============================================
the connection never opened                         it did not run
404 for the ``Mcp-Session-Id``, also for a request  it did not run, and the session is gone
without an effect
400 with code -32022, also for a request without    it did not run: another server is there
an effect
400 with code -32020, and other headers are needed  it did not run
401 with ``WWW-Authenticate``                       it did not run (RFC 9110, 15.5.2)
307, 308 that stay with the server                  it did not run there: it is sent on
any other 3xx or 4xx with a JSON-RPC error          nothing: the error is the server's answer
any other 3xx, 4xx or 5xx; a connection that broke  nothing: the outcome is unknown
==================================================  ===============================================

A 404, or a 400 that answers no request, may mean that the server does not know the session. A
request without an effect finds out (``child.py``). Then another session begins.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2

from mcp_sessions.background import TimeSlice, give_way, report
from mcp_sessions.core.messages import Answer, Malformed, decode, error_body, parse
from mcp_sessions.core.resume import is_sendable
from mcp_sessions.errors import INTERNAL_ERROR, OUTCOME_UNKNOWN, OutcomeUnknown
from mcp_sessions.http_client.body import ACCEPTED, pieces
from mcp_sessions.http_client.connect_errors import causes_of, reason_of
from mcp_sessions.http_client.redirects import SESSION_HEADER, send_within_origin
from mcp_sessions.http_client.sse_reader import ReadEvent, SseReader
from mcp_sessions.server.upstream.external.beginning import NO_MEANS
from mcp_sessions.server.upstream.external.child_requests import (
    NOT_STARTED,
    ChildRefused,
    Forgotten,
)
from mcp_sessions.server.upstream.external.url_credentials import Credentials, InUse
from mcp_sessions.server.upstream.port import HEADER_MISMATCH, UpstreamError

CONNECTING = 10.0
"""Seconds in which a connection is made, a message taken, and what a refusal says is read."""

RETRY = 1.0
"""Seconds before a stream is opened again, if the server does not say."""

UNSENT = (
    httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol,
)  # fmt: skip
"""Nothing was sent."""

FAILURES = (httpx2.HTTPError, httpx2.StreamError, OSError)
"""Exceptions of a failed exchange."""

_BODY_LOOKED_AT = 65_536
"""Bytes of a refusal."""

UNSUPPORTED_VERSION = -32022
"""The modern era's: the server does not speak that version of the protocol."""

_CHALLENGE = "www-authenticate"
"""The header that a 401 must have: a handler that passes on a 401 of its own has none."""

_LINES = 256
"""Lines that are read at once; more are read in portions."""

_PORTION = 4_096
"""Bytes."""


class Undispatched(ChildRefused):
    """The server refused a request for its headers, before any handler."""


class Doubtful(UpstreamError):
    """A refusal after which the server may be another one, or may not know the session.

    Args:
        refusal: What becomes of the request.
    """

    def __init__(self, refusal: UpstreamError) -> None:
        super().__init__(refusal.error)
        self.refusal = refusal

    @property
    def is_of_version(self) -> bool:
        return self.error["code"] == UNSUPPORTED_VERSION


class Missing(Doubtful):
    """There may be no such session. Or a handler ran, and answered so."""


class Wire:
    """The way in which one session's requests are sent.

    Args:
        client: Its own: its connections, and the cookies that lead to its server.
        headers: The headers of each request, except those of a credential.
        silence: Seconds without a byte after which a request fails.
    """

    def __init__(
        self,
        url: str,
        client: httpx2.AsyncClient,
        *,
        headers: Mapping[str, str],
        credentials: Credentials,
        silence: float,
    ) -> None:
        self.client = client
        self.session: str | None = None
        # Parsed once: each request has it.
        self._url = httpx2.URL(url)
        self._headers = {name.lower(): value for name, value in headers.items()}
        self._credentials = credentials
        self._silence = silence

    def joined(self, response: httpx2.Response) -> None:
        """Note the session that the server began with a response, if there is one.

        Raises:
            UpstreamError: Its id cannot be sent.
        """
        given = response.headers.get(SESSION_HEADER)
        if given and not is_sendable(given):
            raise refused("its session has an id that cannot be sent")
        self.session = given or None

    @asynccontextmanager
    async def request(
        self,
        method: str,
        content: bytes | None = None,
        *,
        version: str | None,
        last_event_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[httpx2.Response]:
        """Send a request; its response, which is closed at the end. One that proves that it was
        refused for its credential is sent once more, with another one.

        Args:
            version: The protocol version, if it is agreed.
            headers: Headers that repeat parts of the content.

        Raises:
            httpx2.HTTPError: There is none.
            UpstreamError: There is no other credential.
        """
        fields = {
            **(headers or {}),
            "accept": "application/json, text/event-stream",
            "accept-encoding": ACCEPTED,
        }
        if content is not None:
            fields["content-type"] = "application/json"
        for name, value in (
            (SESSION_HEADER, self.session),
            ("mcp-protocol-version", version),
            ("last-event-id", last_event_id),
        ):
            if value is not None:
                fields[name] = value
        used = self._credentials.current
        response = await self._send(method, content, fields, used)
        try:
            if response.status_code == 401 and await self._renewed(response, used, version):
                await response.aclose()
                response = await self._send(method, content, fields, self._credentials.current)
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _renewed(self, response: httpx2.Response, used: InUse, version: str | None) -> bool:
        """Whether a request that was answered 401 is sent again, with another credential.

        Raises:
            UpstreamError: It did not run, and there is no other credential.
        """
        # Neither a handshake nor what is no POST has an effect.
        is_proof = (
            version is None or response.request.method != "POST" or _CHALLENGE in response.headers
        )
        if is_proof:
            return await self._credentials.renewed(used)
        with suppress(UpstreamError):
            # For the next request.
            await self._credentials.renewed(used)
        return False

    async def _send(
        self, method: str, content: bytes | None, fields: Mapping[str, str], credential: InUse
    ) -> httpx2.Response:
        named = {name.lower(): value for name, value in credential.headers.items()}
        request = self.client.build_request(
            method,
            self._url,
            content=content,
            headers={**self._headers, **named, **fields},
            timeout=httpx2.Timeout(CONNECTING, read=self._silence),
        )
        # Not None: that would ignore the entry for this host in ~/.netrc.
        auth: dict[str, Any] = {"auth": credential.auth} if credential.auth is not None else {}
        try:
            return await send_within_origin(self.client, request, **auth)
        except FAILURES:
            raise
        except Exception as defect:
            # The boundary to what an application gave (``auth=``). Its text may be secret.
            report("the authentication of a request to a URL", defect)
            raise httpx2.RequestError("it was not authenticated", request=request) from None

    async def close(self) -> None:
        await self._credentials.close()
        await self.client.aclose()

    async def check(self, response: httpx2.Response, *, has_begun: bool) -> None:
        """Check that a response is a success. The table above says what a refusal proves.

        Args:
            has_begun: The handshake is complete: what is sent has an effect.

        Raises:
            Forgotten: It did not run: there is no such session.
            Undispatched: It did not run.
            ChildRefused: The server's answer.
            Doubtful: See there.
            UpstreamError: It did not run, or its outcome is unknown. httpx2.HTTPError: Its outcome
                is unknown.
        """
        status, request = response.status_code, response.request
        if 200 <= status < 300:
            return
        if status >= 500:
            text = f"the server answered with HTTP status {status}"
            raise httpx2.RemoteProtocolError(text, request=request)
        may_run = has_begun and request.method == "POST"
        is_missing = status == 404 and SESSION_HEADER in request.headers
        if is_missing and not may_run:
            raise Forgotten
        if 300 <= status < 400:
            raise refused(
                "it redirects to another address, which is not followed", may_have_run=may_run
            )
        answer = await _answer_of(response)
        error = answer.error if answer is not None else None
        code = error["code"] if error is not None and status == 400 else None
        refusal: UpstreamError
        if error is not None:
            kind = Undispatched if code == HEADER_MISMATCH else ChildRefused
            refusal = kind(error)
        elif status in (401, 403):
            is_proof = status == 401 and _CHALLENGE in response.headers
            refusal = refused(
                f"it answered {status}: it does not accept the layer's credential",
                may_have_run=may_run and not is_proof,
            )
        else:
            refusal = refused(f"it answered with HTTP status {status}", may_have_run=may_run)
            if status == 400 and not may_run:
                # The server does not take a handshake. It may take another era's.
                refusal = ChildRefused(refusal.error)
        # Ours are numbers: what answers one is about that request alone.
        is_of_request = answer is not None and isinstance(answer.id, int)
        is_in_doubt = not is_of_request or code == UNSUPPORTED_VERSION
        if is_missing:
            raise Missing(refusal)
        raise Doubtful(refusal) if status == 400 and may_run and is_in_doubt else refusal


async def _answer_of(response: httpx2.Response) -> Answer | None:
    """The JSON-RPC answer in a refusal; None: there is none."""
    body = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(CONNECTING), aclosing(pieces_of(response)) as found:
            async for piece in found:
                body += piece
                if len(body) > _BODY_LOOKED_AT:
                    break
    with suppress(ValueError, Malformed):
        answer = parse(decode(body))
        return answer if isinstance(answer, Answer) else None
    return None


def refused(why: str, *, may_have_run: bool = False) -> UpstreamError:
    if may_have_run:
        return unknown(why)
    data = {"reason": NOT_STARTED, "started": False}
    return UpstreamError(error_body(INTERNAL_ERROR, f"the server cannot be asked: {why}", data))


async def pieces_of(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """The body of a response, see :func:`pieces`. However much comes at once, others have their
    turns meanwhile.
    """
    time_slice = TimeSlice()
    async with aclosing(pieces(response)) as found:
        async for piece in found:
            yield piece
            if time_slice.has_ended():
                await give_way()


async def events_of(response: httpx2.Response, longest: int) -> AsyncGenerator[ReadEvent]:
    reader, time_slice = SseReader(max_bytes=longest, drops=True), TimeSlice()
    async with aclosing(pieces_of(response)) as chunks:
        async for chunk in chunks:
            size = len(chunk) if chunk.count(b"\n") < _LINES else _PORTION
            for begin in range(0, len(chunk), size):
                for event in reader.feed(chunk[begin : begin + size]):
                    yield event
                    if time_slice.has_ended():
                        await give_way()
                if time_slice.has_ended():
                    await give_way()


def lack_of(failed: BaseException) -> str | None:
    """Name the resource that this machine lacks, so that a request was not sent; None: none."""
    causes = list(causes_of(failed))
    try:
        # A resolver that can open no file says something else, such as that there is no such name.
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as lacking:
        causes.append(lacking)
    lacks = (it for it in causes if isinstance(it, OSError) and it.errno in NO_MEANS)
    return next((os.strerror(it.errno or 0).lower() for it in lacks), None)


def said(failed: BaseException) -> str:
    if isinstance(failed, UpstreamError):
        return str(failed.error.get("message")).removeprefix(f"{OutcomeUnknown.message}: ")
    # Ours, which names a status.
    is_status = isinstance(failed, httpx2.RemoteProtocolError) and "HTTP status" in str(failed)
    return str(failed) if is_status else reason_of(failed)


def unknown(why: str) -> UpstreamError:
    """Build the error of a request that may have run. It is not sent again."""
    return UpstreamError(error_body(OUTCOME_UNKNOWN, f"Outcome unknown: {why}"))
