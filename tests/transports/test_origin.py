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


@pytest.mark.anyio
@pytest.mark.parametrize("host", [None, *SOME_HOSTS])
async def test_the_verdicts_are_the_sdks(host: str | None) -> None:
    """Promised: "Host and Origin protection with the SDK's settings object"."""
    guard = OriginGuard(SETTINGS)
    for origin in (None, *SOME_ORIGINS):
        headers = headers_of(host, origin)
        assert verdict(guard, headers) == await sdks_verdict(SETTINGS, headers), (host, origin)


@pytest.mark.anyio
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
        assert host in HOSTS or host.rpartition(":")[0] in names or host.split(":")[0] in names
        assert origin in ("", *ORIGINS) or origin.startswith("http://localhost:")
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


def test_the_log_does_not_repeat_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    """A header may be forged to look like another line of the log."""
    verdict(OriginGuard(SETTINGS), headers_of("evil\x85INFO all is well", None))
    verdict(OriginGuard(SETTINGS), headers_of("exact.example", "https://evil.example"))
    assert len(caplog.records) == 2
    assert "evil" not in caplog.text
