"""Over HTTP, while the store takes its time or fails between two steps of an answer."""

import asyncio

import pytest

from mcp_sessions.errors import StoreUnavailable
from tests.support.interposed import Interposed
from tests.support.raw import RawClient, Sent, text_of
from tests.support.world import Ctx, World, world

pytestmark = pytest.mark.anyio

ROUND_TRIP = 0.004


async def silence(seconds: float) -> None:
    """Time passes, virtually."""
    await asyncio.sleep(seconds)


def reports_after(w: World, seconds: float, *, answers_after: float = 0.0) -> None:
    """The tool ``late`` reports progress so long after it was called, and then returns."""

    async def late(ctx: Ctx, arguments: object) -> str:
        await silence(seconds)
        await ctx.session.report_progress(1, 2)
        await silence(answers_after)
        await ctx.session.report_progress(2, 2)
        return "late"

    w.box.tools["late"] = late


def called_late(client: RawClient) -> Sent:
    return client.call("late", meta={"progressToken": 1})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tenths", range(940, 1_010, 5))
async def test_a_message_about_the_deadline_for_json_makes_a_stream(tenths: int, when: str) -> None:
    """Whenever it comes: the deadline may pass while the store opens the stream."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:
        reports_after(w, tenths / 10_000)
        client = await w.connected()

        async def wait() -> None:
            await silence(ROUND_TRIP)

        (interposed.before if when == "before" else interposed.after)["open_stream"] = wait
        sent = called_late(client)

        assert text_of(await sent.result()) == "late"
        reply = await sent.reply.done()
        assert reply.error is None and reply.status == 200 and reply.is_sse
        assert [m["params"]["progress"] for m in reply.messages[:-1]] == [1, 2]
        assert [event.id for event in reply.events] == sorted({e.id for e in reply.events})
        assert interposed.calls.count("open_stream") == 1


@pytest.mark.parametrize("away", [False, True])
async def test_what_a_handler_sends_at_once_waits_for_one_stream(away: bool) -> None:
    """All of it goes there, however long the store takes to open it, and if it cannot."""
    interposed = Interposed()
    async with world(store=interposed.store) as w:

        async def both(ctx: Ctx, arguments: object) -> str:
            await asyncio.gather(*(ctx.session.report_progress(n, 3) for n in (1, 2, 3)))
            return "both"

        w.box.tools["both"] = both
        client = await w.connected()

        async def wait() -> None:
            await silence(ROUND_TRIP)
            if away:
                raise StoreUnavailable("away")

        interposed.after["open_stream"] = wait
        sent = client.call("both", meta={"progressToken": 1})

        assert text_of(await sent.result()) == "both"
        reply = await sent.reply.done()
        assert sorted(m["params"]["progress"] for m in reply.messages[:-1]) == [1, 2, 3]
        assert all(("id" in event.fields) is not away for event in reply.events)
        assert interposed.calls.count("open_stream") == 1


async def test_a_stream_that_was_cut_while_it_was_being_opened_is_one_that_nobody_reads() -> None:
    """Its request's time is bounded from then on, as of any that nobody listens to."""
    interposed = Interposed()
    async with world(store=interposed.store, detached_timeout=30) as w:
        client = await w.connected()

        async def breaks() -> None:
            raise RuntimeError("this store breaks")

        interposed.before["open_stream"] = breaks
        sent = client.call("wait", gate="g")
        error = (await sent.reply.done()).error
        assert isinstance(error, RuntimeError)
        sent.reply.error = None
        interposed.mend()

        assert not w.box.gate("g").cancelled.is_set()
        await silence(31)
        assert w.box.gate("g").cancelled.is_set()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_stream_that_cannot_be_forgotten_now_is_forgotten_later(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody's answer is spoiled by it: not the one that ends just then, and not that of
    who joined it.
    """
    interposed = Interposed()
    async with world(store=interposed.store, max_finished_streams=1) as w:
        reports_after(w, 0)
        client = await w.connected()
        interposed.fails("drop_stream", when)
        for _ in range(3):
            sent = called_late(client)
            assert text_of(await sent.result()) == "late"
            reply = await sent.reply.done()
            assert reply.status == 200 and reply.error is None
        assert "forgotten" in caplog.text

        interposed.mend()
        assert text_of(await called_late(client).result()) == "late"
        await silence(1)
        session = next(iter(interposed.memory._sessions.values()))  # pyright: ignore[reportPrivateUsage]
        assert session.streams is not None
        posts = [name for name in session.streams if name.startswith("post")]
        assert len(posts) == 1
