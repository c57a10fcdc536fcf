"""``mcp_sessions.sealing``: how tokens are protected and spelled."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.errors import InvalidState
from mcp_sessions.sealing import Codec, Purpose, SealedTokens, SignedTokens, bound
from mcp_sessions.security import SessionSecurity
from tests.security.tokens import ALICE, NEW, OLD, SESSION, opened, sealed, server

BINDING = ("notes", SESSION, "client", "https://issuer.example", "alice")

# What clients hold survives an upgrade of the server. Whoever must change these two changes
# the prefix too, and keeps opening the old one until its last token expired.
SEALED_IN_0_1 = (
    "v1.NBsJiWJcoNpNgwn6IGpnLTPvwGXafFTqDvfIKtZXhnt6uXk1CrYBofqyvsfFBU5932MduFhi0u0B1"
    "_3uiIJXxJbPoeZ7hBc3pUza7VHfl7BP7xdrJxqhEHCgNQ"
)
SIGNED_IN_0_1 = (
    "v1s.eyJleHBpcmVzX2F0IjoyMDAwLjAsInN0YXRlIjp7ImxhbmciOiJlbiJ9LCJ2ZXJzaW9uIjozfQ.n"
    "F2tHnUF0z_0mQhVs65ura9XaAL6XVpKv_RmWSPgER0"
)


def hkdf(key: str, info: str) -> bytes:
    """RFC 5869 with SHA-256, no salt, and 32 bytes of output."""
    extracted = hmac.digest(bytes(32), key.encode(), "sha256")
    return hmac.digest(extracted, info.encode() + b"\x01", "sha256")


def unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def netstrings(*parts: str) -> bytes:
    return b"".join(b"%d:%b" % (len(part), part.encode()) for part in parts)


def nonce(token: str) -> bytes:
    return unpadded(token.removeprefix("v1."))[8:20]


# --- the format ---------------------------------------------------------------------------


def test_a_sealed_token_is_aes_256_gcm_under_a_key_by_hkdf() -> None:
    """STT5; opened here with nothing of ours."""
    raw = unpadded(sealed(server(), {"lang": "en"}).removeprefix("v1."))
    key_id, synthetic, box = raw[:8], raw[8:20], raw[20:]
    data = netstrings("v1.", "state") + key_id + netstrings(*BINDING)

    claims = AESGCM(hkdf(NEW, "mcp_sessions v1 sealed state")).decrypt(synthetic, box, data)

    assert json.loads(claims) == {"expires_at": 2000.0, "state": {"lang": "en"}, "version": 3}
    assert key_id == hkdf(NEW, "mcp_sessions v1 key id")[:8]
    of_everything = b"%d:%b" % (len(data), data) + claims
    nonce_key = hkdf(NEW, "mcp_sessions v1 nonce state")
    assert synthetic == hmac.digest(nonce_key, of_everything, "sha256")[:12]


def test_a_session_id_is_sealed_alike_with_keys_of_its_own() -> None:
    """SLS2."""
    session_id = server().seal_session_id(principal=ALICE, created_at=1.5, expires_at=2.5)
    raw = unpadded(session_id.removeprefix("v1."))
    data = netstrings("v1.", "session id") + raw[:8] + netstrings("notes") + b"-"
    data += netstrings("client", "https://issuer.example", "alice")

    key = AESGCM(hkdf(NEW, "mcp_sessions v1 sealed session id"))
    claims = json.loads(key.decrypt(raw[8:20], raw[20:], data))

    assert (claims["created_at"], claims["expires_at"]) == (1.5, 2.5)
    assert len(unpadded(claims["random"])) == 32


def test_a_signed_token_is_hmac_sha256_under_a_key_by_hkdf_and_a_salt() -> None:
    """STT5; verified here with nothing of ours and no itsdangerous."""
    security = server(sign_only=True)
    owner = netstrings("client", "https://issuer.example", "alice")
    tokens = {
        "state": (sealed(security), netstrings("notes", SESSION) + owner),
        "session id": (
            security.seal_session_id(principal=ALICE, created_at=1.5, expires_at=2.5),
            netstrings("notes") + b"-" + owner,
        ),
    }

    for purpose, (token, binding) in tokens.items():
        _, body, signature = token.split(".")
        signed = netstrings("v1s.", purpose) + b"%d:%b" % (len(binding), binding) + unpadded(body)
        key = hkdf(NEW, f"mcp_sessions v1 signed {purpose}")
        salted = hmac.digest(key, f"mcp_sessions {purpose}".encode(), hashlib.sha256)
        assert unpadded(signature) == hmac.digest(salted, signed, "sha256")


@pytest.mark.parametrize(("token", "sign_only"), [(SEALED_IN_0_1, False), (SIGNED_IN_0_1, True)])
def test_a_token_of_the_first_version_is_still_what_is_made(token: str, sign_only: bool) -> None:
    """An upgrade of one replica changes no token, and refuses none."""
    security = server(sign_only=sign_only)

    assert sealed(security, {"lang": "en"}) == token
    assert opened(security, token) == ({"lang": "en"}, 3)


# --- the nonce ----------------------------------------------------------------------------


def test_a_nonce_comes_again_only_with_the_same_plaintext_and_the_same_data() -> None:
    """GCM breaks where one nonce meets two messages under one key."""
    variants = [
        sealed(server(), {"lang": "en"}),
        sealed(server(), {"lang": "de"}),
        sealed(server(), {"lang": "en"}, version=4),
        sealed(server(), {"lang": "en"}, expires_at=2001.0),
        sealed(server(), {"lang": "en"}, session_id="another"),
        sealed(server(audience="mail"), {"lang": "en"}),
        *(
            sealed(server(), {"lang": "en"}, principal=principal)
            for principal in (
                type(ALICE)("other", ALICE.issuer, ALICE.subject),
                type(ALICE)(ALICE.client_id, "other", ALICE.subject),
                type(ALICE)(ALICE.client_id, ALICE.issuer, "other"),
            )
        ),
    ]

    assert len({nonce(token) for token in variants}) == len(variants)
    assert nonce(sealed(server(), {"lang": "en"})) == nonce(variants[0])


def test_a_random_nonce_never_comes_again() -> None:
    codec = SealedTokens([NEW], Purpose.SESSION_ID, random_nonce=True)

    tokens = {codec.seal({"a": 1}, binding=BINDING) for _ in range(100)}

    assert len({nonce(token) for token in tokens}) == len(tokens) == 100


# --- keys and bindings --------------------------------------------------------------------


def codecs(key: str) -> list[Codec]:
    """Each form for each purpose, all under one key."""
    return [
        *(SealedTokens([key], purpose, random_nonce=False) for purpose in Purpose),
        *(SignedTokens([key], purpose) for purpose in Purpose),
    ]


def test_each_form_and_each_purpose_has_a_key_of_its_own() -> None:
    """STT8: wrong purpose. Of all codecs under one key, each opens what it sealed alone."""
    tokens = [codec.seal({"a": 1}, binding=BINDING) for codec in codecs(NEW)]

    for position, codec in enumerate(codecs(NEW)):
        for other, token in enumerate(tokens):
            if other == position:
                assert codec.open(token, binding=BINDING) == {"a": 1}
            else:
                with pytest.raises(InvalidState):
                    codec.open(token, binding=BINDING)


def test_the_purpose_is_bound_and_not_only_in_the_key() -> None:
    """Two lines of defence: here both purposes have the keys of one."""
    states = SealedTokens([NEW], Purpose.STATE, random_nonce=False)
    mixed = SealedTokens([NEW], Purpose.SESSION_ID, random_nonce=False)
    vars(mixed).update({name: vars(states)[name] for name in ("_first", "_ring")})

    with pytest.raises(InvalidState):
        mixed.open(states.seal({}, binding=BINDING), binding=BINDING)


def test_the_key_id_is_bound() -> None:
    """A token cannot be moved to another place in the ring."""
    codec = SealedTokens([NEW, OLD], Purpose.STATE, random_nonce=False)
    by_new = unpadded(codec.seal({}, binding=BINDING).removeprefix("v1."))
    by_old = SealedTokens([OLD], Purpose.STATE, random_nonce=False).seal({}, binding=BINDING)
    moved = unpadded(by_old.removeprefix("v1."))[:8] + by_new[8:]

    with pytest.raises(InvalidState):
        codec.open("v1." + base64.urlsafe_b64encode(moved).decode().rstrip("="), binding=BINDING)


def parts_of(raw: bytes) -> list[str | None]:
    """The inverse of ``bound``: because there is one, no two bindings are the same bytes."""
    parts: list[str | None] = []
    while raw:
        if raw.startswith(b"-"):
            parts.append(None)
            raw = raw[1:]
        else:
            length, _, raw = raw.partition(b":")
            parts.append(raw[: int(length)].decode("utf-8", "surrogatepass"))
            raw = raw[int(length) :]
    return parts


# Joined, since Hypothesis leaves halves of surrogate pairs out of a text.
TEXT = st.text() | st.lists(st.sampled_from("\ud83d\ude00\\-:01ué")).map("".join)


@given(parts=st.lists(st.none() | TEXT))
def test_no_two_bindings_are_the_same_bytes(parts: list[str | None]) -> None:
    """SES8: injective, or one principal could be taken for another."""
    assert parts_of(bound(*parts)) == parts


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc", "d"), ("ab", "c", "d")),
        (("a", None, "b"), ("a", "", "b")),
        ((None, "a", None), (None, None, "a")),
        (("-", None, ""), (None, "-", "")),
        (("1:a", "b", ""), ("1", "a1:b", "")),
        (("0:", "", ""), ("", "0:", "")),
        # Two lone surrogates, which JSON's \u escapes cannot tell from the pair.
        (("\ud83d\ude00", "", ""), ("😀", "", "")),
        (("\ud83d", "", ""), ("\ude00", "", "")),
        (("é", "", ""), ("e\u0301", "", "")),
    ],
)
def test_bindings_that_look_alike_differ(
    one: tuple[str | None, ...], other: tuple[str | None, ...]
) -> None:
    """SES8."""
    assert bound(*one) != bound(*other)


@pytest.mark.parametrize("sign_only", [False, True])
def test_a_principal_from_any_credential_can_be_bound(sign_only: bool) -> None:
    """JSON in a token of an issuer may spell half a surrogate pair."""
    security = SessionSecurity([NEW], sign_only=sign_only)
    strange = type(ALICE)("client\0", "", "\ud83d")

    token = sealed(security, {}, principal=strange)

    assert opened(security, token, principal=strange) == ({}, 3)
