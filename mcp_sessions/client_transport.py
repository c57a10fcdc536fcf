"""``resumable(…)``: one changed line, and an MCP client keeps its session.

::

    from mcp import Client
    from mcp_sessions import resumable

    async with Client(resumable("https://host/mcp", "wss://host/mcp")) as client:
        ...

Joins the client to its bindings: which one a URL means is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mcp_sessions.argument_types import checked
from mcp_sessions.client.dialer import Dialer
from mcp_sessions.client.jar import Jar
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.reports import OnLost, OnResume
from mcp_sessions.client.sdk import ResumableTransport
from mcp_sessions.core.addresses import HTTP, HTTP_AND_WEBSOCKET, wrong_address
from mcp_sessions.core.headers import sendable_headers
from mcp_sessions.errors import ConfigurationError
from mcp_sessions_transports.http.client.link import HttpDialer
from mcp_sessions_transports.http.client.requester import Access
from mcp_sessions_transports.stdio.stdio_client import StdioDialer, is_stdio
from mcp_sessions_transports.websocket.websocket_client import WebSocketDialer

if TYPE_CHECKING:
    import httpx2
    from mcp import StdioServerParameters


@checked("server", jar='a jar, such as FileJar("sessions.json")')
def resumable(
    server: str | StdioServerParameters,
    *more_urls: str,
    headers: Mapping[str, str] | None = None,
    auth: httpx2.Auth | None = None,
    http_client: httpx2.AsyncClient | None = None,
    jar: Jar | None = None,
    user: str = "",
    on_lost: OnLost | None = None,
    on_resume: OnResume | None = None,
    policy: ReconnectPolicy | None = None,
) -> ResumableTransport:
    """A transport for ``mcp.Client`` and ``ClientSession`` that survives its connections.

    Against a server without sessions it behaves as the SDK's own transport.

    Args:
        server: A URL (``http``, ``https``, ``ws``, ``wss``), or how to start a child process.
        more_urls: Other addresses of the same server, tried in this order when one fails.
            The session's id and the credentials are sent to each of them.
        headers: Sent with every HTTP request and WebSocket handshake. Those that the transport
            itself sends, such as ``Content-Type``, are left out with a warning.
        auth: As for ``httpx2.AsyncClient``. A WebSocket handshake carries the headers of its
            first step.
        http_client: For HTTP, instead of a client per connection; used and never closed.
        jar: Keeps the session between runs. Without one it ends with the transport.
        user: The owner of the session, if one jar or one address serves several users.
        on_lost: Called when a connection that was in use is lost, at the first failed attempt. The
            transport comes back by itself, and nothing waits for what an async one does.
        on_resume: Called once after each ``on_lost``, with what became of the session, and after a
            move. Over HTTP a loss shows where something is open: a call, the 2025 era's
            notification stream, a listen. With nothing open the next request finds out.
        policy: How long to wait and how often to try.

    Raises:
        ConfigurationError: A URL of another kind, a header that a client cannot send, or options
            that do not go together.
    """
    if auth is not None and not hasattr(auth, "auth_flow"):
        raise ConfigurationError("auth must be an httpx2.Auth")
    limits = policy or ReconnectPolicy()
    dial = dial_with(headers=headers, auth=auth, http_client=http_client, policy=limits)
    dialers: list[Dialer]
    if isinstance(server, str):
        dialers = [dial(url) for url in (server, *more_urls)]
    elif not is_stdio(server):
        raise ConfigurationError("resumable() takes a URL or StdioServerParameters")
    elif more_urls or headers or auth is not None or http_client is not None:
        raise ConfigurationError(
            "a child process takes no more URLs, headers, auth or http_client: leave them out"
        )
    else:
        dialers = [StdioDialer(server)]
    dial_url = dial if isinstance(server, str) else None
    return ResumableTransport(dialers, dial_url, limits, jar, user, on_lost, on_resume)


def dial_with(
    *,
    headers: Mapping[str, str] | None = None,
    auth: httpx2.Auth | None = None,
    http_client: httpx2.AsyncClient | None = None,
    policy: ReconnectPolicy,
) -> Callable[[str], Dialer]:
    """Return the function that makes a URL's dialer; see `resumable`.

    Raises:
        ConfigurationError: A header that a client cannot send; when it is called, a URL of another
            kind.
    """
    limits, fields = policy, sendable_headers(headers)

    def dial(url: str) -> Dialer:
        wrong = wrong_address(url, HTTP_AND_WEBSOCKET)
        if wrong is not None:
            raise ConfigurationError(wrong)
        if urlsplit(url).scheme in HTTP:
            access = Access(url=url, client=http_client, headers=fields, auth=auth, policy=limits)
            return HttpDialer(access)
        return WebSocketDialer(url=url, headers=fields, auth=auth, policy=limits)

    return dial
