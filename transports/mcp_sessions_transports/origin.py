"""Host and Origin: a page in a browser must not reach a server on its user's machine.

The rules and the settings object are the SDK's (``TransportSecuritySettings``); a verdict
is remembered, since a server sees the same few values again and again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mcp_sessions.core.nearness import is_local_name

logger = logging.getLogger(__name__)

_REMEMBERED = 256

_METHODS = ("GET", "POST", "DELETE")

_EXPOSED = ("Mcp-Session-Id", "Mcp-Protocol-Version", "WWW-Authenticate", "Retry-After")
"""Response headers that a client in a page reads."""


class SecuritySettings(Protocol):
    enable_dns_rebinding_protection: bool
    allowed_hosts: list[str]
    allowed_origins: list[str]


Verdict = tuple[int, str] | None
"""The status and the text that refuse a request. None: it is allowed."""


class OriginGuard:
    """Decides by Host and Origin whether a request is allowed.

    Args:
        settings: None: everything may.
        any_host: Check ``Origin`` only.
    """

    def __init__(self, settings: SecuritySettings | None, *, any_host: bool = False) -> None:
        allowed = settings.allowed_hosts if settings is not None else ()
        self.is_by_name = not all(is_local_name(host) for host in allowed)
        """Whether clients may call this server by a name that is not this machine's own."""

        self.verdicts = _Verdicts(settings, any_host)
        """(Host, Origin) → what is answered to a request with these."""


class _Verdicts(dict[tuple[bytes | None, bytes | None], Verdict]):
    """Decides about each pair when it comes, and remembers the first ones."""

    def __init__(self, settings: SecuritySettings | None, any_host: bool) -> None:
        super().__init__()
        self._any_host = any_host
        is_on = settings is not None and settings.enable_dns_rebinding_protection
        self._settings = settings if is_on else None

    def __missing__(self, seen: tuple[bytes | None, bytes | None]) -> Verdict:
        if self._settings is None:
            return None
        verdict = _verdict_of_host(self._settings, seen[0]) if not self._any_host else None
        verdict = verdict or _verdict_of_origin(self._settings, seen[1])
        if len(self) < _REMEMBERED:
            self[seen] = verdict
        return verdict


def _verdict_of_host(settings: SecuritySettings, host: bytes | None) -> Verdict:
    if not host or not _matches(host.decode("latin-1"), settings.allowed_hosts):
        logger.warning(
            "refused a request (421): its Host is not an allowed host. Allow the name with "
            "serve --allowed-host NAME, or allowed_hosts of "
            "security=TransportSecuritySettings(...)"
        )
        return 421, "Invalid Host header"
    return None


def _verdict_of_origin(settings: SecuritySettings, origin: bytes | None) -> Verdict:
    if origin and not _matches(origin.decode("latin-1"), settings.allowed_origins):
        logger.warning(
            "refused a request (403): its Origin is not an allowed origin. Allow the page "
            "with serve --allowed-origin URL, or allowed_origins of "
            "security=TransportSecuritySettings(...)"
        )
        return 403, "Invalid Origin header"
    return None


def _matches(value: str, allowed: Sequence[str]) -> bool:
    return any(
        value == entry or (entry.endswith(":*") and value.startswith(entry[:-1]))
        for entry in allowed
    )


def readable_by_pages(app: ASGIApp, settings: SecuritySettings | None) -> ASGIApp:
    """The application with the answers of CORS, for the pages that :class:`OriginGuard` allows.

    A request without ``Origin`` passes through unchanged. A page may send any request header:
    2026-07-28 lets a tool name headers of its own. Cookies are not asked for.

    Args:
        app: Serves the endpoint, with its authentication. A preflight has no credential, so it
            is answered before that.
        settings: The operator's own. None, or no allowed origin: ``app`` itself.
    """
    origins = settings.allowed_origins if settings is not None else []
    if not origins:
        return app
    any_port = [re.escape(entry[:-1]) + r"\d+" for entry in origins if entry.endswith(":*")]
    return CORSMiddleware(
        app,
        allow_origins=[entry for entry in origins if not entry.endswith(":*")],
        allow_origin_regex="|".join(any_port) or None,
        allow_methods=_METHODS,
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        # The operator named the page: it may also call a server on a private network.
        allow_private_network=True,
    )
