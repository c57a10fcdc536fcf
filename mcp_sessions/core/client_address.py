from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Mapping
from typing import Any

_NO_ADDRESS = ""
"""Of clients whose server says something else: whoever chooses it is no other client with another
text."""


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
