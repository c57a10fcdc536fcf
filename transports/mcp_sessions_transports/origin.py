"""Host and Origin: a page in a browser must not reach a server on its user's machine.

The settings object is the SDK's (``TransportSecuritySettings``). A verdict is remembered, since a
server sees the same few values again and again.

Rules, owned by ``tests/transports/test_origin.py``:

1. Names are compared without regard to case, to a dot at their end, and to how an IPv6 address is
   written. One without its zone is the same (RFC 6874, 4). So is the IPv4 address that is mapped to
   one.
2. No port is the default port of the scheme. A Host has no scheme: 80 and 443 are both its default.
3. An entry with ``:*`` allows each port, and none. A page of another machine cannot call a server
   by its loopback name, whatever port it says.
4. A page that the application's own CORS allows is allowed, unless the operator named pages.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from starlette.types import Scope

from mcp_sessions.core.nearness import is_local_name
from mcp_sessions.core.recent import Recent
from mcp_sessions.seldom import Seldom

logger = logging.getLogger(__name__)
logger.addFilter(Seldom())

_REMEMBERED = 256


class SecuritySettings(Protocol):
    enable_dns_rebinding_protection: bool
    allowed_hosts: list[str]
    allowed_origins: list[str]


Verdict = tuple[int, str] | None
"""The status and the text that refuse a request. None: it is allowed."""

AllowsPage = Callable[[Scope, bytes | None, bytes], Awaitable[bool]]
"""Takes the scope of a request, its Host and its Origin."""


class OriginGuard:
    """Decides by Host and Origin whether a request is allowed.

    Args:
        settings: None: everything may.
        pages: Says whether something else than the settings allows a page. None: nothing does.
        any_host: Check ``Origin`` only.
    """

    def __init__(
        self,
        settings: SecuritySettings | None,
        pages: AllowsPage | None = None,
        *,
        any_host: bool = False,
    ) -> None:
        self._pages = pages
        allowed = settings.allowed_hosts if settings is not None else ()
        self.is_by_name = not all(is_local_name(host) for host in allowed)
        """Whether clients may call this server by a name that is not this machine's own."""

        if settings is not None and not settings.enable_dns_rebinding_protection:
            settings = None
        self.hosts = None if settings is None or any_host else settings.allowed_hosts
        """What is allowed, as in the settings. None: any."""

        self.origins = None if settings is None else settings.allowed_origins
        """As ``hosts``."""

        self.verdicts = _Verdicts(AllowedNames(self.hosts), AllowedNames(self.origins))
        """(Host, Origin) → what is answered to a request with these."""

    async def learn(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Ask about the page of a request that would be refused."""
        host, origin = headers.get(b"host"), headers[b"origin"]
        if self._pages is None or (host, origin) in self.verdicts:
            return
        if not self.verdicts.origins.have(origin.decode("latin-1")) and await self._pages(
            scope, host, origin
        ):
            self.verdicts.pages.keep(origin, None)


@dataclass(frozen=True, slots=True)
class Guards:
    """What decides at one endpoint by Host and Origin."""

    http: OriginGuard
    websocket: OriginGuard
    is_after_fastmcps: bool
    """Whether FastMCP's own guard decides before these do."""


class _Verdicts(dict[tuple[bytes | None, bytes | None], Verdict]):
    """Decides about each pair when it comes, and remembers the first ones."""

    def __init__(self, hosts: AllowedNames, origins: AllowedNames) -> None:
        super().__init__()
        self._hosts, self.origins = hosts, origins
        self.pages = Recent[bytes, None](_REMEMBERED)
        """Origins that the application around the endpoint allows."""

    def __missing__(self, seen: tuple[bytes | None, bytes | None]) -> Verdict:
        verdict = self._decided(*seen)
        if len(self) < _REMEMBERED:
            self[seen] = verdict
        return verdict

    def _decided(self, host: bytes | None, origin: bytes | None) -> Verdict:
        name = (host or b"").decode("latin-1")
        if not self._hosts.have(name):
            logger.warning(
                "refused a request (421): its Host %s is not an allowed host. Allow the name with "
                "serve --allowed-host NAME, or allowed_hosts of "
                "security=TransportSecuritySettings(...)",
                _loggable(name),
            )
            return 421, "Invalid Host header"
        name = (origin or b"").decode("latin-1")
        if name and origin not in self.pages and not self.origins.have(name):
            logger.warning(
                "refused a request (403): its Origin %s is not an allowed origin. Allow the page "
                "with serve --allowed-origin URL, or allowed_origins of "
                "security=TransportSecuritySettings(...)",
                _loggable(name),
            )
            return 403, "Invalid Origin header"
        return None


_LONGEST_NAME: Final = 255
"""Characters of a host's name in DNS."""

_NAME: Final = re.compile(
    r"(?:(?P<scheme>[a-z][a-z0-9+.-]*)://)?"
    r"(?P<host>\[[0-9a-f:.]+(?:%[0-9a-z_.~-]+)?\]|[a-z0-9_.-]+)(?::(?P<port>[0-9]{0,5}|\*))?",
    re.ASCII,
)
_DEFAULTS: Final = {None: ("80", "443"), "http": ("80",), "https": ("443",)}
"""Scheme → the ports that need not be written."""


class _Name(NamedTuple):
    """A host, or the origin of a page."""

    scheme: str | None
    host: str
    port: str
    """``*``: each. Empty: the default one."""


def _name_of(text: str) -> _Name | None:
    """Return the parts of a Host or an Origin. None: it is neither."""
    found = _NAME.fullmatch(text.lower()) if len(text) <= _LONGEST_NAME else None
    if found is None:
        return None
    scheme, host, port = found["scheme"], found["host"].removesuffix("."), found["port"] or ""
    if host.startswith("["):
        try:
            address = ipaddress.IPv6Address(host[1:-1].partition("%")[0])
        except ValueError:
            return None
        host = str(address.ipv4_mapped or f"[{address}]")
    port = port.lstrip("0")
    return _Name(scheme, host, "" if port in _DEFAULTS.get(scheme, ()) else port)


def _loggable(text: str) -> str:
    """Return a name for the log, as it was sent: it cannot look like another line."""
    return text if _name_of(text) is not None else "(malformed)"


class AllowedNames:
    """The hosts or origins of a list. None: all."""

    def __init__(self, entries: Iterable[str] | None) -> None:
        self._has_all = entries is None
        self._texts = frozenset(each.lower() for each in entries or ())
        names = (_name_of(_bracketed(each).removesuffix("/")) for each in self._texts)
        self._names = frozenset(name for name in names if name is not None)

    def have(self, text: str) -> bool:
        if self._has_all:
            return True
        name = _name_of(text)
        if name is None:
            # Such as "null", the origin of a page without one.
            return bool(text) and "*" not in text and text.lower() in self._texts
        return name.port != "*" and not self._names.isdisjoint((name, name._replace(port="*")))


def _bracketed(entry: str) -> str:
    """Return an entry with the brackets that an IPv6 address has in a header."""
    return f"[{entry}]" if entry.count(":") > 1 and "/" not in entry and "[" not in entry else entry
