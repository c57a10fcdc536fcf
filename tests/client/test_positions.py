"""The effect of the answer to ``session/resume`` on the client's position."""

from typing import Any

from mcp_sessions.client.sessions import Session

HEAD = "ev-9"


def resumed(**answered: Any) -> Session:
    """A session of which ``ev-1`` was processed, after that answer."""
    session = Session("s")
    session.attach("ev-0")
    assert session.follower.admits("ev-1")
    session.resumed({"resumed": True, "replayed": 0, "sessionEventId": HEAD, **answered})
    return session


def test_where_nothing_can_be_pushed_the_client_keeps_its_position() -> None:
    """RES12, CUP14. It once took the head, and what waited for it on the server was lost; and it
    took an event that it had seen for a new one.
    """
    session = resumed(catchup=False, reason="no_stream")
    assert session.follower.position == "ev-1"
    assert not session.follower.admits("ev-1")


def test_after_another_refusal_the_head_is_the_position() -> None:
    """CUP14, CLI4."""
    session = resumed(catchup=False, reason="evicted")
    assert session.follower.position == HEAD
    assert session.follower.admits("ev-1")
