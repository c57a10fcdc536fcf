"""The cookies of one session at a URL, by which a load balancer leads it to its server.

A server may set as many as it likes, and each would go with every request. Kept are as many, and of
such a size, as any client has to (RFC 6265, 6.1).
"""

from __future__ import annotations

from http.cookiejar import Cookie, CookieJar, DefaultCookiePolicy
from typing import Any, Final

_COOKIES: Final = 50

_SIZE: Final = 4_096
"""Bytes of a name with its value and attributes."""


def bounded_jar() -> CookieJar:
    """Keeps none that is too large, and no new one while it is full."""
    policy = _Bounded()
    policy.jar = jar = CookieJar(policy)
    return jar


class _Bounded(DefaultCookiePolicy):
    jar: CookieJar

    def set_ok(self, cookie: Cookie, request: Any) -> bool:
        """See :class:`http.cookiejar.CookiePolicy`."""
        if not super().set_ok(cookie, request):
            return False
        parts = (cookie.name, cookie.value, cookie.domain, cookie.path)
        if sum(len(part or "") for part in parts) > _SIZE:
            return False
        kept = [(one.domain, one.path, one.name) for one in self.jar]
        return len(kept) < _COOKIES or (cookie.domain, cookie.path, cookie.name) in kept
