"""Send the requests of one session, as Streamable HTTP has them.

Redirects are followed only while they stay with the server: all of a request, its credentials above
all, was meant for that server alone.

A load balancer leads a client to its server by cookies. A server may set as many as it likes, and
all of them go with every request. Kept are as many, and of such a size, as any client has to keep
(RFC 6265, 6.1), if they fit into one header: servers and proxies take 8 KiB of a header line or
less, and answer a longer one with 431.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import Cookie, CookieJar
from typing import Any, Final

import anyio
import httpx2

from mcp_sessions.core.resume import is_sendable
from mcp_sessions.http_client.body import ACCEPTED

SESSION_HEADER = "mcp-session-id"
VERSION_HEADER = "mcp-protocol-version"


class HttpSession:
    """A session, or a server without sessions.

    Args:
        client: Its connections, and the cookies that lead to its server.
    """

    def __init__(self, url: str, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.id: str | None = None
        # Parsed once: each request has it.
        self._url = httpx2.URL(url)

    def joined(self, response: httpx2.Response) -> bool:
        """Note the session that a response names, if any. False: its id cannot be sent."""
        given = response.headers.get(SESSION_HEADER)
        self.id = given if given and is_sendable(given) else None
        return self.id is not None or not given

    async def open(
        self,
        method: str,
        content: bytes | None,
        *,
        always: Mapping[str, str],
        headers: Mapping[str, str],
        version: str | None,
        auth: httpx2.Auth | None,
        timeout: httpx2.Timeout | None = None,
    ) -> httpx2.Response:
        """Send a request. The caller closes the response.

        Args:
            always: Headers that every request has. Those of the protocol win.
            headers: Headers of this request. They win over all others.
            version: The protocol version, if it is agreed.

        Raises:
            httpx2.HTTPError: There is no response.
        """
        fields = {name.lower(): value for name, value in always.items()}
        fields |= {"accept": "application/json, text/event-stream", "accept-encoding": ACCEPTED}
        if content is not None:
            fields["content-type"] = "application/json"
        if self.id is not None:
            fields[SESSION_HEADER] = self.id
        if version is not None:
            fields[VERSION_HEADER] = version
        fields |= {name.lower(): value for name, value in headers.items()}
        # Not None: that would ignore the client's own, and the entry for this host in ~/.netrc.
        own: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
        given = fields.pop("cookie", None)
        request = self.client.build_request(
            method, self._url, content=content, headers=fields, **own
        )
        own = {"auth": auth} if auth is not None else {}
        asked = set[httpx2.URL]()
        while True:
            asked.add(request.url)
            if given is not None:
                # The library sends those of its jar, or these.
                kept = request.headers.get("cookie")
                request.headers["cookie"] = f"{given}; {kept}" if kept else given
            response = await self.client.send(request, stream=True, follow_redirects=False, **own)
            onward = _onward_request(response)
            # No URL is asked twice: what leads back to it did not come from before a handler.
            if onward is None or onward.url in asked or len(asked) > self.client.max_redirects:
                return response
            # Unread: nothing in it is for us, and nobody says how long it is.
            await response.aclose()
            request = onward


@asynccontextmanager
async def closing(response: httpx2.Response) -> AsyncGenerator[httpx2.Response]:
    try:
        yield response
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()


def is_sse(response: httpx2.Response) -> bool:
    media_type = response.headers.get("content-type", "").partition(";")[0]
    return media_type.strip().lower() == "text/event-stream"


def unfollowed(response: httpx2.Response) -> str | None:
    onward = response.next_request
    if onward is None:
        return None
    location = onward.url.copy_with(userinfo=b"", query=None, fragment=None)
    return f"Redirect to {location} not followed"


def _onward_request(response: httpx2.Response) -> httpx2.Request | None:
    """The request that follows a redirect, if it keeps its method and stays with the server."""
    onward = response.next_request
    if onward is None:
        return None
    sent = response.request
    here, there = sent.url, onward.url
    same = (here.scheme, here.host, here.port) == (there.scheme, there.host, there.port)
    upgrade = (
        here.host == there.host
        and (here.scheme, there.scheme) == ("http", "https")
        and here.port is None
        and there.port is None
    )
    if onward.method != sent.method or not (same or upgrade):
        return None
    if there.userinfo and there.userinfo != here.userinfo:
        return None
    return onward


_COOKIES: Final = 50

_SIZE: Final = 4_096
"""Bytes of a name with its value and attributes."""

_HEADER: Final = 6_144
"""Bytes of all names and values, as they stand in a request."""


class BoundedJar(CookieJar):
    """Keeps no cookie that is too large, and no new one while it is full. A cookie that is set
    again and has no room is removed: its earlier value does not hold.
    """

    def set_cookie(self, cookie: Cookie) -> None:
        others = [one for one in self if _key(one) != _key(cookie)]
        parts = (cookie.name, cookie.value, cookie.domain, cookie.path)
        has_room = (
            sum(len(part or "") for part in parts) <= _SIZE
            and len(others) < _COOKIES
            and sum(map(_sent, [*others, cookie])) <= _HEADER
        )
        if has_room:
            super().set_cookie(cookie)
        elif len(others) < len(self):
            self.clear(*_key(cookie))


def _key(cookie: Cookie) -> tuple[str, str, str]:
    return cookie.domain, cookie.path, cookie.name


def _sent(cookie: Cookie) -> int:
    return len(cookie.name) + len(cookie.value or "") + len("=; ")
