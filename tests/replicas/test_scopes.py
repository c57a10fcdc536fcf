"""F3 across replicas: a weaker credential receives nothing that a stronger one started."""

import pytest

from tests.support.raw import RawClient, Reply, at_most, uris
from tests.support.replicas import Cluster, cluster, user
from tests.support.virtual_time import cycles

SOON = 1.0
SEEDS = range(6)


async def with_stream(c: Cluster, *, stream_at: int) -> tuple[RawClient, Reply]:
    """A connection made with few scopes, its GET stream open on one replica; the same client
    with more scopes, on replica 0.
    """
    weak = RawClient(await c[0].carrier_of(user("ann", "read")))
    await weak.initialize()
    opener = RawClient(await c[stream_at].carrier_of(user("ann", "read")))
    opener.session_id = weak.session_id
    stream = await opener.get().started()
    strong = RawClient(await c[0].carrier_of(user("ann", "read", "write")))
    strong.session_id = weak.session_id
    return strong, stream


@pytest.mark.parametrize("stream_at", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_stronger_session_cuts_a_weaker_stream(seed: int, stream_at: int) -> None:
    """Attached to a connection whose stream a weaker token opened, here or on another replica: not
    one of its events goes there; the stronger token gets them all.
    """
    async with cluster(2, seed=seed) as c:
        strong, weak_stream = await with_stream(c, stream_at=stream_at)
        await strong.start()
        await strong.text("update", uri="secret:1")
        await at_most(SOON, weak_stream.done())
        await cycles(20)

        assert not weak_stream.messages
        last = weak_stream.events[-1].id
        assert uris(await at_most(SOON, strong.get(last).has(1))) == ["secret:1"]


async def test_an_equal_session_does_not() -> None:
    """Not more than it needs: the stream of a credential with those scopes goes on."""
    async with cluster(2) as c:
        strong, weak_stream = await with_stream(c, stream_at=1)
        weak = RawClient(await c[0].carrier_of(user("ann", "read")))
        weak.session_id = strong.session_id
        await weak.start()
        await weak.text("update", uri="open:1")
        assert uris(await at_most(SOON, weak_stream.has(1))) == ["open:1"]


async def test_a_weaker_resume_at_another_replica_is_refused() -> None:
    """As on one replica: like an unknown session."""
    async with cluster(2) as c:
        strong = RawClient(await c[0].carrier_of(user("ann", "read", "write")))
        session = (await strong.start())["sessionId"]
        weak = RawClient(await c[1].carrier_of(user("ann", "read")))
        error = await weak.error("session/resume", {"sessionId": session})
        assert error["code"] == -32043


@pytest.mark.parametrize("read_at", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_weaker_credential_does_not_read_a_stronger_ones_response_at_another_replica(
    seed: int, read_at: int
) -> None:
    """SEC3, on the replica that runs the request or on another; the stronger one gets it on both,
    and its stream is not cut by the try.
    """
    async with cluster(2, seed=seed) as c:
        strong, _ = await with_stream(c, stream_at=0)
        sent = strong.call("progress", steps=2, gate="g", meta={"progressToken": 1})
        await at_most(SOON, sent.reply.has(1))
        event = sent.reply.events[0].id

        weak = RawClient(await c[read_at].carrier_of(user("ann", "read")))
        weak.session_id = strong.session_id
        assert (await at_most(SOON, weak.get(event).done())).status == 404
        assert not sent.reply.ended

        again = RawClient(await c[read_at].carrier_of(user("ann", "write", "read", "more")))
        again.session_id = strong.session_id
        stream = await again.get(event).started()
        c[0].box.gate("g").go.set()
        assert "result" in await at_most(10, stream.answer(sent.id))
