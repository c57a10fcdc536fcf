from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING

import httpx2

from mcp_sessions.core.headers import sendable_headers
from mcp_sessions.core.nearness import past_proxies
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.http_client.cookies import BoundedJar
from mcp_sessions.http_server import HTTPServer
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.external.url import HttpWire
from mcp_sessions.server.upstream.external.url_credentials import Credentials
from mcp_sessions.server.upstream.external.url_wire import Wire, refused

if TYPE_CHECKING:
    from mcp_sessions.http_server import Credential


class HttpChildren:
    """A :class:`~mcp_sessions.server.upstream.external.beginning.Starter`.

    Args:
        longest: Bytes of one message of theirs.
    """

    def __init__(self, server: HTTPServer, longest: int) -> None:
        self._server = server
        self._longest = longest
        self._limits = ReachedLimits(time.monotonic)
        self._tls: ssl.SSLContext | None = None

    async def start(self, slot: Slot, principal: Principal) -> Child:
        server = self._server
        ask = partial(self._credential, principal)
        is_asked = server.auth is not None and not isinstance(server.auth, httpx2.Auth)
        credentials = Credentials(await ask(), ask if is_asked else None)
        if self._tls is None:
            # They share it: to read the system's certificates takes many milliseconds.
            self._tls = httpx2.create_ssl_context()
        client = httpx2.AsyncClient(
            verify=self._tls,
            cookies=BoundedJar(),
            mounts=past_proxies(server.url),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=8),
        )
        wire = HttpWire(
            Wire(
                server.url,
                client,
                headers=server.headers,
                credentials=credentials,
                silence=server.silence,
            ),
            self._longest,
            self._limits,
        )
        return Child(wire, slot)

    async def _credential(self, principal: Principal) -> Credential:
        auth = self._server.auth
        if auth is None or isinstance(auth, httpx2.Auth):
            return auth
        try:
            found = auth(principal)
            if isawaitable(found):
                async with asyncio.timeout(self._server.start_timeout):
                    found = await found
            if isinstance(found, Mapping):
                return sendable_headers(found, may_name_host=True)
            return found
        except Exception as failed:
            # The boundary to the operator's code. Its text may quote the credential.
            raise refused(f"there is no credential for it ({type(failed).__name__})") from None

    def run(self, room: Callable[[], int]) -> None:
        """Do nothing: a session costs only a handshake, so none is started in advance."""

    def start_first(self) -> bool:
        return False

    def retries(self) -> bool:
        return False

    def use(self, server: ExternalServer) -> None:
        if not isinstance(server, HTTPServer):
            raise AssertionError("it is of another kind")
        self._server = server

    def session_ended(self, session_id: SessionId) -> None:
        """Do nothing: no child is kept for a session."""

    async def close(self) -> None: ...
