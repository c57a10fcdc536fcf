"""``mcp_sessions.security``: what is minted cannot be guessed, and looks like an id."""

import base64

import pytest

from mcp_sessions.ids import Position, parse_position, parse_session_id
from mcp_sessions.security import (
    mint_connection_id,
    mint_key,
    mint_log_epoch,
    mint_request_id,
    mint_session_id,
)


def test_a_session_id_holds_256_random_bits_in_visible_ascii() -> None:
    """EVT8, SES4."""
    ids = {mint_session_id() for _ in range(1_000)}

    assert len(ids) == 1_000
    for session_id in ids:
        assert parse_session_id(session_id) == session_id
        assert len(base64.urlsafe_b64decode(session_id + "=")) == 32


def test_a_key_holds_256_random_bits() -> None:
    """``SessionSecurity`` derives its keys from it."""
    assert len(base64.urlsafe_b64decode(mint_key() + "=")) == 32
    assert mint_key() != mint_key()


def test_ids_of_connections_and_requests_are_unique() -> None:
    """ASK1: server-to-client requests have ids unique over all sessions."""
    assert len({mint_request_id() for _ in range(1_000)}) == 1_000
    assert len({mint_connection_id("websocket") for _ in range(1_000)}) == 1_000
    assert mint_connection_id("stdio").startswith("stdio-")


def test_a_minted_log_epoch_makes_ids_that_parse() -> None:
    """CUP8, EVT8."""
    start = Position(mint_log_epoch(), 0)

    assert parse_position(start.event_id()) == start


def test_logs_made_in_one_millisecond_still_have_epochs_in_order() -> None:
    """Ids sort in the order of issue, also across a log made anew."""
    epochs = [mint_log_epoch() for _ in range(1_000)]

    assert epochs == sorted(set(epochs))


def test_a_log_made_after_the_clock_was_set_back_has_a_later_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within one process at least."""
    before = mint_log_epoch()
    a_second_ago = (int(before[:13]) - 1_000) * 1_000_000
    monkeypatch.setattr("time.time_ns", lambda: a_second_ago)

    assert mint_log_epoch() > before
