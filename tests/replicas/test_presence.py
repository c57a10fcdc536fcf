"""A client that one replica serves is there for all of them."""

import pytest

from tests.support.replicas import cluster


@pytest.mark.in_process
async def test_no_replica_ends_a_session_whose_client_is_connected_to_another() -> None:
    """SES14: the replica that has the stream moves the deadline for all."""
    async with cluster(2, idle_timeout=100) as c:
        client = await c[0].connected()
        stream = await client.get().started()
        session = (await client.start())["sessionId"]
        for _ in range(20):
            c.clock.advance(20)
            assert await c[0].expire() == 0
            assert await c[1].expire() == 0
        assert await c.at(1, client).text("session_id") == session

        await stream.gone()
        c.clock.advance(10)
        assert await c[0].expire() == 0
        c.clock.advance(110)
        assert await c[1].expire() == 2
