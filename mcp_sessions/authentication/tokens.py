"""Verify access tokens: those that are JWTs of one issuer, for one audience, and others by asking
the authorization server.

Rules for JWTs, owned by ``tests/authentication/test_tokens.py``:

1. The algorithm is one of a list of asymmetric ones, and fits the key. PyJWT verifies it.
2. Its claims are checked as below. It must have an end.
3. A verified token is kept until it expires, by its hash, with a bound. It is forgotten when the
   keys of the issuer change.
4. A token of an unknown key is refused again for a few seconds without asking the issuer.
5. The log has no token. It says at most once a minute why tokens were refused.

Rules for the question to the authorization server about each token (RFC 7662), owned by
``tests/authentication/test_introspection.py``:

1. An answer counts for :data:`FRESH` seconds. Questions have the bounds of
   :mod:`mcp_sessions.authentication.verdicts`.
2. The answer must name this server as audience, and no other issuer. Its claims are checked as
   below.
3. The log has no token.

Rules for the claims of both, owned by ``tests/authentication/test_tokens.py`` and
``test_introspection.py``:

1. Issuer, audience, expiry and not-before are checked, the times with :data:`LEEWAY` seconds.
2. A token that is bound to a key of its client is refused: nothing here checks that key.
3. A token without a subject is refused: all users of one client would own the same sessions.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import quote_plus

from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.authentication.fetching import FetchFailed, post_form
from mcp_sessions.authentication.issuer import AGAIN, ALGORITHMS, Issuer
from mcp_sessions.authentication.key_file import id_of
from mcp_sessions.authentication.verdicts import RETRY, WITHIN, Verdicts
from mcp_sessions.core.messages import texts_of
from mcp_sessions.core.recent import Recent
from mcp_sessions.seldom import OnceAMinute

logger = logging.getLogger(__name__)


LEEWAY: Final = 60.0
"""Seconds by which the clocks of the issuer and of this machine may differ."""


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


class RefusalLog(OnceAMinute):
    def say(self, why: str, now: float) -> None:
        if count := self.due(now):
            logger.info("%d tokens were refused; the last one: %s", count, why)


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


FRESH: Final = 30.0
"""Seconds for which an answer counts."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")

PostForm = Callable[[str, Mapping[str, str], str], Awaitable[dict[str, Any]]]
"""Takes the URL, the form and the ``Authorization``."""


@dataclass(frozen=True, slots=True)
class IntrospectionEndpoint:
    url: str
    client_id: str
    client_secret: str = field(repr=False)

    async def ask(self, token: str, post: PostForm) -> Mapping[str, Any]:
        # RFC 6749, 2.3.1: both are encoded as in a form, before they are joined.
        pair = f"{quote_plus(self.client_id)}:{quote_plus(self.client_secret)}"
        basic = f"Basic {base64.b64encode(pair.encode()).decode()}"
        form = {"token": token, "token_type_hint": "access_token"}
        answer = await post(self.url, form, basic)
        if not isinstance(answer.get("active"), bool):
            raise FetchFailed(f"{self.url} does not say whether a token is active")
        return answer

    async def try_once(self) -> None:
        try:
            async with asyncio.timeout(WITHIN):
                answer = await self.ask("mcp-sessions-check", post_form)
        except TimeoutError:
            raise FetchFailed(f"{self.url} did not answer within {WITHIN:g} s") from None
        if answer["active"]:
            raise FetchFailed(
                f"{self.url} says that an invented token is active, so it checks nothing"
            )


class Introspection:
    """A verifier of the tokens of one authorization server.

    Args:
        issuer: The authorization server, as metadata names it.
        audience: The URL of this server, as tokens for it have it.
        clock: Seconds since 1970.
        post: Sends a form.
    """

    def __init__(
        self,
        endpoint: IntrospectionEndpoint,
        issuer: str,
        audience: str,
        *,
        clock: Callable[[], float],
        post: PostForm = post_form,
    ) -> None:
        self._endpoint = endpoint
        self._issuer = issuer
        self._audiences = audiences_of(audience)
        self._clock = clock
        self._post = post
        self._verdicts = Verdicts[Credential](
            self._ask,
            lambda: self._note_away(f"{endpoint.url} did not answer within {WITHIN:g} s"),
            lambda found: found.expires_at,
            clock=clock,
            fresh=FRESH,
            refused=FRESH,
        )
        self._log = RefusalLog()
        self._is_away = False

    async def verify(self, token: str) -> Credential | None:
        """Return what the token stands for. None: it is not good.

        Raises:
            CannotVerify: The authorization server did not answer.
        """
        if not _TOKEN.fullmatch(token) or id_of(token) is not None:
            # A revoked key is nothing to show to others.
            return None
        return await self._verdicts.verdict_on(token)

    async def _ask(self, token: str) -> Credential | None:
        try:
            answer = await self._endpoint.ask(token, self._post)
        except Exception as failed:
            # The boundary to the network. For any cause: no token can be verified now.
            self._note_away(str(failed) or type(failed).__name__)
            raise CannotVerify(RETRY) from failed
        return self._learned(answer)

    def _note_away(self, why: str) -> None:
        if not self._is_away:
            logger.error("the introspection endpoint does not answer: %s", why)
        self._is_away = True

    def _learned(self, answer: Mapping[str, Any]) -> Credential | None:
        if self._is_away:
            logger.info("the introspection endpoint answers again: %s", self._endpoint.url)
        self._is_away = False
        try:
            return self._credential(answer)
        except TokenRefused as refused:
            self._log.say(str(refused), self._clock())
            return None

    def _credential(self, answer: Mapping[str, Any]) -> Credential:
        if not answer["active"]:
            raise TokenRefused("the authorization server says that it is not active")
        if answer.get("iss", self._issuer) != self._issuer:
            raise TokenRefused("its issuer (iss) is not the one that this server accepts")
        given: Any = answer.get("aud")
        named = cast("list[Any]", given) if isinstance(given, list) else [given]
        if not any(each in self._audiences for each in named):
            raise TokenRefused("its audience (aud) is not the one of this server")
        kind, use = answer.get("token_type"), answer.get("token_use")
        if isinstance(kind, str) and kind.lower() not in ("bearer", "access_token"):
            raise TokenRefused("its token_type is not Bearer")
        if use not in (None, "access_token"):
            raise TokenRefused("its token_use is not access_token")
        return credential_of(answer, self._issuer, self._clock())
