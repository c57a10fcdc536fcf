"""Host and Origin: a page in a browser must not reach a server on its user's machine.

The rules and the settings object are the SDK's (``TransportSecuritySettings``); a verdict
is remembered, since a server sees the same few values again and again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
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

        if settings is not None and not settings.enable_dns_rebinding_protection:
            settings = None
        self.hosts = None if settings is None or any_host else settings.allowed_hosts
        """What is allowed, as in the settings. None: any."""

        self.origins = None if settings is None else settings.allowed_origins
        """As ``hosts``."""

        self.verdicts = _Verdicts(self.hosts, self.origins)
        """(Host, Origin) → what is answered to a request with these."""


@dataclass(frozen=True, slots=True)
class Guards:
    """What decides at one endpoint by Host and Origin."""

    http: OriginGuard
    websocket: OriginGuard
    is_after_fastmcps: bool
    """Whether FastMCP's own guard decides before these do."""


class _Verdicts(dict[tuple[bytes | None, bytes | None], Verdict]):
    """Decides about each pair when it comes, and remembers the first ones."""

    def __init__(self, hosts: Sequence[str] | None, origins: Sequence[str] | None) -> None:
        super().__init__()
        self._hosts, self._origins = hosts, origins

    def __missing__(self, seen: tuple[bytes | None, bytes | None]) -> Verdict:
        verdict = _verdict_of_host(self._hosts, seen[0])
        verdict = verdict or _verdict_of_origin(self._origins, seen[1])
        if len(self) < _REMEMBERED:
            self[seen] = verdict
        return verdict


def _verdict_of_host(allowed: Sequence[str] | None, host: bytes | None) -> Verdict:
    if allowed is not None and not (host and _matches(host.decode("latin-1"), allowed)):
        logger.warning(
            "refused a request (421): its Host is not an allowed host. Allow the name with "
            "serve --allowed-host NAME, or allowed_hosts of "
            "security=TransportSecuritySettings(...)"
        )
        return 421, "Invalid Host header"
    return None


def _verdict_of_origin(allowed: Sequence[str] | None, origin: bytes | None) -> Verdict:
    if allowed is not None and origin and not _matches(origin.decode("latin-1"), allowed):
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
