"""Verify tokens by asking the authorization server about each of them (RFC 7662).

Rules, owned by ``tests/authentication/test_introspection.py``:

1. An answer counts for :data:`FRESH` seconds. All requests with one token share one question.
2. Questions are bounded in time, and in how many are open. A token that was accepted before has
   places of its own: others that send bad tokens do not delay it.
3. If there is no answer, a token that was accepted before counts on, for :data:`KEPT` seconds in
   all. It waits for :data:`PATIENCE` seconds only. Of another token it is unknown whether it is
   good.
4. The answer must name this server as audience, and no other issuer. Its claims are checked by
   :mod:`mcp_sessions.authentication.claims`.
5. Answers are kept by a hash of the token, with a bound. The log has no token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote_plus

from mcp_sessions.authentication.claims import RefusalLog, Refused, audiences_of, credential_of
from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.authentication.fetching import FetchFailed, post_form
from mcp_sessions.authentication.key_file import id_of

logger = logging.getLogger(__name__)

FRESH: Final = 30.0
"""Seconds for which an answer counts."""

KEPT: Final = 300.0
"""Seconds for which a good token counts if the server does not answer any more."""

WITHIN: Final = 10.0
"""Seconds for one question, with the time before it is sent."""

PATIENCE: Final = 1.0
"""Seconds for which a request waits whose token was good before."""

REMEMBERED: Final = 10_000
"""Good tokens that are kept, at most, and as many bad ones."""

WAITING: Final = 1_000
"""Tokens that wait for an answer, at most: new ones, and as many that were good before."""

_AT_ONCE: Final = 16
_RETRY: Final = 5.0
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_Value = TypeVar("_Value")

Post = Callable[[str, Mapping[str, str], str], Awaitable[dict[str, Any]]]
"""Takes the URL, the form and the ``Authorization``."""


@dataclass(frozen=True, slots=True)
class IntrospectionEndpoint:
    """The address to ask, and the client as which to ask.

    Args:
        url: The endpoint.
        client_id: The client as which this server asks.
        client_secret: Its secret.
    """

    url: str
    client_id: str
    client_secret: str = field(repr=False)

    async def ask(self, token: str, post: Post) -> Mapping[str, Any]:
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


@dataclass(frozen=True, slots=True)
class _Known:
    credential: Credential
    asked_at: float
    """When the authorization server said so."""

    look_after: float
    """When it is asked again."""


class _Lane:
    def __init__(self) -> None:
        self.asking: dict[bytes, asyncio.Task[Credential | CannotVerify | None]] = {}
        self.at_once = asyncio.Semaphore(_AT_ONCE)


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
        post: Post = post_form,
    ) -> None:
        self._endpoint = endpoint
        self._issuer = issuer
        self._audiences = audiences_of(audience)
        self._clock = clock
        self._post = post
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._bad: OrderedDict[bytes, float] = OrderedDict()
        self._new, self._again = _Lane(), _Lane()
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
        now, name = self._clock(), hashlib.sha256(token.encode()).digest()
        known = self._kept(name, now)
        if known is None:
            # A clock that was put back does not make an answer older than it is.
            bad_at = self._bad.get(name)
            if bad_at is not None and 0 <= now - bad_at < FRESH:
                return None
            return await self._answered(self._new, name, token, None)
        if known.asked_at <= now < known.look_after:
            return known.credential
        try:
            return await self._answered(self._again, name, token, PATIENCE)
        except CannotVerify:
            now = self._clock()
            if (known := self._kept(name, now)) is None:
                raise
            self._known[name] = replace(known, look_after=now + _RETRY)
            return known.credential

    def _kept(self, name: bytes, now: float) -> _Known | None:
        known = self._known.get(name)
        if known is None:
            return None
        ends = known.credential.expires_at
        if now - known.asked_at >= KEPT or (ends is not None and ends <= now):
            del self._known[name]
            return None
        self._known.move_to_end(name)
        return known

    async def _answered(
        self, lane: _Lane, name: bytes, token: str, patience: float | None
    ) -> Credential | None:
        task = lane.asking.get(name)
        if task is None:
            if len(lane.asking) >= WAITING:
                raise CannotVerify(_RETRY)
            task = asyncio.create_task(self._ask(lane, name, token), name="asking about a token")
            lane.asking[name] = task
        # The client that asked first may leave: the others still wait for it.
        await asyncio.wait([task], timeout=patience)
        if not task.done():
            raise CannotVerify(_RETRY)
        answer = task.result()
        if isinstance(answer, CannotVerify):
            raise answer
        return answer

    async def _ask(self, lane: _Lane, name: bytes, token: str) -> Credential | CannotVerify | None:
        try:
            async with asyncio.timeout(WITHIN), lane.at_once:
                asked_at = self._clock()
                answer = await self._endpoint.ask(token, self._post)
        except TimeoutError:
            self._note_away(f"{self._endpoint.url} did not answer within {WITHIN:g} s")
        except Exception as failed:
            # The boundary to the network. Whatever is wrong there, no token can be verified now.
            self._note_away(str(failed) or type(failed).__name__)
        else:
            return self._learned(name, answer, asked_at)
        finally:
            del lane.asking[name]
        # Not raised: perhaps nobody waits any more.
        return CannotVerify(_RETRY)

    def _note_away(self, why: str) -> None:
        if not self._is_away:
            logger.error("the introspection endpoint does not answer: %s", why)
        self._is_away = True

    def _learned(
        self, name: bytes, answer: Mapping[str, Any], asked_at: float
    ) -> Credential | None:
        if self._is_away:
            logger.info("the introspection endpoint answers again: %s", self._endpoint.url)
        self._is_away = False
        try:
            credential = self._credential(answer)
        except Refused as refused:
            self._log.say(str(refused), asked_at)
            self._known.pop(name, None)
            _keep(self._bad, name, asked_at)
            return None
        self._bad.pop(name, None)
        _keep(self._known, name, _Known(credential, asked_at, asked_at + FRESH))
        return credential

    def _credential(self, answer: Mapping[str, Any]) -> Credential:
        if not answer["active"]:
            raise Refused("the authorization server says that it is not active")
        if answer.get("iss", self._issuer) != self._issuer:
            raise Refused("its issuer (iss) is not the one that this server accepts")
        given: Any = answer.get("aud")
        named = cast("list[Any]", given) if isinstance(given, list) else [given]
        if not any(each in self._audiences for each in named):
            raise Refused("its audience (aud) is not the one of this server")
        kind, use = answer.get("token_type"), answer.get("token_use")
        if isinstance(kind, str) and kind.lower() not in ("bearer", "access_token"):
            raise Refused("its token_type is not Bearer")
        if use not in (None, "access_token"):
            raise Refused("its token_use is not access_token")
        return credential_of(answer, self._issuer, self._clock())


def _keep(kept: OrderedDict[bytes, _Value], name: bytes, value: _Value) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)
