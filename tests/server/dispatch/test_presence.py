"""A session whose client is there is not idle: what proves that, and what does not."""

from typing import Any

import pytest

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from tests.support.modern import ModernClient
from tests.support.raw import RawClient, Reply
from tests.support.virtual_time import cycles
from tests.support.world import World, world


async def time_passes(w: World, seconds: float) -> int:
    """The reaper goes round every five seconds; how many sessions it ended."""
    ended = 0
    for _ in range(int(seconds / 5)):
        w.clock.advance(5)
        ended += await w.expire()
    return ended


async def connected(w: World) -> tuple[RawClient, Reply, str]:
    """A 2025 client whose GET stream is open, and its session."""
    client = await w.connected()
    stream = await client.get().started()
    return client, stream, (await client.start())["sessionId"]


async def test_a_client_whose_get_stream_is_taken_keeps_its_sessions() -> None:
    """SES14: the transport-mode session of the stream, and the one whose events go there."""
    async with world(idle_timeout=100) as w:
        client, stream, session = await connected(w)
        assert await time_passes(w, 2_000) == 0
        assert await client.text("session_id") == session
        assert not stream.ended


async def test_a_client_whose_listen_stream_is_taken_keeps_its_session() -> None:
    """SES14, in the 2026 era."""
    async with world(idle_timeout=100) as w:
        client = ModernClient(w.carrier)
        session = (await client.start())["sessionId"]
        received = await client.listening(session, "a:1")
        assert await time_passes(w, 1_000) == 0
        assert not received.reply.ended


async def test_a_stream_that_nobody_takes_from_keeps_no_session() -> None:
    """SES14: a half-open connection is open, and proves nothing."""
    async with world(idle_timeout=100, slow_timeout=100_000) as w:
        _, stream, _ = await connected(w)
        assert await time_passes(w, 500) == 0
        stream.stall()
        await w.layer.notify_tools_changed()
        await cycles()
        assert await time_passes(w, 95) == 0
        assert await time_passes(w, 15) == 2


async def test_a_session_is_idle_from_when_its_client_left() -> None:
    """SES14: not from when its deadline was last moved, which may be a while ago."""
    async with world(idle_timeout=1_000) as w:
        client, stream, session = await connected(w)
        await time_passes(w, 95)
        await stream.gone()
        assert await time_passes(w, 1_000) == 0
        assert await client.text("session_id") == session


async def test_a_lifetime_ends_whoever_is_there() -> None:
    """SES15."""
    async with world(idle_timeout=100, max_lifetime=1_000) as w:
        _, stream, _ = await connected(w)
        assert await time_passes(w, 995) == 0
        assert await time_passes(w, 10) == 2
        await stream.done()


async def test_a_deadline_is_moved_ten_times_in_an_idle_timeout() -> None:
    """A store is not written in each round for each client that is connected."""
    async with world(idle_timeout=1_000) as w:
        await connected(w)
        touched = count_touches(w)
        await time_passes(w, 2_000)
        assert 18 <= len(touched) <= 22


async def test_a_deadline_that_could_not_be_moved_is_due_still() -> None:
    """A store that is away for one round does not cost the session a tenth of its time."""
    async with world(idle_timeout=100) as w:
        client, _, session = await connected(w)
        touched = count_touches(w, away=True)
        w.clock.advance(50)
        with pytest.raises(StoreUnavailable):
            await w.expire()
        touched.clear()
        count_touches(w)
        w.clock.advance(45)
        assert await w.expire() == 0
        w.clock.advance(95)
        assert await w.expire() == 0
        assert await client.text("session_id") == session


async def test_a_deadline_is_moved_after_the_clock_was_set_back() -> None:
    """A clock that is corrected by a day takes no session."""
    async with world(idle_timeout=100) as w:
        await connected(w)
        await time_passes(w, 20)
        w.clock.advance(-86_400)
        touched = count_touches(w)
        await time_passes(w, 20)
        assert touched


async def test_an_ended_session_does_not_come_back_with_its_stream() -> None:
    """SES18: whoever moves its deadline last."""
    async with world(idle_timeout=100) as w:
        client, _, session = await connected(w)
        await time_passes(w, 20)
        await client.end(session)
        await time_passes(w, 200)
        assert await w.layer.store.load(SessionId(session), now=w.clock()) is None


def count_touches(w: World, *, away: bool = False) -> list[Any]:
    """Every later call of the store's ``touch``, which fails if it is ``away``."""
    vars(w.layer.store).pop("touch", None)
    touch, calls = w.layer.store.touch, list[Any]()

    async def counted(sessions: Any, *, now: float) -> None:
        calls.append(sessions)
        if away:
            raise StoreUnavailable("away")
        await touch(sessions, now=now)

    w.layer.store.touch = counted  # pyright: ignore[reportAttributeAccessIssue]
    return calls


async def test_a_session_that_cannot_be_read_costs_no_other_one_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SES14: another release wrote it, say. No round came to its end, so nobody's sessions were
    kept, and none expired.
    """
    async with world(idle_timeout=100) as w:
        broken, *_ = await connected(w)
        client, _, session = await connected(w)
        left = await w.connected()
        await left.start()
        store = w.inside.store
        load = store.load

        async def refuses(session_id: SessionId, **more: Any) -> Any:
            if session_id == broken.session_id:
                raise StoreRefused("another release wrote it")
            return await load(session_id, **more)

        monkeypatch.setattr(store, "load", refuses)
        assert await time_passes(w, 200) >= 2
        assert await client.text("session_id") == session
