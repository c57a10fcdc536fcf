"""``mcp_sessions.core.life``: when a session is over by time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.life import end_of_life, has_expired, idle_deadline
from mcp_sessions.core.states import Mode


def test_a_conversation_has_no_end() -> None:
    ends_at = end_of_life(Mode.CONVERSATION, now=5.0, max_lifetime=100.0)

    assert ends_at == idle_deadline(now=5.0, idle_timeout=1.0, ends_at=ends_at) == math.inf
    assert not has_expired(now=1e12, expires_at=ends_at, ends_at=ends_at, held=False)


@given(st.floats(0, 1e6), st.floats(1, 1e4), st.floats(1, 1e4))
def test_no_use_of_a_session_moves_its_latest_end(now: float, idle: float, more: float) -> None:
    """SES15."""
    ends_at = end_of_life(Mode.TRANSPORT, now=now, max_lifetime=more)

    assert now < idle_deadline(now=now, idle_timeout=idle, ends_at=ends_at) <= ends_at
