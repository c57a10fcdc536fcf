"""Fetch a JSON object from an issuer, with bounds in bytes and in time."""

from __future__ import annotations

import json
from typing import Any, Final, cast

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
    # Loaded when it is needed: the help must not wait for it.
    import httpx2

    # Not compressed, so that the bytes that are read are those that are parsed.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    body = bytearray()
    try:
        async with (
            httpx2.AsyncClient(follow_redirects=False) as client,
            client.stream("GET", url, headers=headers) as response,
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
        raise FetchFailed(f"{url} answers no JSON") from None
    if not isinstance(value, dict):
        raise FetchFailed(f"{url} answers no JSON object")
    return cast("dict[str, Any]", value)
