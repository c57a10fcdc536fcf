"""Tokens: claims that a client keeps for us, and can neither forge, change nor move.

And values that a store keeps for us, which nobody who reads the store can read.

``security.py``, above, says what is claimed and by whom a token may be used; here is how a
token is protected and spelled. There are two forms. *Sealed*, AES-256-GCM: the client
cannot read it. *Signed*, HMAC-SHA256 by itsdangerous: it can.

::

    v1.  base64url( key id (8) | nonce (12) | ciphertext | tag (16) )
    v1s. base64url( JSON ) . base64url( signature (32) )

Rules, owned by ``tests/test_sealing.py``:

1. A token opens with the ring, purpose and binding that it was made with, and no other.
2. A token has one spelling. A token opens only if it is, character by character, the sealed one.
3. Equal claims give equal tokens, on every replica, unless a codec is set otherwise.
4. A token that does not open takes the same work, and its cause is for the log only.

This module imports ``cryptography`` and itsdangerous, so whoever only mints ids, or
prints a help text, does not import it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from itsdangerous import Signer

from mcp_sessions.errors import InvalidState

SEALED = "v1."
"""How a sealed token begins. Neither prefix is one of the other."""

SIGNED = "v1s."
"""How a signed token begins."""

_KEY_ID_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SIGNATURE_BYTES = 32

_NOT_GENUINE = "changed, or made for another session, principal, audience or purpose"


class Purpose(Enum):
    """The use of a token. Each has its own keys, and the value goes into their derivation."""

    STATE = "state"
    SESSION_ID = "session id"
    NAME = "name"
    STORE = "store"


Binding = tuple[str | None, ...]
"""The context that a token is valid for. The token does not say it: the opener must know it."""


class Codec(Protocol):
    def seal(self, claims: dict[str, Any], *, binding: Binding) -> str:
        """A token of visible ASCII that holds ``claims``.

        Raises:
            TypeError: A claim would not come back from JSON as it is.
        """
        ...

    def open(self, token: str, *, binding: Binding) -> dict[str, Any]:
        """Return the claims that were sealed with an equal ``binding``.

        Raises:
            InvalidState: The binding or the keys are others, or the token was changed.
        """
        ...

    # Neither knows the time. The caller decides whether a genuine
    # token is still good: the moment is in the claims.


def bound(*parts: str | None) -> bytes:
    """The parts as one string of bytes that no other parts have.

    Each is preceded by its length, and None is not "". UTF-8 with ``surrogatepass`` has an
    inverse; JSON's escapes have none, they spell two lone surrogates like the pair.
    """
    return b"".join([b"-" if part is None else _with_length(_utf8(part)) for part in parts])


class Names:
    """HMAC-SHA256: what is named under a secret. See :class:`Codec` for the ring of keys."""

    def __init__(self, keys: Sequence[str], purpose: Purpose) -> None:
        self._ring = [
            hmac.new(_derive(key, f"name {purpose.value}"), digestmod=hashlib.sha256)
            for key in keys
        ]
        # It takes as long as all else that finds a conversation, and one has many requests.
        self.names_of = lru_cache(maxsize=1_024)(self._names_of)

    def _names_of(self, *parts: str | None) -> Sequence[str]:
        """43 characters of base64url by each key, newest first: always the same for these parts."""
        named = bound(*parts)
        names: list[str] = []
        for key in self._ring:
            mac = key.copy()
            mac.update(named)
            names.append(_encode(mac.digest()))
        return tuple(names)


class SealedTokens:
    """AES-256-GCM: the client cannot read the claims. See :class:`Codec`.

    Args:
        keys: Newest first, no two alike. The first seals, all open.
        purpose: What the tokens are for.
        random_nonce: Equal claims give different tokens. Otherwise the nonce is made
            of what is sealed, and equal claims give equal tokens.
    """

    def __init__(self, keys: Sequence[str], purpose: Purpose, *, random_nonce: bool) -> None:
        ring = [_sealing_key(key, purpose) for key in keys]
        self._first = ring[0]
        self._ring = {key.key_id: key for key in ring}
        self._header = bound(SEALED, purpose.value)
        self._random_nonce = random_nonce

    def seal(self, claims: dict[str, Any], *, binding: Binding) -> str:
        key = self._first
        plaintext = _encode_claims(claims)
        data = self._header + key.key_id + bound(*binding)
        if self._random_nonce:
            nonce = os.urandom(_NONCE_BYTES)
        else:
            nonce = _synthetic_nonce(key, plaintext, data)
        return SEALED + _encode(key.key_id + nonce + key.cipher.encrypt(nonce, plaintext, data))

    def open(self, token: str, *, binding: Binding) -> dict[str, Any]:
        if not token.startswith(SEALED):
            raise InvalidState("not a sealed token")
        raw = _decode(token[len(SEALED) :])
        if raw is None:
            raise InvalidState("not canonical base64url")
        if len(raw) < _KEY_ID_BYTES + _NONCE_BYTES + _TAG_BYTES:
            raise InvalidState("too short")
        key_id, rest = raw[:_KEY_ID_BYTES], raw[_KEY_ID_BYTES:]
        nonce, sealed = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
        # An unknown key id costs a decryption too, with a key that cannot fit since the id
        # is bound: the time tells nobody which keys there are.
        key = self._ring.get(key_id, self._first)
        data = self._header + key_id + bound(*binding)
        try:
            plaintext = key.cipher.decrypt(nonce, sealed, data)
        except InvalidTag:
            known = key_id in self._ring
            raise InvalidState(
                _NOT_GENUINE if known else "sealed with a key that is not in the ring"
            ) from None
        return orjson.loads(plaintext)


class SealedValues:
    """AES-256-GCM for values in a store.

    The nonces are random: 96 bits are enough for 2^32 values under one key (NIST SP 800-38D).

    ::

        key id (8) | nonce (12) | ciphertext | tag (16)

    Args:
        keys: Newest first, no two alike. The first seals, all open.
    """

    OVERHEAD = _KEY_ID_BYTES + _NONCE_BYTES + _TAG_BYTES
    """Bytes that a sealed value has more."""

    def __init__(self, keys: Sequence[str]) -> None:
        ring = [_sealing_key(key, Purpose.STORE) for key in keys]
        self._first = ring[0]
        self._ring = {key.key_id: key for key in ring}

    @property
    def key_ids(self) -> Sequence[str]:
        """What names the keys, newest first. It tells nothing of them."""
        return [key_id.hex() for key_id in self._ring]

    def seal(self, value: bytes, *, binding: Binding) -> bytes:
        key, nonce = self._first, os.urandom(_NONCE_BYTES)
        return key.key_id + nonce + key.cipher.encrypt(nonce, value, bound(*binding))

    def open(self, sealed: bytes, *, binding: Binding) -> bytes:
        """Return the value that was sealed with an equal ``binding``.

        Raises:
            InvalidState: See :class:`Codec`.
        """
        key = self._ring.get(sealed[:_KEY_ID_BYTES])
        if key is None:
            raise InvalidState("sealed with a key that is not in the ring")
        nonce = sealed[_KEY_ID_BYTES : _KEY_ID_BYTES + _NONCE_BYTES]
        try:
            return key.cipher.decrypt(
                nonce, sealed[_KEY_ID_BYTES + _NONCE_BYTES :], bound(*binding)
            )
        except (InvalidTag, ValueError):
            raise InvalidState("changed, or moved from its place") from None


class SignedTokens:
    """HMAC-SHA256 by itsdangerous: the client can read the claims. See :class:`Codec`.

    The binding is signed and not sent. Of itsdangerous it is the ``Signer``, the part that
    knows keys: its serializers compress what is long, and read signatures leniently.

    Args:
        keys: Newest first. The first signs, all verify.
        purpose: What the tokens are for.
    """

    def __init__(self, keys: Sequence[str], purpose: Purpose) -> None:
        self._signer = Signer(
            # For itsdangerous the newest is the last.
            [_derive(key, f"signed {purpose.value}") for key in reversed(keys)],
            salt=f"mcp_sessions {purpose.value}",
            key_derivation="hmac",
            digest_method=hashlib.sha256,
        )
        self._header = bound(SIGNED, purpose.value)

    def seal(self, claims: dict[str, Any], *, binding: Binding) -> str:
        payload = _encode_claims(claims)
        signature = self._signer.get_signature(self._signed(payload, binding))
        return f"{SIGNED}{_encode(payload)}.{signature.decode('ascii')}"

    def open(self, token: str, *, binding: Binding) -> dict[str, Any]:
        if not token.startswith(SIGNED):
            raise InvalidState("not a signed token")
        body, _, signature = token[len(SIGNED) :].partition(".")
        payload = _decode(body)
        # Decoded here for its spelling only: itsdangerous ignores what does not belong.
        decoded = _decode(signature)
        if payload is None or decoded is None:
            raise InvalidState("not canonical base64url")
        if len(decoded) != _SIGNATURE_BYTES:
            raise InvalidState("too short or too long")
        if not self._signer.verify_signature(self._signed(payload, binding), signature):
            raise InvalidState(f"signed with a key that is not in the ring, or {_NOT_GENUINE}")
        return orjson.loads(payload)

    def _signed(self, payload: bytes, binding: Binding) -> bytes:
        return self._header + _with_length(bound(*binding)) + payload


@dataclass(frozen=True, slots=True)
class _SealingKey:
    key_id: bytes
    """Names the key in a token. It is derived like the others and tells nothing of them;
    64 bits, so that no two keys of a ring share one."""

    cipher: AESGCM = field(repr=False)
    nonce_mac: hmac.HMAC = field(repr=False)
    """Keyed, and empty: to be copied."""


def _sealing_key(key: str, purpose: Purpose) -> _SealingKey:
    return _SealingKey(
        _derive(key, "key id")[:_KEY_ID_BYTES],
        AESGCM(_derive(key, f"sealed {purpose.value}")),
        hmac.new(_derive(key, f"nonce {purpose.value}"), digestmod=hashlib.sha256),
    )


def _derive(key: str, use: str) -> bytes:
    """256 bits of ``key`` for one use, which say nothing about those for another."""
    info = f"mcp_sessions v1 {use}".encode()
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(_utf8(key))


def _synthetic_nonce(key: _SealingKey, plaintext: bytes, data: bytes) -> bytes:
    """A nonce for GCM that depends on everything that is sealed, and on nothing else.

    GCM breaks when one nonce meets two messages under one key. This one is a pseudorandom
    function, with a key of its own, of the plaintext and of GCM's associated data: a nonce
    comes again when the same plaintext meets the same data, and then the token is the same too
    and tells nothing new but that (the SIV construction, RFC 5297). Two different messages
    share one with the chance that two random nonces do: less than 2^-32 among 2^32
    messages, the bound of NIST SP 800-38D, and sealing the same again adds none.
    """
    mac = key.nonce_mac.copy()
    mac.update(_with_length(data))
    mac.update(plaintext)
    return mac.digest()[:_NONCE_BYTES]


def _encode_claims(claims: dict[str, Any]) -> bytes:
    try:
        # Sorted: equal mappings in another order are equal claims.
        payload = orjson.dumps(claims, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise TypeError(f"a token holds JSON values only: {error}") from error
    # orjson writes NaN as null, and dates, tuples and dataclasses as what they are not.
    if orjson.loads(payload) != claims:
        raise TypeError(
            "a token holds JSON values only: one of these would come back as another "
            "(a tuple, a date, a number that is not finite)"
        )
    return payload


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes | None:
    """The inverse of :func:`_encode`, or None: padding, other characters and unused bits
    that are set would each be a second spelling.
    """
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    return raw if _encode(raw) == text else None


def _with_length(raw: bytes) -> bytes:
    return b"%d:%b" % (len(raw), raw)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
