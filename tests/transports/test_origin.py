"""Host and Origin: the same verdicts as the SDK's own guard, and the door stays shut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.transport_security import (
    TransportSecurityMiddleware,
    TransportSecuritySettings,
)
from starlette.requests import Request

from mcp_sessions_transports.http.io import Headers
from mcp_sessions_transports.origin import OriginGuard

HOSTS = ["127.0.0.1:*", "localhost:*", "[::1]:*", "exact.example", "port.example:8080"]
ORIGINS = ["http://localhost:*", "https://exact.example", "null"]
SETTINGS = TransportSecuritySettings(allowed_hosts=HOSTS, allowed_origins=ORIGINS)

SOME_HOSTS = [
    "127.0.0.1:8000",
    "127.0.0.1",
    "127.0.0.1:",
    "127.0.0.1:x",
    "[::1]:1",
    "[::1]",
    "localhost:1",
    "LOCALHOST:1",
    "exact.example",
    "exact.example:1",
    "exact.example.evil:1",
    "port.example:8080",
    "port.example:8081",
    "evil.example",
    "127.0.0.1.evil.example:1",
    "",
    "127.0.0.1:*",
    "*",
]
SOME_ORIGINS = [
    "", "http://localhost:1", "http://localhost", "https://localhost:1", "https://exact.example",
    "https://exact.example:1", "https://exact.example.evil", "null", "http://localhost:1@evil",
    "file://",
]  # fmt: skip


def headers_of(host: str | None, origin: str | None) -> Headers:
    headers: Headers = {}
    if host is not None:
        headers[b"host"] = host.encode("latin-1")
    if origin is not None:
        headers[b"origin"] = origin.encode("latin-1")
    return headers


def verdict(guard: OriginGuard, headers: Headers) -> tuple[int, str] | None:
    return guard.verdicts[headers.get(b"host"), headers.get(b"origin")]


async def sdks_verdict(
    settings: TransportSecuritySettings | None, headers: Headers
) -> tuple[int, str] | None:
    request = Request({"type": "http", "method": "GET", "headers": list(headers.items())})
    response = await TransportSecurityMiddleware(settings).validate_request(request)
    return None if response is None else (response.status_code, bytes(response.body).decode())


@pytest.mark.parametrize("host", [None, *SOME_HOSTS])
async def test_whom_the_sdk_lets_in_with_a_port_comes_in(host: str | None) -> None:
    """Promised: "Host and Origin protection with the SDK's settings object"."""
    guard = OriginGuard(SETTINGS)
    for origin in (None, *SOME_ORIGINS):
        headers = headers_of(host, origin)
        if await sdks_verdict(SETTINGS, headers) is None and not {host, origin} & NO_NAMES:
            assert verdict(guard, headers) is None, (host, origin)


NO_NAMES = {"127.0.0.1:x", "127.0.0.1:*", "http://localhost:1@evil"}
"""The SDK lets them in, and they name nothing."""


@pytest.mark.parametrize(
    ("entry", "host"),
    [
        ("localhost:*", "localhost"),
        ("localhost:*", "LocalHost:8000"),
        ("localhost:*", "localhost."),
        ("localhost:*", "localhost.:8000"),
        ("127.0.0.1:*", "127.0.0.1"),
        ("[::1]:*", "[::1]"),
        ("[::1]:*", "[0:0:0:0:0:0:0:1]:8000"),
        ("::1", "[::1]"),
        ("127.0.0.1:*", "[::ffff:127.0.0.1]:8000"),
        ("[::ffff:192.0.2.1]:8000", "192.0.2.1:8000"),
        ("::ffff:192.0.2.1", "[::ffff:c000:201]"),
        ("fe80::1", "[fe80::1%eth0]"),
        ("[fe80::1%25eth0]:8000", "[FE80::1]:8000"),
        ("mcp.example", "MCP.Example"),
        ("mcp.example", "mcp.example."),
        ("mcp.example", "mcp.example:443"),
        ("mcp.example", "mcp.example:80"),
        ("mcp.example", "mcp.example:"),
        ("MCP.example:443", "mcp.example"),
        ("mcp.example.:80", "mcp.example"),
        ("mcp.example:8443", "mcp.example:8443"),
        ("mcp.example:8443", "mcp.example:08443"),
    ],
)
def test_a_host_is_compared_without_regard_to_case_and_default_port(entry: str, host: str) -> None:
    """SEC9. A proxy that passes on ``$host`` leaves the port out."""
    settings = TransportSecuritySettings(allowed_hosts=[entry])
    assert verdict(OriginGuard(settings), headers_of(host, None)) is None


@pytest.mark.parametrize(
    ("entry", "host"),
    [
        ("mcp.example", "mcp.example:8443"),
        ("mcp.example:8443", "mcp.example"),
        ("mcp.example:8443", "mcp.example:443"),
        ("mcp.example", "mcp.example.."),
        ("mcp.example", "mcp.example.evil"),
        ("mcp.example", "http://mcp.example"),
        ("mcp.example", "user@mcp.example"),
        ("mcp.example", "mcp.example, evil"),
        ("mcp.example", "mcp.example/"),
        ("localhost:*", "localhost:*"),
        ("localhost:*", "localhost:x"),
        ("localhost:*", "localhost:1.evil"),
        ("localhost:*", "localhost:\u0661".encode().decode("latin-1")),
        ("[::1]:*", "[::2]"),
        ("[::1]:*", "::1"),
        ("192.0.2.1", "[::ffff:192.0.2.2]"),
        ("fe80::1", "[fe80::1%]"),
        ("fe80::1", "[fe80::1%eth0@evil]"),
        ("*", "evil.example"),
        ("*", "*"),
    ],
)
def test_another_host_is_refused(entry: str, host: str) -> None:
    settings = TransportSecuritySettings(allowed_hosts=[entry])
    refused = 421, "Invalid Host header"
    assert verdict(OriginGuard(settings), headers_of(host, None)) == refused


@pytest.mark.parametrize(
    ("entry", "origin", "is_allowed"),
    [
        ("https://app.example", "https://app.example:443", True),
        ("https://app.example:443", "https://app.example", True),
        ("https://App.example", "https://app.EXAMPLE", True),
        ("https://app.example/", "https://app.example", True),
        ("https://app.example.", "https://app.example", True),
        ("http://localhost:*", "http://localhost", True),
        ("http://[::1]:*", "http://[0::1]:3000", True),
        ("http://127.0.0.1:*", "http://[::ffff:127.0.0.1]:3000", True),
        ("vscode-webview://1abc", "vscode-webview://1abc", True),
        ("null", "null", True),
        ("https://app.example", "http://app.example", False),
        ("https://app.example", "http://app.example:443", False),
        ("https://app.example", "https://app.example:80", False),
        ("https://app.example", "app.example", False),
        ("https://app.example", "https://app.example.evil", False),
        ("https://app.example", "https://app.example/", False),
        ("http://localhost:*", "http://localhost:1@evil", False),
        ("http://localhost:*", "https://localhost:1", False),
        ("https://app.example", "null", False),
        ("*", "https://evil.example", False),
    ],
)
def test_an_origin_is_compared_as_its_parts(entry: str, origin: str, is_allowed: bool) -> None:
    settings = TransportSecuritySettings(allowed_hosts=["a"], allowed_origins=[entry])
    expected = None if is_allowed else (403, "Invalid Origin header")
    assert verdict(OriginGuard(settings), headers_of("a", origin)) == expected


@pytest.mark.parametrize(
    "settings", [None, TransportSecuritySettings(enable_dns_rebinding_protection=False)]
)
async def test_without_protection_everybody_may_come_in(
    settings: TransportSecuritySettings | None,
) -> None:
    """Behind a proxy that checks it."""
    headers = headers_of("evil.example", "https://evil.example")
    assert verdict(OriginGuard(settings), headers) is None is await sdks_verdict(settings, headers)


PIECES = st.sampled_from(
    ["127.0.0.1", "localhost", "exact.example", ":", "*", "8000", ".", "evil", "@"]
)


@given(st.lists(PIECES, max_size=5).map("".join), st.lists(PIECES, max_size=5).map("".join))
def test_whoever_comes_in_is_on_the_list(host: str, origin: str) -> None:
    """Nothing but the names of the list, alone or before a port."""
    found = verdict(OriginGuard(SETTINGS), headers_of(host, origin))
    if found is None:
        names = [entry.removesuffix(":*") for entry in HOSTS]
        assert host.rpartition(":")[0].rstrip(".") in names or host.rstrip(".") in names
        assert origin in ("", *ORIGINS) or origin.startswith("http://localhost")
    else:
        assert found[0] in (421, 403)


def test_verdicts_are_remembered_within_a_bound() -> None:
    """Whoever sends a new Host each time fills no memory, and changes nobody's verdict."""
    guard = OriginGuard(SETTINGS)
    for number in range(5_000):
        assert verdict(guard, headers_of(f"evil-{number}.example", None)) == (
            421,
            "Invalid Host header",
        )
    assert len(guard.verdicts) <= 256
    assert verdict(guard, headers_of("127.0.0.1:8000", None)) is None


def test_the_log_names_who_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    """An operator who forgot a name finds it there."""
    verdict(OriginGuard(SETTINGS), headers_of("Evil.example:81", None))
    verdict(OriginGuard(SETTINGS), headers_of("exact.example", "https://page.example"))
    host, origin = (record.getMessage() for record in caplog.records)
    assert "its Host Evil.example:81 is not an allowed host" in host
    assert "its Origin https://page.example is not an allowed origin" in origin


@pytest.mark.parametrize("sent", ["evil\x85INFO all is well", "evil\n", "e" * 256, "evil%s", ""])
def test_the_log_does_not_repeat_what_is_no_name(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A header may be forged to look like another line of the log."""
    verdict(OriginGuard(SETTINGS), headers_of(sent, None))
    verdict(OriginGuard(SETTINGS), headers_of("exact.example", sent or "?"))
    assert len(caplog.records) == 2
    assert "evil" not in caplog.text and "eee" not in caplog.text
    assert "its Host (malformed)" in caplog.text
