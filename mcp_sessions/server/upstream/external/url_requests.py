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
request without an effect finds out (``url.py``). Then another session begins.

Notifications and answers are sent one after the other, in order. A request waits for its clients'
earlier messages, for a bounded time. The layer's own messages (a cancellation, the refusal of a
question) wait for nothing, and nothing waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import httpx2

from mcp_sessions.background import Background, report
from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import INTERNAL_ERROR, OUTCOME_UNKNOWN, OutcomeUnknown
from mcp_sessions.http_client.connect_errors import causes_of, reason_of
from mcp_sessions.http_client.exchange import FAILURES, refused_with
from mcp_sessions.http_client.session import SESSION_HEADER, HttpSession, closing
from mcp_sessions.server.upstream.external.child_requests import (
    NOT_STARTED,
    ChildRefused,
    Forgotten,
)
from mcp_sessions.server.upstream.external.starts import NO_MEANS
from mcp_sessions.server.upstream.port import HEADER_MISMATCH, UpstreamError

if TYPE_CHECKING:
    from mcp_sessions.external_server import Credential

logger = logging.getLogger(__name__)

CONNECTING = 10.0
"""Seconds in which a connection is made, and a message taken."""

UNSENT = (
    httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol,
)  # fmt: skip
"""Nothing was sent."""

UNSUPPORTED_VERSION = -32022
"""The modern era's: the server does not speak that version of the protocol."""

_CHALLENGE = "www-authenticate"
"""The header that a 401 must have: a handler that passes on a 401 of its own has none."""


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


class InUse:
    def __init__(self, given: Credential) -> None:
        self.headers: Mapping[str, str] = given if isinstance(given, Mapping) else {}
        self.auth = given if isinstance(given, httpx2.Auth) else None


class Credentials:
    """The credentials of one session, one after the other.

    Args:
        given: The first.
        ask: Asks for another one, and raises UpstreamError: there is none. None: there is no other.
    """

    def __init__(self, given: Credential, ask: Callable[[], Awaitable[Credential]] | None) -> None:
        self.current = InUse(given)
        self._ask = ask
        self._asking: asyncio.Future[None] | None = None
        self._background = Background()

    async def renewed(self, refused: InUse) -> bool:
        """Replace a refused credential, once for all requests that were refused with it. Return
        whether there is another one to try.

        Raises:
            UpstreamError: There is none.
        """
        if self._ask is None:
            return False
        if self.current is refused:
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_future()
                # The caller may be cancelled meanwhile.
                self._asking.add_done_callback(lambda it: it.cancelled() or it.exception())
                asking = self._renew(self._ask, self._asking)
                self._background.run("asking for a credential", asking)
            await asyncio.shield(self._asking)
        return True

    async def _renew(
        self, ask: Callable[[], Awaitable[Credential]], asking: asyncio.Future[None]
    ) -> None:
        try:
            self.current = InUse(await ask())
        except UpstreamError as none:
            logger.warning("a credential is refused, and there is no other: %s", none)
            asking.set_exception(none)
        else:
            asking.set_result(None)
        finally:
            self._asking = None
            asking.cancel()

    async def close(self) -> None:
        await self._background.close()


