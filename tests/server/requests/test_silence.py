"""A call whose handler says nothing for long is seen."""

import asyncio
from typing import Any

import pytest

from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient, Reply, text_of
from tests.support.world import World, world

TOKEN: Json = {"progressToken": "t"}


def values(reply: Reply) -> list[float]:
    """What its client learned of progress."""
    notified = [m["params"] for m in reply.messages if m.get("method") == "notifications/progress"]
    assert all(each["progressToken"] == "t" for each in notified)
    return [each["progress"] for each in notified]


def rise(notified: list[float]) -> bool:
    """Whether each is above the one before it."""
    return all(before < after for before, after in zip(notified, notified[1:], strict=False))


async def waiting(w: World, client: RawClient, meta: Json | None = TOKEN) -> Any:
    sent = await w.waits(client.call("wait", gate="g", meta=meta))
    return sent


async def test_a_silent_call_is_reported() -> None:
    """Rule 1: at least once in each period, until it is answered."""
    async with world(progress_every=60) as w:
        sent = await waiting(w, await w.connected())
        received: list[int] = []
        for _ in range(5):
            await asyncio.sleep(61)
            received.append(len(values(sent.reply)))
        w.box.gate("g").go.set()
        assert text_of(await sent.result()) == "through g"
        notified = values(sent.reply)
        assert all(
            after > before for before, after in zip([0, *received], received, strict=False)
        ), received
        assert len(notified) <= 8 and rise(notified)
        await asyncio.sleep(200)
        assert values(sent.reply) == notified


async def test_a_silent_call_of_the_2026_era_is_reported() -> None:
    """Rule 1."""
    async with world(progress_every=60) as w:
        received = await w.waits(ModernClient(w.carrier).call("wait", {"gate": "g"}, meta=TOKEN))
        await asyncio.sleep(130)
        w.box.gate("g").go.set()
        await received.result()
        assert len(values(received.reply)) >= 2 and rise(values(received.reply))


async def test_it_rises_between_what_the_handler_says() -> None:
    """A handler that said 1 of 3, and is silent, goes on with 2 and 3 as they are."""
    async with world(progress_every=60) as w:
        client = await w.connected()
        sent = await w.waits(client.call("progress", steps=3, gate="g", meta=TOKEN))
        await asyncio.sleep(130)
        w.box.gate("g").go.set()
        await sent.result()
        notified = values(sent.reply)
        assert len(notified) >= 5 and rise(notified)
        assert (notified[0], notified[-2:]) == (1, [2, 3])


@pytest.mark.parametrize(("every", "meta"), [(0, TOKEN), (60, None)], ids=["off", "no token"])
async def test_nothing_is_said_where_nobody_asked(every: float, meta: Json | None) -> None:
    """Without a token there is no name for it; and it can be switched off."""
    async with world(progress_every=every) as w:
        sent = await waiting(w, await w.connected(), meta)
        await asyncio.sleep(600)
        w.box.gate("g").go.set()
        await sent.result()
        assert values(sent.reply) == []


async def test_in_the_log_of_its_stream_the_newest_is_kept() -> None:
    """Whoever comes back after hours gets one message of ours, and the answer."""
    async with world(progress_every=60) as w:
        client = await w.connected()
        sent = await waiting(w, client)
        await asyncio.sleep(70)
        count = len(values(sent.reply))
        event = await sent.reply.event(0)
        sent.reply.leave()
        # Nobody listens: nothing is said, but for what was under way.
        await asyncio.sleep(300)
        again = await client.get(event.id).started()
        await asyncio.sleep(250)
        w.box.gate("g").go.set()
        answer = await again.answer(sent.id)
        assert text_of(answer["result"]) == "through g"
        assert rise(values(again)) and len(values(again)) >= 3
        once_more = await client.get(event.id).started()
        await once_more.answer(sent.id)
        assert count >= 1 and len(values(once_more)) == 1


async def test_a_client_that_takes_nothing_delays_no_other() -> None:
    """Rule 3."""
    async with world(progress_every=60, slow_timeout=100_000, send_buffer=10) as w:
        slow, other = await w.connected(), await w.connected()
        stalls = await w.waits(slow.call("wait", gate="slow", meta=TOKEN), "slow")
        stalls.reply.stall()
        sent = await waiting(w, other)
        await asyncio.sleep(650)
        assert len(values(sent.reply)) >= 10
        w.box.gate("g").go.set()
        w.box.gate("slow").go.set()
        await sent.result()
        stalls.reply.unstall()
        await stalls.result()
