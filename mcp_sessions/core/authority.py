from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

ROUNDS = 4
"""How often a text is decoded. A server decodes once, or twice by mistake."""

REMEMBERED = 1_024
"""Texts whose readings are kept."""

_AUTHORITY = re.compile(r"([^:/?#]+:[/\\]{2,})([^/\\?#]*@)?([^/\\?#]*?)(:[0-9]*)?(?=[/\\?#]|\Z)")
"""Its beginning, user information, host and port, of a URI that is not decoded."""

_WITH_PORTS = ("http:", "https:", "ws:", "wss:", "ftp:")
"""Schemes that have another server at each port."""


class Less(NamedTuple):
    uri: str
    lacks_user: bool
    lacks_port: bool


@lru_cache(REMEMBERED)
def less_of(uri: str) -> tuple[Less, ...]:
    """Return a URI without its user information, without its port, and without both.

    Some servers ignore these parts. They are removed before each round of decoding, because a
    decoded slash in a user name does not end the host.
    """
    found: dict[Less, None] = {}
    text = uri
    for _ in range(ROUNDS + 1):
        for each in (text, whatwg(text) or text):
            match = _AUTHORITY.match(each)
            if match is None:
                continue
            begins, user, host, port = (part or "" for part in match.groups())
            if begins.lower().startswith(_WITH_PORTS):
                host, port = host + port, ""
            rest = each[match.end() :]
            if user:
                found[Less(begins + host + port + rest, True, False)] = None
            if port:
                found[Less(begins + user + host + rest, False, True)] = None
            if user and port:
                found[Less(begins + host + rest, True, True)] = None
        text = unquote(text)
    return tuple(found)


def whatwg(uri: str) -> str | None:
    # Loaded where something is hidden, and nowhere else.
    from ada_url import normalize_url

    try:
        return normalize_url(uri)
    except ValueError:  # of text that is not Unicode, too
        return None
