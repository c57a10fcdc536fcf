from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Final

from mcp_sessions.errors import ConfigurationError

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e\t]*")
_OWN: Final = frozenset({
    "accept", "accept-encoding", "connection", "content-encoding", "content-length",
    "content-type", "expect", "http2-settings", "keep-alive", "last-event-id", "mcp-method",
    "mcp-name", "mcp-protocol-version", "mcp-session-id", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
"""Those that the client itself sends, or that belong to the message or the connection."""

_SINGLE: Final = frozenset({
    "authorization", "date", "from", "if-modified-since", "if-range", "if-unmodified-since",
    "max-forwards", "origin", "proxy-authorization", "range", "referer", "user-agent",
})  # fmt: skip
"""Those whose value is no list."""

_OWN_BEGINNINGS: Final = ("mcp-param-", "sec-websocket-")

_MOST: Final = 32_768
"""Characters of all of them. Most servers take less, and close the connection at more."""


def joined_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Join the values of each name: RFC 9110, 5.3, and RFC 9113, 8.2.3, for cookies.

    Raises:
        ConfigurationError: A value that is no list is there twice.
    """
    names: dict[str, str] = {}
    joined: dict[str, str] = {}
    for name, value in pairs:
        lower = name.lower()
        known = names.setdefault(lower, name)
        if known not in joined:
            joined[known] = value
        elif lower in _SINGLE:
            raise _twice(name)
        else:
            joined[known] += ("; " if lower == "cookie" else ", ") + value
    return joined


def sendable_headers(
    headers: Mapping[str, str] | None, *, may_name_host: bool = False
) -> dict[str, str]:
    """Return the headers that a client sends beside its own. No message says a value: it may be a
    credential.

    A header that the client itself sends is left out, with a warning. Files of hosts often name
    ``Content-Type`` and ``Accept``.

    Args:
        may_name_host: ``Host`` may be another one than that of the URL.

    Raises:
        ConfigurationError: One of them cannot be sent, or is there twice.
    """
    sent: dict[str, str] = {}
    seen: set[str] = set()
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"the header {name!r} is no text: give name and value as str")
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"the header {name!r} cannot be sent: that is no name")
        lower = name.lower()
        is_own = lower in _OWN or lower.startswith(_OWN_BEGINNINGS)
        if is_own or (lower == "host" and not may_name_host):
            logger.warning("the header %r is left out: the client sends it itself", name)
            continue
        if value != value.strip():
            # A token that is missing, above all, or one with the end of its line.
            raise ConfigurationError(f"the header {name!r} begins or ends with a space")
        if not _VALUE.fullmatch(value):
            raise ConfigurationError(
                f"the header {name!r} cannot be sent: its value has characters that are not ASCII, "
                "or a line break"
            )
        if lower in seen:
            raise _twice(name)
        seen.add(lower)
        sent[name] = value
    size = sum(len(name) + len(value) for name, value in sent.items())
    if size > _MOST:
        raise ConfigurationError(
            f"the headers have {size} characters: no server takes more than {_MOST}"
        )
    return sent


def _twice(name: str) -> ConfigurationError:
    return ConfigurationError(f"the header {name!r} is there twice: give it once")
