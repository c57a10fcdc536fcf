"""Who may use a server whose users sign in at a provider: ``--allow``."""

from typing import Any

import pytest

from mcp_sessions.authentication.allowing import Allowed
from mcp_sessions.errors import ConfigurationError

ALICE: dict[str, Any] = {
    "sub": "1",
    "email": "Alice@Example.com",
    "email_verified": True,
    "login": "alice",
    "groups": ["staff", 7],
}


@pytest.mark.parametrize(
    ("patterns", "claims", "is_allowed"),
    [
        (["*"], {}, True),
        (["*@example.com"], ALICE, True),
        (["alice@example.com"], ALICE, True),
        (["*@other.com", "*@example.com"], ALICE, True),
        (["*@other.com"], ALICE, False),
        (["a*e@exam*.com"], ALICE, True),
        (["*@example.com"], {**ALICE, "email": "alice@example.com.evil.com"}, False),
        (["*@example.com"], {**ALICE, "email": "alice@evil.com@example.com"}, False),
        (["*@example.com"], {**ALICE, "email": "alice@example.com\n"}, False),
        (["*@example.com"], {**ALICE, "email": "alice@exampleXcom"}, False),
        (["*@example.com"], {**ALICE, "email": ["alice@example.com"]}, False),
        (["*@example.com"], {**ALICE, "email": None}, False),
        (["*@example.com"], {**ALICE, "email_verified": False}, False),
        (["*@example.com"], {**ALICE, "email_verified": "false"}, False),
        (["*@example.com"], {**ALICE, "email_verified": "true"}, True),
        (["*@example.com"], {**ALICE, "email_verified": None}, False),
        (["*@example.com"], {**ALICE, "email_verified": None, "verified": True}, True),
        (["*@example.com"], {**ALICE, "verified": False}, False),
        (["login:ALICE"], ALICE, True),
        (["login:bob"], ALICE, False),
        (["login:alice"], {"preferred_username": "alice"}, True),
        (["login:a*"], ALICE, False),
        (["login:kim"], {"login": "\u212aim"}, False),
        (["login:boss"], {"login": "bo\u017f\u017f"}, False),
        (["login:\u212aim"], {"login": "\u212aim"}, True),
        (["boss@corp.com"], {"email": "bo\u017fs@corp.com", "email_verified": True}, False),
        (["login:alice"], {"cognito:username": "eve", "preferred_username": "alice"}, False),
        (["login:eve"], {"cognito:username": "eve", "preferred_username": "alice"}, True),
        (["group:staff"], ALICE, True),
        (["group:STAFF"], ALICE, False),
        (["group:staff"], {"groups": "staff"}, False),
        (["group:staff"], {"roles": ["staff"]}, True),
        (["login:None"], {"login": None}, False),
    ],
)
def test_one_pattern_that_fits_is_enough(
    patterns: list[str], claims: dict[str, Any], is_allowed: bool
) -> None:
    assert Allowed(patterns, verifies_mail=False).has(claims) == is_allowed


def test_a_provider_may_show_verified_addresses_only() -> None:
    claims = {"email": "alice@example.com"}
    assert Allowed(["*@example.com"], verifies_mail=True).has(claims)
    assert not Allowed(["*@example.com"], verifies_mail=True).has(
        {**claims, "email_verified": False}
    )


@pytest.mark.parametrize(
    "pattern", ["", "example.com", "alice", "login:", "group:", "user:a", "a@b@c", "alice@", "**"]
)
def test_another_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="--allow "):
        Allowed([pattern], verifies_mail=False)


def test_without_a_pattern_every_user_would_be_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"or --allow '\*' for all"):
        Allowed([], verifies_mail=False)
