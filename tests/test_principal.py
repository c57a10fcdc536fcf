"""``mcp_sessions.principal``: who is the same, and who is not."""

from dataclasses import replace

import pytest

from mcp_sessions.principal import ANONYMOUS, Principal

ALICE = Principal("client", "https://issuer.example", "alice", frozenset({"read"}))


def test_a_refreshed_credential_is_the_same_principal() -> None:
    """SES8: scopes take no part in identity; they are compared on their own (SEC3)."""
    refreshed = replace(ALICE, scopes=frozenset({"read", "write"}))

    assert refreshed == ALICE and hash(refreshed) == hash(ALICE)
    assert refreshed.scopes != ALICE.scopes


@pytest.mark.parametrize(
    "other",
    [
        replace(ALICE, client_id="other"),
        replace(ALICE, issuer="https://other.example"),
        replace(ALICE, subject="bob"),
        replace(ALICE, subject=None),
        ANONYMOUS,
    ],
)
def test_another_client_issuer_or_subject_is_another_principal(other: Principal) -> None:
    """SES8: the owner is all three."""
    assert other != ALICE


def test_without_authentication_everyone_is_one_principal() -> None:
    """SEC1: there the session id is the credential."""
    assert Principal() == ANONYMOUS
