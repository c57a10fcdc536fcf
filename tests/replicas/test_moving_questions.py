"""A command asks while its client's calls end or lose their responses, and messages between
replicas take their time.

The process is at the first replica, and the calls came at others. Of which of them a question is,
nothing says. It has one id, is put once to who hears it, and its answer reaches its handler.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.simulation.history import History
from tests.simulation.programs import Command
from tests.simulation.scheduler import Host
from tests.support.raw import Json, RawClient, Sent, at_most, in_session
from tests.support.replicas import Cluster, cluster
from tests.support.world import Toolbox

pytestmark = pytest.mark.in_process

SOON = 30.0
WAYS = (0.0, 0.02, 0.2, 1.0)
"""Seconds that a message between replicas takes."""


class Caller:
    """One session, whose process is at the first replica."""

    def __init__(self, c: Cluster, client: RawClient, meta: Json) -> None:
        self.c, self.client, self.meta = c, client, meta

    def at(self, number: int) -> RawClient:
        return self.c.at(number, self.client)

    def call(self, number: int, *script: str) -> Sent:
        mark = f"{number} {' '.join(script)}"
        return self.at(number).call("work", meta=self.meta, mark=mark, script=list(script))


@asynccontextmanager
async def caller(way: float) -> AsyncGenerator[tuple[Caller, History]]:
    command, history = Command(), History()
    with command.installed(history):
        made = command.make(history, Host("one for all"))
        async with cluster(3, server=lambda: (Toolbox(), made.server)) as c:
            client = await c[0].connected(capabilities={"elicitation": {}})
            meta = in_session((await client.start())["sessionId"])
            own = Caller(c, client, meta)
            await own.call(0).result()
            c.backplane.way = way
            yield own, history


def asked(*calls: Sent) -> list[Json]:
    return [m for call in calls for m in call.reply.messages if "method" in m]


def ids(*calls: Sent) -> set[str]:
    return {m["id"] for m in asked(*calls)}


async def answers(own: Caller, history: History, at: int, waits: Sent, *others: Sent) -> None:
    """The question that stands there is answered, and its handler gets the answer."""
    question = asked(waits, *others)[0]
    value = {"action": "accept", "content": {"answer": "yes"}}
    await own.at(at).respond(question, value)
    await at_most(SOON, waits.result())
    assert [told.get("value") for told in history.of("told")] == ["yes"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ends_at", ["0.0", "0.001", "0.1", "0.3", "1.5"])
async def test_a_question_keeps_its_id_and_place_as_another_call_at_its_replica_ends(
    way: float, ends_at: str
) -> None:
    async with caller(way) as (own, history):
        asks = own.call(1, "ask")
        other = own.call(1, "wait:9")
        newest = own.call(1, f"wait:{ends_at}")
        await asyncio.sleep(8)
        assert newest.reply.ended
        assert len(ids(asks, other, newest)) == 1
        await answers(own, history, 1, asks, other, newest)


@pytest.mark.parametrize("way", WAYS)
async def test_a_question_keeps_its_id_as_it_moves_to_another_replica(way: float) -> None:
    async with caller(way) as (own, history):
        asks = own.call(1, "wait:0.1", "ask")
        newest = own.call(2, "wait:0.2")
        await asyncio.sleep(8)
        assert newest.reply.ended
        assert [m["method"] for m in asked(asks)] == ["elicitation/create"]
        assert {m["method"] for m in asked(newest)} <= {"elicitation/create"}
        assert len(ids(asks, newest)) == 1
        await answers(own, history, 1, asks)


@pytest.mark.parametrize("way", WAYS)
async def test_who_loses_a_response_is_asked_on_another_one(way: float) -> None:
    async with caller(way) as (own, history):
        asks = own.call(1, "wait:0.1", "ask")
        newest = own.call(1, "wait:60")
        await asyncio.sleep(0.05)
        newest.reply.leave()
        await asyncio.sleep(8)
        await answers(own, history, 1, asks)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_question_ends_with_the_calls_that_it_may_be_about(number: int) -> None:
    """A call that began after it is not its cause."""
    async with caller(0.02) as (own, _):
        causes = [own.call(number, "ask"), own.call(number, "wait:9")]
        await asyncio.sleep(1)
        assert len(ids(*causes)) == 1
        later = own.call(number, "wait:20")
        await asyncio.sleep(1)
        for each in causes:
            await own.client.notify("notifications/cancelled", {"requestId": each.id})
        await at_most(SOON, later.result())
        assert asked(later) == []
