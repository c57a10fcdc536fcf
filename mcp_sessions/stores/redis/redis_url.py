from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from mcp_sessions.errors import ConfigurationError


def check_url(url: str) -> None:
    """Refuse what redis-py would take for something else, in silence.

    Raises:
        ConfigurationError: The URL names no server, or no database by its number; or it has a
            second ``?``, with which stores that are meant to be apart would share a namespace.
    """
    parts = urlsplit(url)
    scheme = parts.scheme
    if "?namespace=" in parts.query:
        raise ConfigurationError(f"a {scheme}:// URL has one ?: write & before namespace=")
    if scheme == "unix":
        if len(parts.path) < 2:
            raise ConfigurationError("a unix:// URL names a socket: unix:///run/redis.sock")
        return
    if not url.startswith(f"{scheme}://"):
        raise ConfigurationError(
            f"a {scheme}:// URL has two slashes and a host: {scheme}://localhost:6379/0"
        )
    try:
        _ = parts.port
    except ValueError as wrong:
        raise ConfigurationError(
            f"the port in a {scheme}:// URL is a number from 0 to 65535: "
            f"{scheme}://localhost:6379/0"
        ) from wrong
    database = parts.path.removeprefix("/")
    if database and not (database.isascii() and database.isdecimal()):
        raise ConfigurationError(
            f"the database in a {scheme}:// URL is a number: {scheme}://localhost:6379/0"
        )


def url_of_node(url: str, host: str, port: int) -> str:
    """``url`` for another node of its cluster, with the same credentials and options.

    Args:
        host: Empty: the same.
    """
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    host = host or parts.hostname or "localhost"
    bracketed = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{bracketed}:{port}"))
