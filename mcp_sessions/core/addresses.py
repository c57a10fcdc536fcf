"""The address of a server: what it must look like, and what to write instead.

Every place that takes an address refuses a wrong one with this text.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Hashable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import urlsplit

HTTP: Final = ("http", "https")
HTTP_AND_WEBSOCKET: Final = ("http", "https", "ws", "wss")

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_HOST_PORT: Final = re.compile(
    r"(?:[^@/\s]+@)?"
    r"(?:(?P<loopback>localhost|127(?:\.\d+){3}|\[::1\])|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][\w.-]*)"
    r"(?::[1-9]\d{0,4})?(?:[/?#]\S*)?"
)
_SURE: Final = re.compile(
    r"(?:[^@/\s]+@)?"
    r"(?:(?:localhost|[^/:\s]*\.[^/:\s]*|\[[^\]]*\])(?::\d+)?/|[^/\s]*:[1-9]\d*(?:/|\Z))"
)
"""A host and a path, or a host and a port. ``package.module:attr`` is none of these."""


def has_scheme(text: str) -> bool:
    return _SCHEME.match(text) is not None


def lacks_scheme(text: str) -> bool:
    """Whether a text is a host with a port or a path, such as ``127.0.0.1:8000/mcp``."""
    return not has_scheme(text) and bool(_SURE.match(text)) and bool(_HOST_PORT.fullmatch(text))


def wrong_address(text: str, schemes: Sequence[str]) -> str | None:
    """Why a text is not the address of a server, and what to write instead; None: it is one.

    The text is shown without its user, query and fragment, which may hold a secret.

    Args:
        schemes: The schemes that are allowed, in small letters.
    """
    allowed = ", ".join(f"{scheme}://" for scheme in schemes[:-1]) + f" or {schemes[-1]}://"
    found = _SCHEME.match(text)
    if found is None:
        authority = _HOST_PORT.fullmatch(text)
        hint = ""
        if authority is not None:
            guess = schemes[0] if authority["loopback"] else schemes[1]
            hint = f"; did you mean {guess}://{_bare(text)}?"
        return f"{_bare(text)!r} has no scheme: an address begins with {allowed}{hint}"
    scheme, rest = found[1].lower(), text[found.end() :]
    if scheme not in schemes or not found[0].endswith("://"):
        guess = (get_close_matches(scheme, schemes, 1) or [schemes[0]])[0]
        return (
            f"{_shown(found[0], rest)!r}: an address begins with {allowed}; "
            f"did you mean {guess}://{_bare(rest)}?"
        )
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or not text.isprintable() or " " in text:
        return f"{_shown(found[0], rest)!r} is not a whole address, such as {schemes[0]}://host/mcp"
    return None


def _shown(scheme: str, rest: str) -> str:
    return scheme + _bare(rest)


def _bare(text: str) -> str:
    bare = re.split(r"[?#]", text, maxsplit=1)[0]
    authority, slash, path = bare.partition("/")
    return authority.rpartition("@")[2] + slash + path


_NO_ADDRESS = ""
"""Of clients whose server says something else: whoever chooses it is no other client with another
text."""


_OWN_PATH: Final = re.compile(r"(?!/\.well-known\b)(?:/[^/]+)*/(?!(?:healthz|readyz)\Z)[^/]+")


def is_own_path(page: str, endpoint: str) -> bool:
    """Whether a page has a path of its own, beside the endpoint, health checks and metadata."""
    where = page.rstrip("/")
    return _OWN_PATH.fullmatch(where) is not None and where != endpoint.rstrip("/")


def text_of_address(scope: Mapping[str, Any] | None) -> str | None:
    """Return the address of a client as a record has it. None: it has none."""
    client = scope.get("client") if scope is not None else None
    if not client:
        return None
    try:
        ipaddress.ip_address(client[0])
    except ValueError:
        return None
    return str(client[0])


def address_of(scope: Mapping[str, Any] | None) -> Hashable:
    """Return the address of a client. None: it has none, as at standard input.

    For IPv6 it is the network of 64 bits, in which one client has every address.

    Args:
        scope: Of its request or connection.
    """
    client = scope.get("client") if scope is not None else None
    if not client:
        return None
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return _NO_ADDRESS
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or int(address) >> 64
    return address
