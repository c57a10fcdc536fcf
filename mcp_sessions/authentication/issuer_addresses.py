from __future__ import annotations

from urllib.parse import urlsplit

from mcp_sessions.core.nearness import is_loopback
from mcp_sessions.errors import ConfigurationError


def checked_url(option: str, url: str) -> str:
    """Return the URL of an issuer or of a server.

    Raises:
        ConfigurationError: It is not ``https``, or has a query or a fragment. ``http`` is good on
            loopback only.
    """
    if not is_safe(url) or any(sign in url for sign in "?#"):
        raise ConfigurationError(
            f"{option}: must be an https URL without a query, such as https://login.example.com"
        )
    return url


def is_safe(url: str) -> bool:
    """Whether no one on the network can change what is read from a URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "http":
            return is_loopback(parts.hostname)
        return parts.scheme == "https" and bool(parts.hostname)
    except ValueError:
        return False


def discovery_urls(issuer: str) -> tuple[str, ...]:
    """Return the addresses of an issuer's document, in the order of the MCP specification."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    known = f"{origin}/.well-known"
    found = (
        f"{known}/oauth-authorization-server{path}",
        f"{known}/openid-configuration{path}",
        f"{origin}{path}/.well-known/openid-configuration",
    )
    return tuple(dict.fromkeys(found))
