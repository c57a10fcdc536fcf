"""Why a connection could not be opened: words to act on, and nothing secret in them."""

import errno
import socket
import ssl

import httpx2
import pytest

from mcp_sessions.http_client.connect_errors import reason_of, without_credentials


def refused_certificate(code: int) -> ssl.SSLCertVerificationError:
    """As OpenSSL refuses one."""
    error = ssl.SSLCertVerificationError("secret")
    error.verify_code, error.verify_message = code, "self-signed"
    return error


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@example.com/mcp?token=secret#secret",
        "https://example.com/mcp?token=secret",
        "https://secret@example.com/mcp",
    ],
)
def test_a_url_for_people_has_no_credentials(url: str) -> None:
    """SEC2."""
    assert without_credentials(url) == "https://example.com/mcp"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(-2, "secret.example"), "its name cannot be resolved"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "connection refused"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "the connection was reset"),
        (BrokenPipeError(errno.EPIPE, "x"), "the connection was reset"),
        (refused_certificate(19), "is not accepted: self-signed; the variable SSL_CERT_FILE names"),
        (refused_certificate(10), "is not accepted: self-signed"),
        (refused_certificate(62), "is not accepted: it is for another name"),
        (ssl.SSLError("secret"), "TLS failed"),
        (OSError(errno.ENETUNREACH, "secret"), "network is unreachable"),
        (httpx2.UnsupportedProtocol("secret"), "no address of an HTTP server"),
        (TimeoutError("secret"), "no answer in time"),
        # The cause of what websockets raises if the answer is no HTTP.
        (EOFError("secret"), "the server closed the connection, or does not speak HTTP there"),
        (ValueError("secret"), "ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_cause_is_named_and_its_own_text_is_not_reported(error: Exception, reason: str) -> None:
    """SEC2: the text may hold the URL with its query."""
    said = reason_of(error)

    assert reason in said
    assert "secret" not in said


def test_the_first_cause_that_says_something_is_reported() -> None:
    outer = httpx2.ConnectError("all attempts failed")
    outer.__cause__ = ExceptionGroup("of each address", [OSError("?"), ConnectionRefusedError()])

    assert reason_of(outer) == "connection refused: nothing listens there"


def test_causes_in_a_circle_come_to_an_end() -> None:
    one, other = ValueError(), KeyError()
    one.__context__, other.__context__ = other, one

    assert reason_of(one) == "ValueError"


def test_how_long_was_waited_is_reported_where_it_is_known() -> None:
    assert reason_of(httpx2.ConnectTimeout("x"), seconds=2.5) == "no answer within 2.5 s"
