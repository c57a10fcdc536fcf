"""Whether a request comes from this machine and through no proxy (CNV5)."""

from typing import Any

import pytest

from mcp_sessions.core.nearness import BY_NAME, is_local_name, is_near, own_connection

Headers = list[tuple[bytes, bytes]]


def scope(*headers: tuple[str, str], host: str = "127.0.0.1:8000", **more: Any) -> dict[str, Any]:
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
    "Tailscale-User-Login", "X-Vercel-Id", "X-Original-Forwarded-For", "X-Forward-For",
    "X_Forwarded_For", "Forwarded-For-IP", "X-Real-Port", "X-Real_IP", "X-Scheme", "X-URL-Scheme",
    "Front-End-Https", "X-Proxy", "X-ProxyUser-Ip", "Proxy-Client-IP", "Proxy-Connection",
    "WL-Proxy-Client-IP", "WL-Proxy-SSL", "X-Originating-IP", "X-True-Client-IP", "X-ClientIP",
    "X-SSL-Client-Cert", "SSL-Client-Verify", "X-Remote-User", "Remote-User", "Remote-Addr",
    "X-Remote-IP", "X-Nginx-Proxy", "X-HAProxy-Client-IP", "X-BlueCoat-Via", "CDN-RequestId",
    "Ali-CDN-Real-IP", "EO-Connecting-IP", "DO-Connecting-IP", "Surrogate-Capability",
    "X-Kong-Request-Id", "X-Consumer-Username", "X-Apigee-Message-Id", "X-Pomerium-Jwt-Assertion",
    "X-Auth-Request-User", "X-Authentik-Username", "X-MS-Client-Principal", "X-Replit-User-Id",
    "X-GitHub-Request-Id", "X-Original-URI", "X-Rewrite-URL", "X-Script-Name", "X-Original-URL",
    "X-Iisnode-Remote-Addr", "X-Nf-Client-Connection-IP", "X-Cluster_Client_IP",
    "L5d-Client-Id", "L5d-Dst-Canonical", "Teleport-Jwt-Assertion", "X-Nf-Request-Id",
    "X-Tyk-Trace-Id", "X-Istio-Attributes", "Disguised-Host", "Was-Default-Hostname",
    "X-Site-Deployment-Id", "X-Tunnel-Id", "Total-Route-Time", "X-SigSci-Tags",
)  # fmt: skip

CLIENTS = (
    "Traceparent", "Tracestate", "Baggage", "X-Request-Id", "X-Correlation-Id", "Mcp-Session-Id",
    "Mcp-Protocol-Version", "Mcp-Method", "Mcp-Name", "Mcp-Param-Via", "Mcp-Param-Proxy",
    "Last-Event-ID", "Accept", "Accept-Encoding", "Accept-Language",
    "Access-Control-Request-Method", "Access-Control-Request-Headers", "Authorization",
    "Cache-Control", "Connection",
    "Content-Length", "Content-Type", "Cookie", "DNT", "If-None-Match", "Keep-Alive", "Origin",
    "Pragma", "Priority", "Referer", "Sec-CH-UA", "Sec-CH-UA-Mobile", "Sec-CH-UA-Platform",
    "Sec-CH-Viewport-Width", "Sec-Fetch-Dest", "Sec-Fetch-Mode", "Sec-Fetch-Site", "Sec-GPC",
    "Sec-WebSocket-Extensions", "Sec-WebSocket-Key", "Sec-WebSocket-Protocol",
    "Sec-WebSocket-Version", "TE", "Transfer-Encoding", "Upgrade", "Upgrade-Insecure-Requests",
    "User-Agent", "X-Requested-With", "X-Client-Data",
)  # fmt: skip
"""Headers of clients: MCP's own, those of browsers and of traces."""


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:80", "[::1]", "[::ffff:127.0.0.1]:80"],
)
def test_a_request_from_this_machine_is_near(host: str) -> None:
    assert is_near(scope(("accept", "*/*"), ("user-agent", "a"), host=host)) and is_local_name(host)


def test_a_client_that_a_server_of_both_families_sees_is_near() -> None:
    """RFC 4291, 2.5.5.2: it is the IPv4 address of loopback."""
    ends = {"client": ("::ffff:127.0.0.1", 50_000), "server": ("::ffff:127.0.0.1", 8_000)}
    assert is_near(scope(host="localhost:8000", **ends))
    assert not is_near(scope(host="localhost:8000", client=("::ffff:192.0.2.1", 50_000)))


def test_a_header_that_proxies_add_says_that_it_came_through_one() -> None:
    assert [sign for sign in SIGNS if is_near(scope((sign, "192.0.2.1")))] == []


def test_a_header_of_a_client_says_nothing() -> None:
    """Not next to others either, and its value is not looked at."""
    for header in CLIENTS:
        fields = (("accept", "*/*"), (header, "via proxy"), ("user-agent", "x-forwarded"))
        assert is_near(scope(*fields)), header


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:80.evil.com",
        "127.0.0.1:",
        "localhost:x@evil.com",
        "localhost:80\n",
        "[::1].evil.com",
        "[::1]:80.evil.com",
        "[127.0.0.1",
        "localhost, evil.com",
        "localhost:\u0661",
    ],
)
def test_a_host_that_only_begins_as_this_machine_is_another(host: str) -> None:
    assert not is_local_name(host)
    assert not is_near(scope(host=host))


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
        scope(client=("127.0.0.1", 0)),
        {**scope(), BY_NAME: True},
    ],
)
def test_so_does_anything_that_no_client_on_this_machine_has(of: dict[str, Any]) -> None:
    """Another name or two, no name at all, an address elsewhere, a Unix socket, HTTP/1.0 as
    nginx speaks it, a named proxy, an endpoint that other names may reach.
    """
    assert not is_near(of)


@pytest.mark.parametrize("client", [("127.0.0.1", 50_000), ("192.0.2.1", 50_000)])
def test_the_requests_of_a_connection_without_a_proxy_are_of_one_client(
    client: tuple[str, int],
) -> None:
    first, second = (own_connection(scope(host="mcp.example", client=client)) for _ in range(2))
    assert first == second is not None
    assert len({first, second}) == 1


def test_a_later_connection_from_the_same_port_is_of_another_client() -> None:
    """A server that is not ours gives all requests of one connection the same object."""
    first, second = (own_connection(scope(client=tuple(["127.0.0.1", 50_000]))) for _ in range(2))
    assert first != second
    assert None not in (first, second)


@pytest.mark.parametrize("header", SIGNS)
def test_a_proxy_sends_requests_of_several_clients_on_a_connection(header: str) -> None:
    assert own_connection(scope((header, "x"))) is None


@pytest.mark.parametrize("of", [{"client": None}, {"client": ("192.0.2.1", 0)}])
def test_a_connection_without_a_port_is_unowned(of: dict[str, Any]) -> None:
    """A Unix socket, and a trusted proxy's client."""
    assert own_connection(scope(**of)) is None
    assert own_connection(scope(http_version="1.0")) is None
