"""Verify access tokens that are JWTs of one issuer, for one audience.

Rules, owned by ``tests/authentication/test_tokens.py``:

1. The algorithm is one of a list of asymmetric ones, and fits the key. PyJWT verifies it.
2. Issuer, audience, expiry and not-before are checked, the times with :data:`LEEWAY` seconds.
3. A token that is bound to a key of its client is refused: nothing here checks that key.
4. What was verified is kept until it expires, by a hash of the token, with a bound. It is forgotten
   when the keys of the issuer change.
5. The log has no token. It says at most once a minute why tokens were refused.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from mcp_sessions.authentication.credential import Credential
from mcp_sessions.authentication.issuer import ALGORITHMS, Issuer

logger = logging.getLogger(__name__)

LEEWAY: Final = 60.0
"""Seconds by which the clocks of the issuer and of this machine may differ."""

REMEMBERED: Final = 10_000
"""Verified tokens that are kept, at most."""

_ALLOWED: Final = frozenset(each for some in ALGORITHMS.values() for each in some)
_LOG_EVERY: Final = 60.0


class _Refused(Exception):
    """A token is not good; the text says why."""


class Tokens:
    """A verifier of JWTs.

    Args:
        audience: The URL of this server, as tokens for it have it.
        clock: Seconds since 1970.
    """

    def __init__(self, issuer: Issuer, audience: str, clock: Callable[[], float]) -> None:
        bare = audience.rstrip("/")
        self._issuer = issuer
        self._audiences = [bare, f"{bare}/"]
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[int, Credential]] = OrderedDict()
        self._refused = 0
        self._said_at = -math.inf

    async def verify(self, token: str) -> Credential | None:
        """Return what the token stands for. None: it is not good, or no JWT.

        Raises:
            CannotVerify: The issuer is away, and its keys are needed.
        """
        if token.count(".") != 2:
            return None
        now, name = self._clock(), hashlib.sha256(token.encode()).digest()
        self._issuer.look_again(now)
        found = self._known.get(name)
        if found is not None:
            generation, known = found
            if generation == self._issuer.generation and _is_good(known, now):
                self._known.move_to_end(name)
                return known
            del self._known[name]
        try:
            credential = await self._verified(token)
        except _Refused as refused:
            self._say(str(refused), now)
            return None
        self._known[name] = (self._issuer.generation, credential)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return credential

    async def _verified(self, token: str) -> Credential:
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise _Refused("it is no JWT") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in _ALLOWED:
            raise _Refused("its algorithm is not allowed")
        if "crit" in header:
            raise _Refused("it has an extension that is not known here")
        if kid is not None and not isinstance(kid, str):
            raise _Refused("it is no JWT")
        key = await self._issuer.key(kid, algorithm)
        if key is None:
            raise _Refused("the issuer has no such key")
        try:
            claims = jwt.decode(
                token,
                key=key,
                algorithms=[algorithm],
                audience=self._audiences,
                issuer=self._issuer.url,
                # The times are checked below, by the clock of the layer.
                options={
                    "require": ["exp", "iss", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidAudienceError:
            raise _Refused("it is for another audience") from None
        except jwt.InvalidIssuerError:
            raise _Refused("it is of another issuer") from None
        except jwt.InvalidSignatureError:
            raise _Refused("its signature is wrong") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as wrong:
            raise _Refused(f"it cannot be read ({type(wrong).__name__})") from None
        # It may have waited for the issuer.
        return self._credential(claims, self._clock())

    def _credential(self, claims: Mapping[str, Any], now: float) -> Credential:
        expires, begins = _time(claims, "exp"), _time(claims, "nbf")
        if expires is None:
            raise _Refused("it has no end")
        if expires + LEEWAY <= now:
            raise _Refused(f"it expired {now - expires:.0f} s ago by the clock of this machine")
        if begins is not None and begins - LEEWAY > now:
            raise _Refused(f"it begins in {begins - now:.0f} s by the clock of this machine")
        if "cnf" in claims:
            raise _Refused("it is bound to a key of its client")
        subject: Any = claims.get("sub")
        if not isinstance(subject, str) or not subject:
            # Without it, all users of one client would own the same sessions.
            raise _Refused("it names no subject")
        clients = (claims.get(each) for each in ("client_id", "azp", "cid"))
        client = next((each for each in clients if isinstance(each, str) and each), None)
        return Credential(
            client or subject,
            self._issuer.url,
            subject,
            _scopes(claims),
            expires + LEEWAY,
        )

    def _say(self, why: str, now: float) -> None:
        self._refused += 1
        if 0 <= now - self._said_at < _LOG_EVERY:
            return
        logger.info("%d tokens were refused; the last one: %s", self._refused, why)
        self._said_at, self._refused = now, 0


def _is_good(known: Credential, now: float) -> bool:
    return known.expires_at is not None and now < known.expires_at


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:
        raise _Refused(f"its {name} is no time")
    return float(value)


def _scopes(claims: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the scopes, as RFC 9068 has them (``scope``), or others (``scp``)."""
    value: Any = claims.get("scope", claims.get("scp"))
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, list):
        return tuple(each for each in cast("list[Any]", value) if isinstance(each, str))
    return ()
