"""``resumable(…)`` for FastMCP's ``Client``: the same transport in FastMCP's own type.

::

    from fastmcp import Client
    from mcp_sessions.fastmcp import resumable

    async with Client(resumable("https://host/mcp")) as client: ...

The one module that needs FastMCP: ``pip install mcp-sessions[fastmcp]``. (`SessionLayer`
takes a FastMCP server as it is.)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Unpack

from fastmcp.client.transports.base import ClientTransport, SessionKwargs, TransportOptions
from mcp import ClientSession

from mcp_sessions import client_transport
from mcp_sessions.client.jar import Jar
from mcp_sessions.client.outcome import KnownSession, OnResume, ResumeOutcome
from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.client.sdk import ResumableTransport

if TYPE_CHECKING:
    import httpx2
    from mcp import StdioServerParameters


class ResumableClientTransport(ClientTransport):
    """A FastMCP transport; `resumable` makes it."""

    def __init__(self, transport: ResumableTransport) -> None:
        self._transport = transport

    @asynccontextmanager
    async def connect_session(
        self,
        *,
        transport_options: TransportOptions | None = None,
        **session_kwargs: Unpack[SessionKwargs],
    ) -> AsyncGenerator[ClientSession]:
        """See FastMCP's ``ClientTransport``."""
        options = transport_options or TransportOptions()
        async with (
            self._transport as (read, write),
            options.session_class(read, write, **session_kwargs) as session,
        ):
            yield session

    @property
    def session(self) -> KnownSession | None:
        """See `ResumableTransport.session`."""
        return self._transport.session

    async def move_to(self, url: str) -> ResumeOutcome:
        """See `ResumableTransport.move_to`."""
        return await self._transport.move_to(url)


def resumable(
    server: str | StdioServerParameters,
    *more_urls: str,
    headers: Mapping[str, str] | None = None,
    auth: httpx2.Auth | None = None,
    http_client: httpx2.AsyncClient | None = None,
    jar: Jar | None = None,
    user: str = "",
    on_resume: OnResume | None = None,
    policy: ReconnectPolicy | None = None,
) -> ResumableClientTransport:
    """As `mcp_sessions.resumable`, for FastMCP's ``Client``.

    Raises:
        ConfigurationError: A URL of another kind, or options that do not go together.
    """
    return ResumableClientTransport(
        client_transport.resumable(
            server,
            *more_urls,
            headers=headers,
            auth=auth,
            http_client=http_client,
            jar=jar,
            user=user,
            on_resume=on_resume,
            policy=policy,
        )
    )
