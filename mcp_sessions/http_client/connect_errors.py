"""Why a connection could not be opened, or broke, in words that a person can act on.

They hold nothing secret: not the error's own text, which may have the URL with its query, nor
the URL as it was given.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import cast

import httpx2

from mcp_sessions.core.resume import MAX_SECONDS

_DEPTH = 8
"""How far down the causes of an error are looked at."""


def without_credentials(url: str) -> str:
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(userinfo=b"", query=None, fragment=None))


def retry_after(value: str) -> float | None:
    """Seconds that a ``Retry-After`` header asks for; None: it does not say.

    Args:
        value: A number of seconds, or a date (RFC 9110, 10.2.3). Any other value is ignored.
    """
    if value.isascii() and value.isdigit():
        # As many digits as are there: what is too large for a float is infinite.
        return min(float(value), MAX_SECONDS)
    try:
        then = parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, then - time.time()), MAX_SECONDS)


def reason_of(error: BaseException, *, seconds: float | None = None) -> str:
    """The first cause of ``error`` that says something; without one, the error's type.

    Args:
        seconds: How long was waited, should it be that nobody answered in time.
    """
    said = (_said(cause, seconds) for cause in causes_of(error))
    return next((text for text in said if text is not None), type(error).__name__)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_DEPTH):
        if cause is None:
            return
        yield cause
        cause = _cause_of(cause)


def _cause_of(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        # One for each address of a name: the last was tried last.
        return cast("BaseExceptionGroup[BaseException]", error).exceptions[-1]
    return error.__cause__ or error.__context__


def _said(error: BaseException, seconds: float | None) -> str | None:
    match error:
        case httpx2.ConnectTimeout() | httpx2.ReadTimeout() | TimeoutError():
            return "no answer in time" if seconds is None else f"no answer within {seconds:g} s"
        case httpx2.PoolTimeout():
            return "too many connections of this client are open already"
        case httpx2.RemoteProtocolError() | EOFError():
            return "the server closed the connection, or does not speak HTTP there"
        case httpx2.DecodingError():
            return "what came is compressed in a way that cannot be read"
        case httpx2.UnsupportedProtocol() | httpx2.InvalidURL():
            return "this is no address of an HTTP server"
        case socket.gaierror():
            return "its name cannot be resolved"
        case ssl.SSLCertVerificationError():
            return f"TLS: its certificate is not accepted: {_why_refused(error)}"
        case ssl.SSLError():
            return "TLS failed"
        case ConnectionRefusedError():
            return "connection refused: nothing listens there"
        case ConnectionResetError() | BrokenPipeError():
            return "the connection was reset"
        case OSError() if error.errno is not None:
            return os.strerror(error.errno).lower()
        case _:
            return None


_OTHER_NAME = frozenset({62, 63, 64})
"""OpenSSL's numbers for a certificate of another host, mail address or IP address."""

_NOT_TRUSTED = frozenset({2, 18, 19, 20, 21})
"""Those for a certificate whose issuer is not known here."""


def _why_refused(error: ssl.SSLCertVerificationError) -> str:
    # Only OpenSSL sets these.
    code, why = (
        getattr(error, "verify_code", 0),
        getattr(error, "verify_message", "no reason given"),
    )
    if code in _OTHER_NAME:
        return "it is for another name"
    if code in _NOT_TRUSTED:
        return f"{why}; the variable SSL_CERT_FILE names a file of certificates to trust"
    return str(why)
