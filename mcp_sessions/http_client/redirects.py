"""Send a request to one server: its redirects are followed only while they stay with it."""

from __future__ import annotations

from typing import Any

import httpx2

SESSION_HEADER = "mcp-session-id"


async def send_within_origin(
    client: httpx2.AsyncClient, request: httpx2.Request, **auth: Any
) -> httpx2.Response:
    """Send a request, following redirects only while they stay with its server. No URL is asked
    twice: an answer that leads back to it did not come from before a handler.

    Args:
        auth: As for ``httpx2.AsyncClient.send``.
    """
    asked = set[httpx2.URL]()
    while True:
        asked.add(request.url)
        response = await client.send(request, stream=True, follow_redirects=False, **auth)
        onward = onward_request(response)
        if onward is None or onward.url in asked or len(asked) > client.max_redirects:
            return response
        # Unread: nothing in it is for us, and nobody says how long it is.
        await response.aclose()
        request = onward


def is_sse(response: httpx2.Response) -> bool:
    media_type = response.headers.get("content-type", "").partition(";")[0]
    return media_type.strip().lower() == "text/event-stream"


def unfollowed(response: httpx2.Response) -> str | None:
    onward = response.next_request
    if onward is None:
        return None
    location = onward.url.copy_with(userinfo=b"", query=None, fragment=None)
    return f"Redirect to {location} not followed"


def onward_request(response: httpx2.Response) -> httpx2.Request | None:
    """The request that follows a redirect, if it keeps its method and stays with the server.

    Everything in it, the credentials above all, was meant for that server alone.
    """
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
