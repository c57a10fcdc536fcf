"""Verify access tokens that are JWTs of one issuer, for one audience.

Rules, owned by ``tests/authentication/test_tokens.py``:

1. The algorithm is one of a list of asymmetric ones, and fits the key. PyJWT verifies it.
2. Its claims are checked by :mod:`mcp_sessions.authentication.claims`. It must have an end.
3. A verified token is kept until it expires, by its hash, with a bound. It is forgotten when the
   keys of the issuer change.
4. A token of an unknown key is refused again for a few seconds without asking the issuer.
5. The log has no token. It says at most once a minute why tokens were refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from mcp_sessions.authentication.claims import RefusalLog, TokenRefused, audiences_of, credential_of
from mcp_sessions.authentication.credential import Credential
from mcp_sessions.authentication.issuer import AGAIN, ALGORITHMS, Issuer
from mcp_sessions.core.recent import Recent

REMEMBERED: Final = 10_000
"""Verified tokens that are kept, at most."""

_UNKNOWN: Final = 20
"""Tokens of unknown keys that are kept, at most."""

_ALLOWED: Final = frozenset(each for some in ALGORITHMS.values() for each in some)


class _UnknownKey(TokenRefused):
    pass


class Tokens:
    """A verifier of JWTs.

    Args:
        audience: The URL of this server, as tokens for it have it.
        clock: Seconds since 1970.
    """

    def __init__(self, issuer: Issuer, audience: str, clock: Callable[[], float]) -> None:
        self._issuer = issuer
        self._audiences = audiences_of(audience)
        self._clock = clock
        self._known = Recent[bytes, tuple[int, Credential]](REMEMBERED)
        self._unknown = Recent[bytes, float](_UNKNOWN)
        """When tokens of unknown keys were refused."""

        self._log = RefusalLog()

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
            is_good = known.expires_at is not None and now < known.expires_at
            if generation == self._issuer.generation and is_good:
                self._known.move_to_end(name)
                return known
            del self._known[name]
        if 0 <= now - self._unknown.get(name, -AGAIN) < AGAIN:
            return None
        try:
            credential = await self._verified(token)
        except TokenRefused as refused:
            if isinstance(refused, _UnknownKey):
                self._unknown.keep(name, self._clock())
            self._log.say(str(refused), now)
            return None
        self._known.keep(name, (self._issuer.generation, credential))
        return credential

    async def _verified(self, token: str) -> Credential:
        import jwt

        try:
            # It would read all of the token, which is read below.
            header = jwt.get_unverified_header(f"{token.partition('.')[0]}..")
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise TokenRefused("it is no JWT; opaque tokens need introspection") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in _ALLOWED:
            raise TokenRefused("its signature algorithm is not accepted here")
        if "crit" in header:
            raise TokenRefused("its header has an extension (crit), and none is supported")
        if kid is not None and not isinstance(kid, str):
            raise TokenRefused("it is no JWT; opaque tokens need introspection")
        key = await self._issuer.key(kid, algorithm)
        if key is None:
            raise _UnknownKey("the issuer publishes no such key as the one that signed it")
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
            raise TokenRefused("its audience (aud) is not the one of this server") from None
        except jwt.InvalidIssuerError:
            raise TokenRefused("its issuer (iss) is not the one that this server accepts") from None
        except jwt.InvalidSignatureError:
            raise TokenRefused("its signature is wrong") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as wrong:
            raise TokenRefused(f"it cannot be read ({type(wrong).__name__})") from None
        # It may have waited for the issuer.
        return credential_of(claims, self._issuer.url, self._clock())
