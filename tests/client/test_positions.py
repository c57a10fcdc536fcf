"""The effect of the answer to ``session/resume`` on the client's position."""

from typing import Any

from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.core.resume import SessionView

HEAD = "ev-9"


def resumed(**answered: Any) -> KnownServer:
    """A client that has processed ``ev-1``, after that answer."""
    peer = KnownServer("me")
    peer.began(SessionView("s"), "ev-0")
    assert peer.follower.admits("ev-1")
    peer.resumed({"resumed": True, "replayed": 0, "sessionEventId": HEAD, **answered})
    return peer


def test_where_nothing_can_be_pushed_the_client_keeps_its_position() -> None:
    """RES12, CUP14. It once took the head, and what waited for it on the server was lost; and it
    took an event that it had seen for a new one.
    """
    peer = resumed(catchup=False, reason="no_stream")
    assert peer.follower.position == "ev-1"
    assert not peer.follower.admits("ev-1")


def test_after_another_refusal_the_head_is_the_position() -> None:
    """CUP14, CLI4."""
    peer = resumed(catchup=False, reason="evicted")
    assert peer.follower.position == HEAD
    assert peer.follower.admits("ev-1")
