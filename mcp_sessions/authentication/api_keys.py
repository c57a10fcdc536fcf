"""Verify API keys by a file that is read again when it changes.

Rules, owned by ``tests/authentication/test_api_keys.py``:

1. The file is looked at once a second, at most. A revoked key is refused a second later.
2. If the file cannot be read, the keys that were read before count for :data:`KEPT` seconds: an
   editor may be writing it. Then no key is accepted, because a key may have been revoked. Clients
   are answered that the server cannot verify keys for now, not that their key is bad.
3. A key is compared in constant time. The log has no key.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Final

from mcp_sessions.authentication import key_file
from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.errors import ConfigurationError

logger = logging.getLogger(__name__)

ISSUER: Final = "urn:mcp-sessions:api-keys"
"""The issuer in the principal of a key's owner."""

KEPT: Final = 60.0
"""Seconds for which keys count that were read from a file that cannot be read any more."""

_LOOK_EVERY: Final = 1.0
_NO_HASH: Final = "0" * 64


class ApiKeys:
    """A verifier over a file of keys.

    Args:
        path: The file; see :mod:`mcp_sessions.authentication.key_file`.
        clock: Seconds since 1970.

    Raises:
        ConfigurationError: The file cannot be read.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._keys, self._stamp = key_file.read(path)
        self._credentials = dict[str, Credential]()
        """By the ids of their keys: what is made of one serves all its requests."""

        self._looked_at = clock()
        self._failed_at: float | None = None

    async def verify(self, token: str) -> Credential | None:
        """Return the owner of the key.

        Raises:
            CannotVerify: The file of keys could not be read for too long.
        """
        key_id = key_file.id_of(token)
        if key_id is None:
            return None
        now = self._clock()
        self._look(now)
        key = self._keys.get(key_id)
        expected = key.sha256 if key is not None else _NO_HASH
        is_right = hmac.compare_digest(key_file.hash_of(token), expected)
        if key is None or not is_right:
            return None
        if key.expires_at is not None and key.expires_at <= now:
            return None
        known = self._credentials.get(key_id)
        if known is None:
            known = Credential(key.name, ISSUER, None, key.scopes, key.expires_at)
            self._credentials[key_id] = known
        return known

    def _look(self, now: float) -> None:
        """Read the file again if it changed.

        Raises:
            CannotVerify: It could not be read for too long.
        """
        # If the clock was set back, the file is looked at all the same.
        if not 0 <= now - self._looked_at < _LOOK_EVERY:
            self._looked_at = now
            try:
                self._read_again()
            except ConfigurationError as failed:
                self._failed(failed, now)
        if self._failed_at is not None and not 0 <= now - self._failed_at < KEPT:
            if self._keys:
                logger.error("no API key is accepted until the file of keys can be read")
            self._keys = {}
            raise CannotVerify(_LOOK_EVERY)

    def _read_again(self) -> None:
        if self._failed_at is None and key_file.stamp_of(self._path) == self._stamp:
            return
        self._keys, self._stamp = key_file.read(self._path)
        self._credentials.clear()
        self._failed_at = None
        logger.info("the file of API keys was read: it has %d", len(self._keys))

    def _failed(self, failed: ConfigurationError, now: float) -> None:
        if self._failed_at is None:
            self._failed_at = now
            logger.error(
                "the file of API keys cannot be read; the keys read before stay valid for %d s: %s",
                KEPT,
                failed,
            )
