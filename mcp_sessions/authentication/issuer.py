"""The keys with which an issuer signs its tokens: found, fetched and kept.

Rules, owned by ``tests/authentication/test_issuer.py``:

1. The address of the keys is found by RFC 8414 or OpenID Connect Discovery. The document must name
   the issuer exactly.
2. The keys are fetched when they are needed first, each hour, and for an unknown key. All requests
   share one fetch, which is bounded in time. There are :data:`AT_ONCE` fetches at once, and then
   one in :data:`AGAIN` seconds.
3. Only a fetch that began after a request came says that its key does not exist. Until then the
   answer is that its token cannot be verified for now: the issuer may have a new key.
4. If the issuer is away, its keys count for a day. Without keys no token can be verified for now.
5. Only public keys for signatures are used, of kinds and sizes that are safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from mcp_sessions.authentication.credential import CannotVerify
from mcp_sessions.authentication.fetching import FetchFailed, fetch_json
from mcp_sessions.authentication.issuer_addresses import discovery_urls, is_safe
from mcp_sessions.core.messages import entries_of, members_of

logger = logging.getLogger(__name__)

WITHIN: Final = 10.0
"""Seconds for one fetch of the keys, with the discovery before it."""

FRESH: Final = 3_600.0
"""Seconds after which the keys are fetched again."""

KEPT: Final = 86_400.0
"""Seconds for which the keys count while the issuer is away."""

AGAIN: Final = 5.0
"""Seconds between two fetches, on average: whoever invents names of keys causes no more of them."""

AT_ONCE: Final = 10
"""Fetches after a time without any."""

_MOST_KEYS: Final = 100

ALGORITHMS: Final = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Kind and curve of a key → the algorithms that it is good for. All of them are asymmetric."""

_RSA_BITS: Final = range(2_048, 8_193)

Fetch = Callable[[str], Awaitable[dict[str, Any]]]


