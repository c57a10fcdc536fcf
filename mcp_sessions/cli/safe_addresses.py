import re
from urllib.parse import urlsplit, urlunsplit

_CREDENTIAL = re.compile(r"(?i)\b((?:\w*pass\w*|username)=)[^&]*")
"""Parameters of a store's query that may name a user or a password."""


def redacted(url: str) -> str:
    """Return the URL without its password, which may stand in the authority or in the query."""
    parts = urlsplit(url)
    if _CREDENTIAL.search(parts.query):
        parts = parts._replace(query=_CREDENTIAL.sub(r"\1***", parts.query))
        url = urlunsplit(parts)
    if parts.password is None:
        return url
    _, _, host_port = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host_port}"))


def without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "an address that cannot be read"
    host = f"[{host}]" if ":" in host else host
    host_port = host if port is None else f"{host}:{port}"
    path = "" if "@" in parts.path else parts.path
    return urlunsplit((parts.scheme, host_port, path, "", "")).removeprefix("//")
