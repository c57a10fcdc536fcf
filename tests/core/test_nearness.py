"""Whether a request comes from this machine and through no proxy (CNV5)."""

from typing import Any

import pytest

from mcp_sessions.core.nearness import BY_NAME, is_local_name, is_near

Headers = list[tuple[bytes, bytes]]


def scope(*headers: tuple[str, str], host: str = "127.0.0.1:8000", **more: Any) -> dict[str, Any]:
    """Of a request from this machine."""
    fields: Headers = [(b"host", host.encode())]
    fields += [(name.lower().encode(), value.encode()) for name, value in headers]
    return {
        "headers": fields, "client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 8_000),
        "http_version": "1.1", **more,
    }  # fmt: skip


SIGNS = (
    "Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
    "X-Forwarded-Anything", "X-Real-IP", "X-Client-IP", "X-Cluster-Client-IP", "Forwarded-For",
    "CF-Connecting-IP", "CF-Ray", "True-Client-IP", "X-Envoy-External-Address", "Fly-Client-IP",
    "Fastly-Client-IP", "X-Azure-ClientIP", "X-Amzn-Trace-Id", "X-Amz-Cf-Id", "CDN-Loop",
    "Tailscale-User-Login", "X-Vercel-Id",
)  # fmt: skip


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:80", "[::1]"]
)
def test_a_request_from_this_machine_is_near(host: str) -> None:
    assert is_near(scope(("accept", "*/*"), ("user-agent", "a"), host=host)) and is_local_name(host)


@pytest.mark.parametrize("header", SIGNS)
def test_a_header_that_proxies_add_says_that_it_came_through_one(header: str) -> None:
    assert not is_near(scope((header, "192.0.2.1")))


@pytest.mark.parametrize(
    "of",
    [
        scope(host="mcp.example"),
        scope(host="mcp.example:8000"),
        scope(host="localhost.example"),
        scope(host="[::2]:80"),
        scope(host=""),
        scope(("Host", "127.0.0.1")),
        {**scope(), "headers": []},
        scope(http_version="1.0"),
        scope(client=("192.0.2.1", 1)),
        scope(server=("192.0.2.1", 80)),
        scope(client=None),
        scope(client=None, server=("/run/mcp.sock", None)),
        scope(client=("", 0)),
        {**scope(), BY_NAME: True},
    ],
)
def test_so_does_anything_that_no_client_on_this_machine_has(of: dict[str, Any]) -> None:
    """Another name or two, no name at all, an address elsewhere, a Unix socket, HTTP/1.0 as
    nginx speaks it, an endpoint that other names may reach.
    """
    assert not is_near(of)
