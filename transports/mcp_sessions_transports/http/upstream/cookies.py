"""The cookies of one session at a URL, by which a load balancer leads it to its server.

A server may set as many as it likes, and each would go with every request. Kept are as many, and of
such a size, as any client has to (RFC 6265, 6.1).
"""

from __future__ import annotations

from http.cookiejar import Cookie, CookieJar
from typing import Final

_COOKIES: Final = 50

_SIZE: Final = 4_096
"""Bytes of a name with its value and attributes."""


class BoundedJar(CookieJar):
    """Keeps none that is too large, and no new one while it is full."""

    def set_cookie(self, cookie: Cookie) -> None:
        """See :meth:`http.cookiejar.CookieJar.set_cookie`."""
        parts = (cookie.name, cookie.value, cookie.domain, cookie.path)
        if sum(len(part or "") for part in parts) > _SIZE:
            return
        kept = [(one.domain, one.path, one.name) for one in self]
        if len(kept) < _COOKIES or (cookie.domain, cookie.path, cookie.name) in kept:
            super().set_cookie(cookie)
