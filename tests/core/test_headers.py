"""Headers that a client can be given: one that it cannot send is one clear error, at once."""

import pytest

from mcp_sessions import HTTPServer, resumable
from mcp_sessions.errors import ConfigurationError

OWN = [
    "Accept",
    "Accept-Encoding",
    "Connection",
    "Content-Encoding",
    "Content-Length",
    "Content-Type",
    "Expect",
    "Keep-Alive",
    "Last-Event-ID",
    "MCP-Protocol-Version",
    "Mcp-Method",
    "Mcp-Name",
    "Mcp-Param-Region",
    "Mcp-Session-Id",
    "Proxy-Connection",
    "Sec-WebSocket-Key",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
    "transfer-encoding",
]

BAD = [
    ({"Authorization": "secret", "authorization": "secret"}, "twice"),
    ({"bad name": "secret"}, "no name"),
    ({"": "secret"}, "no name"),
    ({"Authorization": "Bearer secret\n"}, "space"),
    ({"Authorization": "Bearer secr\nX: y"}, "line break"),
    ({"X": "secrét"}, "ASCII"),
    ({"X": 5}, "must be a text"),
    ({"X": "secr" * 10_000}, "no server takes more"),
    ({f"X-{number}": "a" * 1_000 for number in range(40)}, "no server takes more"),
]


@pytest.mark.parametrize(("headers", "reason"), BAD)
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/mcp", "ws://127.0.0.1:9/mcp"])
def test_a_header_that_a_client_cannot_send_is_one_error_before_it_connects(
    headers: dict[str, str], reason: str, url: str
) -> None:
    """Otherwise it is an ExceptionGroup out of ``async with Client``. No value is in the
    message.
    """
    makers = [resumable] if url.startswith("ws") else [resumable, HTTPServer]
    for make in makers:
        with pytest.raises(ConfigurationError, match=reason) as refused:
            make(url, headers=headers)
        assert "secr" not in str(refused.value).replace("secr\\n", "")


@pytest.mark.parametrize("name", OWN)
def test_a_header_that_the_client_sends_itself_is_left_out_and_the_log_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An example of ACP's page "Session Setup" has ``Content-Type``. The client's own is right."""
    headers = {name: "secret", "X-Own": "a"}
    assert HTTPServer("http://127.0.0.1:9/mcp", headers=headers).headers == {"X-Own": "a"}
    [left_out] = caplog.messages
    assert left_out == f"the header {name!r} is left out: the client sends it itself"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/mcp", "ws://127.0.0.1:9/mcp"])
def test_a_client_names_the_host_in_its_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A server refuses a name that is not its own with 421, which was an ExceptionGroup as well."""
    resumable(url, headers={"Host": "wrong"})
    assert caplog.messages == ["the header 'Host' is left out: the client sends it itself"]


def test_any_other_is_sent() -> None:
    headers = {"Authorization": "Bearer a", "X-Own": "b\tc", "Accept-Language": "de"}
    resumable("http://127.0.0.1:9/mcp", headers=headers)
    headers["Host"] = "behind.a.proxy"
    assert HTTPServer("http://127.0.0.1:9/mcp", headers=headers).headers == headers
