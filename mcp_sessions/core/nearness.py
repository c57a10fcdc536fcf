"""Whether a request comes from this machine and through no proxy, as far as it shows (CNV5).

A proxy on this machine has a loopback address as well. It is recognised by what most proxies add
to a request. One that adds nothing cannot be recognised: docs/security.md says which.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast
from urllib.parse import urlsplit

BY_NAME = "mcp_sessions.by_name"
"""In the scope of a request to an endpoint that other names than this machine's may reach: its
operator expects clients of other machines, or a proxy."""

CLIENT = "mcp_sessions.client"
"""In the ``state`` of a scope: the :class:`ConnectedClient`, if the server gives one."""


class ConnectedClient:
    """The client of one connection. A later connection from its address and port is another one."""

    __slots__ = ("has_left",)

    def __init__(self) -> None:
        self.has_left = False


_NAMES = (
    b"x-host", b"x-request-start", b"x-varnish", b"x-arr-ssl", b"x-arr-log-id",
    b"x-appengine-user-ip", b"x-cloud-trace-context", b"x-ngrok-id",
    b"x-render-origin-server", b"x-railway-request-id", b"x-original-host", b"x-original-url",
    b"disguised-host", b"was-default-hostname", b"x-site-deployment-id", b"total-route-time",
)  # fmt: skip
"""Headers that proxies add, in lower case and with ``-`` for ``_``."""

_BEGINNINGS = (
    b"x-envoy-", b"cf-", b"fly-", b"fastly-", b"x-azure-", b"x-amzn-", b"x-amz-cf-",
    b"cloudfront-", b"x-akamai-", b"x-vercel-", b"x-nginx-", b"tailscale-", b"x-tailscale-",
    b"x-goog-", b"x-sucuri-", b"incap-", b"x-traefik-", b"ngrok-", b"x-auth-request-",
    b"x-authentik-", b"x-pomerium-", b"x-kong-", b"x-consumer-", b"x-ms-client-", b"x-apigee-",
    b"surrogate-", b"wl-", b"eo-", b"ali-", b"x-replit-", b"x-github-request-", b"l5d-",
    b"teleport-", b"x-teleport-", b"x-nf-", b"x-tyk-", b"x-istio-", b"heroku-", b"x-tunnel-",
    b"x-authelia-", b"x-sigsci-", b"x-datadome-", b"x-litespeed-",
)  # fmt: skip
"""How the names of others begin."""

_PARTS = (
    b"forward", b"proxy", b"client-ip", b"clientip", b"real-ip", b"real-port", b"connecting-ip",
    b"connection-ip", b"cluster-ip", b"remote-", b"originating", b"via", b"cdn", b"client-cert",
    b"client-verify", b"-original-", b"x-scheme", b"url-scheme", b"front-end-https",
    b"rewrite-url", b"script-name",
)  # fmt: skip
"""Parts of the names of others still. No header of MCP, of a browser or of a trace has one."""


def _any(texts: Iterable[bytes]) -> bytes:
    return b"|".join(map(re.escape, texts))


_SIGN = re.compile(
    # A tool's schema gives the names of the headers ``Mcp-Param-*``.
    rb"^(?!mcp-)(?:(?:%s)$|(?:%s)|.*(?:%s))" % (_any(_NAMES), _any(_BEGINNINGS), _any(_PARTS)),
    re.MULTILINE,
)
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::(?:[0-9]+|\*))?")


def is_near(scope: Mapping[str, Any]) -> bool:
    """Whether a request comes from this machine and shows no sign of a proxy.

    Args:
        scope: Of ASGI.
    """
    if scope.get(BY_NAME):
        return False
    # nginx speaks HTTP/1.0 to a server unless it is set otherwise. No MCP client does.
    if scope.get("http_version") == "1.0":
        return False
    ends = (scope.get("client"), scope.get("server"))
    if not all(end and end[1] and is_loopback(end[0]) for end in ends):
        # A Unix socket has no address: whoever connects to it is a proxy, as a rule. The client of
        # a named proxy has no port.
        return False
    hosts: list[bytes] = [value for name, value in scope["headers"] if name == b"host"]
    return (
        len(hosts) == 1
        and is_loopback(_without_port(hosts[0].decode("latin-1")))
        and not _has_sign(name for name, _ in scope["headers"])
    )


def own_connection(scope: Mapping[str, Any]) -> Hashable:
    """The connection that a request came on, if all its requests are of one client. A proxy sends
    requests of several clients on one: if a request shows a sign of a proxy, None.

    uvicorn gives all requests of a connection the same object. An equal one may be of a later
    connection from that address and port, and so of another client.

    Args:
        scope: Of ASGI.

    Returns:
        A tuple if nothing shows when the connection ends.
    """
    ends = cast("tuple[str, int] | list[str | int] | None", scope.get("client"))
    # The client of a named proxy has no port.
    if (
        not isinstance(ends, tuple)
        or not ends[1]
        or scope.get("http_version") == "1.0"
        or _has_sign([n for n, _ in scope["headers"]])
    ):
        return None
    return scope.get("state", {}).get(CLIENT) or (id(ends), ends)


def is_local_name(host: str) -> bool:
    """Whether a Host names this machine: with a port, ``:*`` or neither."""
    return is_loopback(_without_port(host))


def _has_sign(names: Iterable[bytes]) -> bool:
    return _SIGN.search(b"\n".join(names).replace(b"_", b"-")) is not None


def _without_port(host: str) -> str:
    found = _HOST.fullmatch(host)
    return (found[1] or found[2] or "") if found is not None else ""


def past_proxies(url: str) -> dict[str, None]:
    """Return the ``mounts`` of an HTTP client that asks one URL: none, or past all proxies.

    A proxy of the environment is on another machine, or asks from another network. The loopback
    there is not that of this machine. A URL with a name or an address of loopback means this one.
    """
    host = urlsplit(url).hostname
    if not is_loopback(host):
        return {}
    return {f"all://[{host}]" if ":" in str(host) else f"all://{host}": None}


@lru_cache(maxsize=1_024)
def is_loopback(address: str | None) -> bool:
    # Asked with each request: to parse one takes as long as to make the session's id.
    if address is not None and address.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    # Not every Python looks at the IPv4 address that is mapped to IPv6.
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
