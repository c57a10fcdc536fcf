"""Who a client is, by what the proxies that the operator named say of it.

Rules, owned by ``tests/core/test_proxies.py``:

1. Nobody is believed whom the operator did not name: anybody can send these headers.
2. ``X-Forwarded-For`` has an address of each proxy's client, the nearest proxy's last. The client
   is the last one that is no named proxy. If all are proxies, it is the first.
3. What is no address is not believed, nor anything before it.
4. With ``*`` each peer is a proxy, and its own word counts alone: the last address.
5. ``X-Forwarded-Proto`` says whether the client used TLS. No other header is read.
6. An IPv4 address that is mapped to IPv6 (RFC 4291, 2.5.5.2) is the IPv4 address. A network of such
   addresses is the IPv4 network.
7. A zone (RFC 4007, 11) says on which link an address is. An entry without one is on any link.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final

from mcp_sessions.errors import ConfigurationError

_ADDRESS: Final = re.compile(
    r"\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.~-]+)?)\](?::[0-9]{1,5})?|(?P<four>[0-9.]+)(?::[0-9]{1,5})?"
    r"|[0-9A-Fa-f:.]+(?:%[\w.~-]+)?",
    re.ASCII,
)
_SCHEMES: Final = ("http", "https", "ws", "wss")

_MAPPED: Final = 96
"""Bits before an IPv4 address that is mapped to IPv6."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Proxies:
    """The proxies that an operator named.

    Args:
        named: Addresses and networks, separated by commas, or ``*`` for every peer.

    Raises:
        ConfigurationError: One is neither.
    """

    def __init__(self, named: str) -> None:
        entries = [each.strip() for each in named.split(",")]
        self._are_all = "*" in entries
        self._networks = [_network(each) for each in entries if each != "*"]

    def have(self, peer: str | None) -> bool:
        """Whether the peer of a connection is one of them. None: it has no address."""
        if self._are_all:
            return True
        address = _address(peer) if peer is not None else None
        return address is not None and self._has(address, getattr(address, "scope_id", None))

    def client_of(self, forwarded_for: Iterable[str]) -> str | None:
        """Return the client of which one of them says this. None: none is named.

        Args:
            forwarded_for: The values of ``X-Forwarded-For``, in their order.
        """
        found: Address | None = None
        for text in reversed(",".join(forwarded_for).split(",")):
            address = _address(text.strip(" \t"))
            if address is None:
                break
            found = address
            if self._are_all or not self._has(address):
                break
        # The link is one of the proxy, not of this machine.
        return str(found).partition("%")[0] if found is not None else None

    def _has(self, address: Address, link: str | None = None) -> bool:
        return any(address in network and zone in (None, link) for network, zone in self._networks)


def scheme_of(forwarded_proto: Sequence[str]) -> str | None:
    """Return the scheme that a proxy says. None: it says none."""
    said = ",".join(forwarded_proto).rpartition(",")[2].strip(" \t").lower()
    return said if said in _SCHEMES else None


def _network(text: str) -> tuple[Network, str | None]:
    """Return a network, and the zone that its addresses have. None: any."""
    bare, sign, rest = text.partition("%")
    zone, slash, prefix = rest.partition("/")
    try:
        network = ipaddress.ip_network(bare + slash + prefix, strict=False)
        if sign and not (zone and network.version == 6):
            raise ValueError(text)
    except ValueError:
        raise ConfigurationError(
            f"must be addresses or networks, such as 10.0.0.0/8, or '*', not {text!r}"
        ) from None
    if isinstance(network, ipaddress.IPv6Network) and network.prefixlen >= _MAPPED:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED)), None
    return network, zone or None


def _address(text: str) -> Address | None:
    """Return an address, which may have a port. None: it is none."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return None
    try:
        address = ipaddress.ip_address(found["six"] or found["four"] or text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or address
    return None if found["six"] else address
