"""``SessionSecurity``: session ids of the stateless mode, which are tokens themselves."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.ids import SessionId, digest, parse_session_id
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.sealing import SEALED, SIGNED
from mcp_sessions.security import SessionSecurity
from tests.security.tokens import (
    ALICE,
    EXPIRES,
    MADE,
    NEW,
    NOW,
    OLD,
    OTHER,
    flipped,
    sealed,
    server,
)

FORMS = pytest.mark.parametrize("sign_only", [False, True], ids=["sealed", "signed"])


def minted(security: SessionSecurity) -> SessionId:
    return security.seal_session_id(principal=ALICE, created_at=MADE, expires_at=EXPIRES)


def opens(security: SessionSecurity, session_id: str) -> bool:
    return security.open_session_id(session_id, principal=ALICE, now=NOW) is not None


@FORMS
def test_a_session_id_says_when_its_session_was_made_and_when_it_expires(sign_only: bool) -> None:
    """SLS2: a sealed token with a fixed ``expiresAt``."""
    security = server(sign_only=sign_only)
    session_id = minted(security)

    for now in (MADE, NOW, EXPIRES - 0.001):
        moments = security.open_session_id(session_id, principal=ALICE, now=now)
        assert moments == (MADE, EXPIRES)


@FORMS
@given(created_at=st.floats(0, 1e11), lifetime=st.floats(0.001, 1e9), subject=st.none() | st.text())
def test_a_session_id_is_visible_ascii_of_a_length_that_is_accepted(
    sign_only: bool, created_at: float, lifetime: float, subject: str | None
) -> None:
    """SES4: 0x21–0x7E."""
    session_id = server(sign_only=sign_only).seal_session_id(
        principal=replace(ALICE, subject=subject),
        created_at=created_at,
        expires_at=created_at + lifetime,
    )

    assert parse_session_id(session_id) == session_id
    assert len(session_id) <= 256


@FORMS
def test_two_session_ids_are_never_alike(sign_only: bool) -> None:
    """A session is not guessed from another one, made in the same moment."""
    security = server(sign_only=sign_only)

    assert len({minted(security) for _ in range(100)}) == 100


def test_a_session_id_has_256_random_bits_inside() -> None:
    """SES4; read where it can be."""
    ids = [minted(server(sign_only=True)).split(".")[1] for _ in range(2)]

    inside = [json.loads(base64.urlsafe_b64decode(body + "==")) for body in ids]

    assert [len(base64.urlsafe_b64decode(claims["random"] + "=")) for claims in inside] == [32, 32]
    assert inside[0]["random"] != inside[1]["random"]


@FORMS
def test_unknown_foreign_and_expired_ids_get_one_answer(
    sign_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """SES8, ERR2, STT8: one answer; the log tells them apart, and has neither id nor key."""
    caplog.set_level(logging.DEBUG)
    security = server(sign_only=sign_only)
    session_id = minted(security)
    prefix = SIGNED if sign_only else SEALED
    refused = {
        "of no server": (security, "A" * 43, ALICE, NOW),
        "with our prefix": (security, prefix + "A" * 120, ALICE, NOW),
        "empty": (security, "", ALICE, NOW),
        "too long": (security, session_id + "A" * 2**20, ALICE, NOW),
        "not ASCII": (security, session_id[:-1] + "é", ALICE, NOW),
        "half a character": (security, "\ud83d", ALICE, NOW),
        "a space after": (security, session_id + " ", ALICE, NOW),
        "wrong key": (server(OTHER, sign_only=sign_only), session_id, ALICE, NOW),
        "the other form": (server(sign_only=not sign_only), session_id, ALICE, NOW),
        "wrong audience": (server(sign_only=sign_only, audience="mail"), session_id, ALICE, NOW),
        "somebody else's": (security, session_id, replace(ALICE, subject="bob"), NOW),
        "of another client": (security, session_id, replace(ALICE, client_id="other"), NOW),
        "of another issuer": (security, session_id, replace(ALICE, issuer="other"), NOW),
        "nobody": (security, session_id, ANONYMOUS, NOW),
        "expired": (security, session_id, ALICE, EXPIRES),
        "a clock that is broken": (security, session_id, ALICE, float("nan")),
        "wrong purpose": (security, sealed(security), ALICE, NOW),
    }

    for name, (asked, sent, principal, now) in refused.items():
        caplog.clear()

        assert asked.open_session_id(sent, principal=principal, now=now) is None, name

        [record] = caplog.records
        assert record.levelname == "INFO"
        line = record.getMessage()
        assert line.startswith(f"session id {digest(sent)} refused: ")
        assert ("expired" in line) == (now is not NOW)
        for secret in (sent, session_id[4:40], NEW, OTHER, "alice"):
            assert not secret or secret not in line


@FORMS
@pytest.mark.parametrize("sent", ["", "v1.é", "v1.A A", "v1s." + "A" * 2**20])
def test_what_cannot_be_a_session_id_is_not_even_decoded(
    sign_only: bool, sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    """STT8: a megabyte costs nothing."""
    caplog.set_level(logging.INFO)

    assert not opens(server(sign_only=sign_only), sent)

    assert caplog.messages == [f"session id {digest(sent)} refused: not a session id"]


@FORMS
def test_every_bit_and_every_character_of_a_session_id_matters(sign_only: bool) -> None:
    """STT8."""
    security = server(sign_only=sign_only)
    session_id = minted(security)

    for other in flipped(session_id):
        assert not opens(security, other)
    for length in range(1, len(session_id) + 1):
        assert not opens(security, session_id[:-length])
        assert not opens(security, session_id[length:])


@FORMS
def test_a_refreshed_credential_of_the_owner_keeps_the_session(sign_only: bool) -> None:
    """SES8."""
    security = server(sign_only=sign_only)
    refreshed = replace(ALICE, scopes=frozenset({"read", "write"}))

    assert security.open_session_id(minted(security), principal=refreshed, now=NOW)


@FORMS
def test_a_session_id_under_an_old_key_opens_until_the_key_is_dropped(sign_only: bool) -> None:
    """STT8."""
    session_id = minted(server(OLD, sign_only=sign_only))

    assert opens(server(NEW, OLD, sign_only=sign_only), session_id)
    assert not opens(server(NEW, sign_only=sign_only), session_id)


@FORMS
def test_a_state_is_bound_to_a_session_id_that_is_a_token(sign_only: bool) -> None:
    """Stateless mode: the one travels with the other, and with no other."""
    security = server(sign_only=sign_only)
    mine, other = minted(security), minted(security)

    assert sealed(security, session_id=mine) != sealed(security, session_id=other)