class Issuer:
    """The keys of one issuer.

    Args:
        url: The issuer, as its tokens have it.
        clock: Seconds since 1970.
    """

    def __init__(self, url: str, clock: Callable[[], float], fetch: Fetch = fetch_json) -> None:
        self.url = url
        self.generation = 0
        """Changes when the keys do: a key that is gone may have been stolen."""

        self._clock = clock
        self._fetch = fetch
        self._entries: Mapping[str | None, Mapping[str, Any]] = {}
        self._made: dict[tuple[str | None, str], Any] = {}
        self._fetched_at = float("-inf")
        self._rested_at = float("-inf")
        """When there may be :data:`AT_ONCE` fetches again."""

        self._asking: asyncio.Task[None] | None = None
        self._asked = 0
        """Fetches that began."""

        self._is_away = False

    async def key(self, kid: str | None, algorithm: str) -> Any | None:
        """Return the public key for a token. None: the issuer has no such key.

        Args:
            kid: Names the key. None: the only one.

        Raises:
            CannotVerify: The issuer may have the key, and cannot be asked now.
        """
        self.look_again(self._clock())
        before = self._asked
        while not self._has(kid):
            asking = self._asking
            if asking is None or asking.done():
                now = self._clock()
                if not self._may_ask(now):
                    raise CannotVerify(max(1.0, self._rested_at - now - (AT_ONCE - 1) * AGAIN))
                asking = self._ask(now)
            number = self._asked
            # The client that asked first may leave: the others still wait for it.
            await asyncio.shield(asking)
            if number > before and not self._has(kid):
                if self._is_away:
                    raise CannotVerify(AGAIN)
                return None
        return self._key_of(kid, algorithm)

    def look_again(self, now: float) -> None:
        """Fetch the keys again in the background, if they are old."""
        age = now - self._fetched_at
        if self._entries and not 0 <= age < KEPT:
            self._entries, self._made = {}, {}
        if self._entries and age >= FRESH and self._may_ask(now):
            self._ask(now)

    def _has(self, kid: str | None) -> bool:
        return kid in self._entries if kid is not None else len(self._entries) == 1

    def _may_ask(self, now: float) -> bool:
        if self._asking is not None and not self._asking.done():
            return False
        if self._rested_at - now > AT_ONCE * AGAIN:
            # The clock was set back.
            self._rested_at = now
        return self._rested_at - now <= (AT_ONCE - 1) * AGAIN

    def _ask(self, now: float) -> asyncio.Task[None]:
        self._rested_at = max(self._rested_at, now) + AGAIN
        self._asked += 1
        self._asking = asyncio.create_task(self._renew(), name="the keys of an issuer")
        return self._asking

    async def fetched(self) -> Mapping[str | None, Mapping[str, Any]]:
        """Return its keys as they are now, by their ids.

        Raises:
            FetchFailed: The issuer is away, or publishes no key that can be used.
        """
        try:
            async with asyncio.timeout(WITHIN):
                entries = _entries(await self._fetch(await self._address()))
        except TimeoutError:
            raise FetchFailed(f"{self.url} did not answer within {WITHIN:g} s") from None
        if not entries:
            raise FetchFailed(f"{self.url} publishes no key that can be used")
        return entries

    async def _renew(self) -> None:
        try:
            entries = await self.fetched()
        except Exception as failed:
            # The boundary to the network. For any cause: no token can be verified now.
            if not self._is_away:
                logger.error("the keys of an issuer cannot be fetched: %s", failed)
            self._is_away = True
            self._rested_at = self._clock() + AT_ONCE * AGAIN
            return
        if self._is_away:
            logger.info("the keys of the issuer %s were fetched again", self.url)
        self._is_away, self._fetched_at = False, self._clock()
        if entries != self._entries:
            self.generation += 1
            self._entries, self._made = entries, {}

    async def _address(self) -> str:
        said: list[str] = []
        for url in discovery_urls(self.url):
            try:
                document = await self._fetch(url)
            except FetchFailed as failed:
                said.append(str(failed))
                continue
            if document.get("issuer") != self.url:
                raise FetchFailed(
                    f"{url} names another issuer than {self.url}: set the issuer as it is there"
                )
            address = document.get("jwks_uri")
            if isinstance(address, str) and is_safe(address):
                return address
            # RFC 8414 makes it optional, and OpenID Connect does not.
            said.append(f"{url} names no https address of keys (jwks_uri)")
        raise FetchFailed("; ".join(said))

    def _key_of(self, kid: str | None, algorithm: str) -> Any | None:
        kid = kid if kid is not None else next(iter(self._entries))
        if (kid, algorithm) in self._made:
            return self._made[kid, algorithm]
        entry = self._entries[kid]
        made = None
        if algorithm in _algorithms(entry) and entry.get("alg") in (None, algorithm):
            made = _made(entry, algorithm)
        # An issuer has few keys, and each of them few algorithms.
        self._made[kid, algorithm] = made
        return made


def _entries(document: Mapping[str, Any]) -> dict[str | None, Mapping[str, Any]]:
    found: dict[str | None, Mapping[str, Any]] = {}
    for entry in map(members_of, entries_of(document.get("keys"))[:_MOST_KEYS]):
        kid = entry.get("kid")
        # A key with "d" is private: everybody may know it.
        is_for_us = entry.get("use", "sig") == "sig" and "d" not in entry
        if is_for_us and _algorithms(entry) and (kid is None or isinstance(kid, str)):
            found.setdefault(kid, entry)
    return found


def _algorithms(entry: Mapping[str, Any]) -> tuple[str, ...]:
    kind, curve = entry.get("kty"), entry.get("crv")
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)):
        return ()
    return ALGORITHMS.get((kind, curve if kind != "RSA" else None), ())


def _made(entry: Mapping[str, Any], algorithm: str) -> Any | None:
    """Return the key of an entry. None: it is malformed, or of a size that is not safe."""
    from jwt import PyJWK, PyJWTError

    try:
        key: Any = PyJWK.from_dict(dict(entry), algorithm).key
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError) as wrong:
        logger.warning("a key of the issuer cannot be used: %s", type(wrong).__name__)
        return None
    if entry["kty"] == "RSA" and key.key_size not in _RSA_BITS:
        logger.warning("a key of the issuer is not used: it has %d bits", key.key_size)
        return None
    return key
