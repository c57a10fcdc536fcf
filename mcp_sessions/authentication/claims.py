"""Read the claims of a token, of whatever kind it is.

Rules, owned by ``tests/authentication/test_tokens.py`` and ``test_introspection.py``:

1. Issuer, audience, expiry and not-before are checked, the times with :data:`LEEWAY` seconds.
2. A token that is bound to a key of its client is refused: nothing here checks that key.
3. A token without a subject is refused: all users of one client would own the same sessions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from mcp_sessions.authentication.credential import Credential
from mcp_sessions.core.messages import texts_of

logger = logging.getLogger(__name__)

LEEWAY: Final = 60.0
"""Seconds by which the clocks of the issuer and of this machine may differ."""

_LOG_EVERY: Final = 60.0


class TokenRefused(Exception):
    """A token is not good; the text says why, without the token."""


def audiences_of(url: str) -> list[str]:
    bare = url.rstrip("/")
    return [bare, f"{bare}/"]


def credential_of(claims: Mapping[str, Any], issuer: str, now: float) -> Credential:
    """Return what the claims of a token stand for.

    Args:
        issuer: The issuer, which the caller has checked.
        now: Seconds since 1970.

    Raises:
        TokenRefused: The token is expired, not valid yet, bound to a key, or names no subject.
    """
    expires, begins = _time(claims, "exp"), _time(claims, "nbf")
    if expires is not None and expires + LEEWAY <= now:
        raise TokenRefused(f"it expired {now - expires:.0f} s ago by the clock of this machine")
    if begins is not None and begins - LEEWAY > now:
        raise TokenRefused(
            f"it is not valid for {begins - now:.0f} s yet by the clock of this machine"
        )
    if "cnf" in claims:
        raise TokenRefused("it is bound to a key of its client (cnf), which is not supported")
    subject: Any = claims.get("sub")
    if not isinstance(subject, str) or not subject:
        raise TokenRefused("it has no subject (sub)")
    clients = (claims.get(each) for each in ("client_id", "azp", "cid"))
    client = next((each for each in clients if isinstance(each, str) and each), None)
    ends = expires + LEEWAY if expires is not None else None
    return Credential(client or subject, issuer, subject, _scopes(claims), ends)


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:
        raise TokenRefused(f"its {name} is no number of seconds")
    return float(value)


def _scopes(claims: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the scopes, as RFC 9068 has them (``scope``), or others (``scp``)."""
    value: Any = claims.get("scope", claims.get("scp"))
    return tuple(value.split() if isinstance(value, str) else texts_of(value))


class RefusalLog:
    """Logs at most once a minute why tokens were refused."""

    def __init__(self) -> None:
        self._refused = 0
        self._said_at = -math.inf

    def say(self, why: str, now: float) -> None:
        self._refused += 1
        if 0 <= now - self._said_at < _LOG_EVERY:
            return
        logger.info("%d tokens were refused; the last one: %s", self._refused, why)
        self._said_at, self._refused = now, 0
