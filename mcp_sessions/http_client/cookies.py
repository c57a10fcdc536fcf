"""The cookies of one HTTP client, by which a load balancer leads it to its server.

A server may set as many as it likes, and all of them go with every request. Kept are as many, and
of such a size, as any client has to keep (RFC 6265, 6.1), if they fit into one header: servers and
proxies take 8 KiB of a header line or less, and answer a longer one with 431.
"""

from __future__ import annotations

from http.cookiejar import Cookie, CookieJar
from typing import Final

_COOKIES: Final = 50

_SIZE: Final = 4_096
"""Bytes of a name with its value and attributes."""

_HEADER: Final = 6_144
"""Bytes of all names and values, as they stand in a request."""


class BoundedJar(CookieJar):
    """Keeps no cookie that is too large, and no new one while it is full. A cookie that is set
    again and has no room is removed: its earlier value does not hold.
    """

    def set_cookie(self, cookie: Cookie) -> None:
        others = [one for one in self if _key(one) != _key(cookie)]
        parts = (cookie.name, cookie.value, cookie.domain, cookie.path)
        has_room = (
            sum(len(part or "") for part in parts) <= _SIZE
            and len(others) < _COOKIES
            and sum(map(_sent, [*others, cookie])) <= _HEADER
        )
        if has_room:
            super().set_cookie(cookie)
        elif len(others) < len(self):
            self.clear(*_key(cookie))


def _key(cookie: Cookie) -> tuple[str, str, str]:
    return cookie.domain, cookie.path, cookie.name


def _sent(cookie: Cookie) -> int:
    return len(cookie.name) + len(cookie.value or "") + len("=; ")
