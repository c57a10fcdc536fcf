"""Get a JSON object from an issuer, with bounds in bytes and in time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, cast

from mcp_sessions.core.nearness import past_proxies

LARGEST: Final = 262_144
"""Bytes of an answer, at most."""


class FetchFailed(Exception):
    """The issuer did not answer with a JSON object. The text says how, for the log."""


async def fetch_json(url: str) -> dict[str, Any]:
    """Return the object at a URL. The caller bounds the time.

    Redirects are not followed: an issuer has its documents where it says.

    Raises:
        FetchFailed: The server is away, or the answer is no JSON object, or is too large.
    """
    return await _object("GET", url, {}, None)


async def post_form(url: str, form: Mapping[str, str], authorization: str) -> dict[str, Any]:
    """Send a form, and return the object of the answer. Rules and errors are those of
    :func:`fetch_json`.
    """
    return await _object("POST", url, {"Authorization": authorization}, form)


@cache
def _trust() -> Any:
    import httpx2

    return httpx2.create_ssl_context()


async def _object(
    method: str, url: str, more: Mapping[str, str], form: Mapping[str, str] | None
) -> dict[str, Any]:
    # Loaded when it is needed: the help must not wait for it.
    import httpx2

    # Not compressed, so that the bytes that are read are those that are parsed.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", **more}
    body = bytearray()
    try:
        async with (
            httpx2.AsyncClient(
                follow_redirects=False, verify=_trust(), mounts=past_proxies(url)
            ) as client,
            client.stream(method, url, headers=headers, data=form) as response,
        ):
            if response.status_code != 200:
                raise FetchFailed(f"{url} answers {response.status_code}")
            async for part in response.aiter_raw():
                body += part
                if len(body) > LARGEST:
                    raise FetchFailed(f"{url} answers more than {LARGEST} bytes")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as failed:
        said = " ".join(str(failed).split()) or type(failed).__name__
        raise FetchFailed(f"{url} cannot be reached: {said}") from failed
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise FetchFailed(f"{url} does not answer with JSON") from None
    if not isinstance(value, dict):
        raise FetchFailed(f"{url} does not answer with a JSON object")
    return cast("dict[str, Any]", value)
