"""``mcp_sessions.policy``: every limit has a sensible default, and nonsense is refused."""

import math
from dataclasses import fields
from typing import Any

import pytest

from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import COALESCED_BY_DEFAULT, SessionPolicy

NUMBERS = [
    limit.name
    for limit in fields(SessionPolicy)
    if limit.name not in {"coalescing", "max_sessions_per_principal"}
]


def test_the_defaults_are_those_of_the_protocol() -> None:
    """CUP1: 1,000 events, 1 MiB, 1 hour."""
    policy = SessionPolicy()

    assert (policy.max_events, policy.max_bytes, policy.max_age) == (1_000, 1_048_576, 3_600)
    assert (policy.send_buffer, policy.slow_timeout) == (1_048_576, 10)
    assert policy.max_sessions_per_principal is None


@pytest.mark.parametrize("name", [*NUMBERS, "max_sessions_per_principal"])
def test_a_limit_that_is_no_positive_number_is_refused_by_name(name: str) -> None:
    """Every limit is one; the error says which setting to change."""
    for value in (0, -1, math.inf, -math.inf, math.nan):
        limits: dict[str, Any] = {name: value}
        if name in ("progress_every", "question_timeout") and value == 0:
            assert getattr(SessionPolicy(**limits), name) == 0, "it can be switched off"
            continue
        with pytest.raises(ConfigurationError, match=f"^{name} must be a positive number"):
            SessionPolicy(**limits)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_limit_can_be_set_and_stays(name: str) -> None:
    """Frozen: a layer's limits do not move under its sessions."""
    limits: dict[str, Any] = {name: 7}
    policy = SessionPolicy(**limits)

    assert getattr(policy, name) == 7
    with pytest.raises(AttributeError):
        setattr(policy, name, 8)


def test_only_listed_notifications_are_coalesced_by_default() -> None:
    """COA4."""
    assert SessionPolicy().coalescing == {
        "notifications/resources/updated": "uri",
        "notifications/tools/list_changed": None,
        "notifications/prompts/list_changed": None,
        "notifications/resources/list_changed": None,
        "notifications/tasks": "taskId",
    }


def test_one_policys_rules_are_not_anothers() -> None:
    """The default is copied, not shared."""
    assert SessionPolicy().coalescing is not COALESCED_BY_DEFAULT
    assert SessionPolicy().coalescing is not SessionPolicy().coalescing
