"""A client on a WebSocket or a pipe that answers is there, and its session is not idle."""

import pytest

from tests.support.children import until
from tests.support.duplex import duplex_world


@pytest.mark.parametrize("kind", ["websocket", "pipe"])
async def test_a_connection_keeps_the_sessions_that_are_attached_there(kind: str) -> None:
    """SES14: as long as it is there; its end makes them idle."""
    async with duplex_world(idle_timeout=100) as w:
        client = await w.connected(kind)
        session = (await client.start())["sessionId"]
        for _ in range(50):
            w.inner.clock.advance(20)
            assert await w.inner.expire() == 0
        assert await client.text("session_id") == session

        connections = w.layer._assembly.connections  # pyright: ignore[reportPrivateUsage]
        await client.leave()
        await until(lambda: not connections.all(), "its end")
        for _ in range(5):
            w.inner.clock.advance(19)
            assert await w.inner.expire() == 0
        w.inner.clock.advance(25)
        assert await w.inner.expire() == 1