class Wire:
    """The way in which one session's requests are sent.

    Args:
        headers: The headers of each request, except those of a credential.
        silence: Seconds without a byte after which a request fails.
    """

    def __init__(
        self,
        session: HttpSession,
        *,
        headers: Mapping[str, str],
        credentials: Credentials,
        silence: float,
    ) -> None:
        self.session = session
        self._headers = headers
        self._credentials = credentials
        self._timeout = httpx2.Timeout(CONNECTING, read=silence)

    def joined(self, response: httpx2.Response) -> None:
        """Note the session that the server began with a response, if there is one.

        Raises:
            UpstreamError: Its id cannot be sent.
        """
        if not self.session.joined(response):
            raise refused("its session has an id that cannot be sent")

    @asynccontextmanager
    async def request(
        self,
        method: str,
        content: bytes | None = None,
        *,
        version: str | None,
        headers: Mapping[str, str],
    ) -> AsyncGenerator[httpx2.Response]:
        """Send a request; its response, which is closed at the end. One that proves that it was
        refused for its credential is sent once more, with another one.

        Args:
            version: The protocol version, if it is agreed.

        Raises:
            httpx2.HTTPError: There is none.
            UpstreamError: There is no other credential.
        """
        used = self._credentials.current
        response = await self._send(method, content, version, headers, used)
        async with closing(response):
            is_renewed = response.status_code == 401 and await self._renewed(
                response, used, version
            )
            if not is_renewed:
                yield response
                return
        now = self._credentials.current
        async with closing(await self._send(method, content, version, headers, now)) as again:
            yield again

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
        self,
        method: str,
        content: bytes | None,
        version: str | None,
        headers: Mapping[str, str],
        credential: InUse,
    ) -> httpx2.Response:
        try:
            return await self.session.open(
                method,
                content,
                always={**self._headers, **credential.headers},
                headers=headers,
                version=version,
                auth=credential.auth,
                timeout=self._timeout,
            )
        except FAILURES:
            raise
        except Exception as defect:
            # The boundary to what an application gave (``auth=``). Its text may be secret.
            report("the authentication of a request to a URL", defect)
            raise httpx2.RequestError("it was not authenticated") from None

    async def close(self) -> None:
        await self._credentials.close()
        await self.session.client.aclose()

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
        answer = await refused_with(response)
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


def refused(why: str, *, may_have_run: bool = False) -> UpstreamError:
    if may_have_run:
        return unknown(why)
    data = {"reason": NOT_STARTED, "started": False}
    return UpstreamError(error_body(INTERNAL_ERROR, f"the server cannot be asked: {why}", data))


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


_WAITING: Final = 1_024
"""Messages of the layer's that wait to be taken. What comes beyond that is left out: its server
takes none.
"""


class Messages:
    def __init__(self, background: Background, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._background = background
        self._send = send
        self._turn = asyncio.Lock()
        self._ours: asyncio.Task[None] | None = None
        self._theirs: asyncio.Task[None] | None = None
        self._waiting = 0
        self._left_out = 0
        self._takes = True

    # --- what its clients say ----------------------------------------------------------------

    def until_taken(self) -> Coroutine[Any, Any, None] | None:
        """Return the wait for the messages before a request; None: there are none to wait for.

        There are also none if the server takes no messages. The wait raises nothing.
        """
        is_quiet = (self._theirs is None or self._theirs.done()) and not self._turn.locked()
        return None if is_quiet or not self._takes else self._until_taken()

    async def _until_taken(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECTING), self._turn:
                await _done(self._theirs)

    async def add_in_turn(self, message: bytes) -> None:
        """Add a message, once the server took all earlier ones."""
        async with self._turn:
            await _done(self._theirs)
            self._theirs = self._run(message, None)

    # --- what the layer says by itself -------------------------------------------------------

    def add(self, message: bytes) -> None:
        """Add a message without waiting. It is dropped if too many messages wait already."""
        if self._waiting >= _WAITING:
            self._left_out += 1
            return
        self._waiting += 1
        self._ours = self._run(message, self._ours)
        # Also of one that never began.
        self._ours.add_done_callback(self._answered)

    def _answered(self, _: asyncio.Task[None]) -> None:
        self._waiting -= 1
        if not self._waiting and self._left_out:
            logger.warning(
                "%d messages were dropped: the server at a URL accepts none", self._left_out
            )
            self._left_out = 0

    # --- how it is sent ----------------------------------------------------------------------

    def _run(self, message: bytes, before: asyncio.Task[None] | None) -> asyncio.Task[None]:
        until = asyncio.get_running_loop().time() + CONNECTING
        return self._background.run("a message to a URL", self._deliver(message, before, until))

    async def _deliver(
        self, message: bytes, before: asyncio.Task[None] | None, until: float
    ) -> None:
        try:
            async with asyncio.timeout_at(until):
                await _done(before)
                await self._send(message)
            self._takes = True
        except TimeoutError:
            self._takes = False
            logger.info("the server at a URL did not accept a message in time")
        except (*FAILURES, UpstreamError) as failed:
            logger.info("the server at a URL did not accept a message: %s", said(failed))


async def _done(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait({task})
