from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Mapping
from typing import Any


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
        return str(client[0])
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or int(address) >> 64
    return address
