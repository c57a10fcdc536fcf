"""Servers that bind conversations and get wrong what no client can see: the test that catches each.

What shows on the wire has vectors and their faults in ``conformance/``.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mcp_sessions.errors import LimitReached, StoreUnavailable
from mcp_sessions.server.dispatch import conversation_sessions
from mcp_sessions.server.dispatch.conversation_sessions import ConversationSessions
from mcp_sessions.stores.memory import memory_store as memory
from tests.server.dispatch import test_conversation_sessions as right

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

session_of, found_or_made = ConversationSessions.session_of, ConversationSessions._found_or_made  # pyright: ignore[reportPrivateUsage]


def refuses_at_a_limit(patch: Patch) -> None:
    """CNV11."""

    async def wrong(self: Any, *args: Any) -> Any:
        record = await found_or_made(self, *args)
        if record is None:
            raise LimitReached("max_sessions_per_principal", 1)
        return record

    patch.setattr(ConversationSessions, "_found_or_made", wrong)


def counts_none(patch: Patch) -> None:
    """CNV11."""
    patch.setattr(memory, "check_sessions", lambda *args: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def serves_without_its_store(patch: Patch) -> None:
    """HTP5."""

    async def wrong(self: Any, *args: Any) -> Any:
        try:
            return await session_of(self, *args)
        except StoreUnavailable:
            return None

    patch.setattr(ConversationSessions, "session_of", wrong)


def logs_keys(patch: Patch) -> None:
    """CNV13."""

    async def wrong(self: Any, key: Any, *args: Any) -> Any:
        logging.getLogger(conversation_sessions.__name__).debug("of %s", key.text)
        return await found_or_made(self, key, *args)

    patch.setattr(ConversationSessions, "_found_or_made", wrong)


def takes_keys_from_anybody(patch: Patch) -> None:
    """CNV5."""
    patch.setattr(ConversationSessions, "_may_send_keys", lambda *args: True)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


Caught = Callable[[pytest.LogCaptureFixture], Awaitable[None]]

CAUGHT_BY: tuple[tuple[Fault, Caught], ...] = (
    (refuses_at_a_limit, right.test_a_flood_of_keys_meets_its_senders_limit),
    (counts_none, right.test_a_flood_of_keys_meets_its_senders_limit),
    (
        serves_without_its_store,
        lambda _: right.test_a_store_that_is_away_is_no_other_conversation("modern"),
    ),
    (logs_keys, right.test_a_key_and_the_id_that_it_becomes_are_not_logged),
    (
        takes_keys_from_anybody,
        lambda _: right.test_who_is_nobody_has_one_on_this_machine_only("Via"),
    ),
)


@pytest.mark.parametrize(
    ("wrong", "caught_by"), CAUGHT_BY, ids=[fault.__name__ for fault, _ in CAUGHT_BY]
)
async def test_what_is_wrong_is_caught_by_its_test_alone(
    wrong: Fault, caught_by: Caught, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MCP_SESSIONS_TEST_STORE", "memory")
    wrong(monkeypatch)
    with pytest.raises(AssertionError):
        await caught_by(caplog)
    await right.test_the_eras_share_a_conversation()
    await right.test_two_users_with_one_key_have_two_sessions(right.OPENAI, "modern")
    for _, other in CAUGHT_BY:
        if other is not caught_by:
            caplog.clear()
            await other(caplog)
