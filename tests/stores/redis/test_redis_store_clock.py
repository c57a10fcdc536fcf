"""Processes that share a store judge by its clock, however theirs are set."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.core.request_keys import Begun, KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.redis.redis_store import RedisStore
from mcp_sessions.stores.shared_clock import FRESH, SharedClock
from mcp_sessions.testing.parts import subscribers_of
from tests.support.redis_server import keys_of, namespace, shared_redis

WRONG = 1_800.0
"""Seconds that a clock is ahead, or behind."""

KEY = KeyUse(RequestKey("key"), b"digest", "process-1")


class Clock:
    def __init__(self, ahead: float = 0) -> None:
        self.ahead = ahead

    def __call__(self) -> float:
        return time.time() + self.ahead


@asynccontextmanager
async def process(own: str, clock: Clock) -> AsyncGenerator[RedisStore]:
    store = RedisStore(shared_redis().url, namespace=own, clock=clock)
    await store.open(SessionPolicy(idle_timeout=1_000, request_key_lifetime=1_000, max_age=1_000))
    try:
        yield store
    finally:
        await store.close()


async def used(store: RedisStore, clock: Clock) -> SessionId:
    """A session with an event, a subscription and a request key that was answered."""
    of = (await store.create(Mode.PROTOCOL, ANONYMOUS, peer=None, now=clock())).session_id
    await store.append(of, Draft(b"x"), now=clock())
    await store.subscribe(of, "note://1")
    await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=clock(), key=KEY)
    await store.finish_request(of, KEY.key, b'"result":{}', now=clock())
    return of


async def check_whole(store: RedisStore, clock: Clock, of: SessionId) -> None:
    """All of it is there, and its deadline is where it belongs."""
    first = await store.head(of)
    assert first is not None
    await store.touch([of], now=clock())
    assert await store.expire(now=clock(), held=(), limit=9) == []
    record = await store.load(of, now=clock())
    assert record is not None and abs(record.life.expires_at - time.time() - 1_000) < 60
    events, refusal = await store.read(of, f"{first.log_epoch}-{0:012d}", now=clock())
    assert (len(events), refusal) == (1, None)
    attached = await store.attach(of, None, now=clock())
    assert attached is not None
    admitted = await store.admit(of, ANONYMOUS, mode=Mode.PROTOCOL, now=clock(), key=KEY)
    assert admitted is not None and admitted.key is Begun.ANSWERED
    assert await subscribers_of(store, "note://1") == [of]
    assert [each.session_id for each in await store.all_sessions()] == [of]


@pytest.mark.redis
@pytest.mark.parametrize("wrong", [WRONG, -WRONG], ids=["ahead", "behind"])
@pytest.mark.parametrize("when", ["from the start", "later"])
async def test_a_process_whose_clock_is_wrong_takes_nothing_from_the_others(
    wrong: float, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends no session, forgets no key and no event, and judges no list; and it says so once."""
    own, right, other = namespace(), Clock(), Clock(wrong if when == "from the start" else 0)
    async with process(own, right) as store, process(own, other) as skewed:
        of = await used(store, right)
        other.ahead = wrong
        with caplog.at_level(logging.WARNING):
            await check_whole(skewed, other, of)
        await check_whole(store, right, of)
        assert caplog.text.count("the store's clock counts") == 1


@pytest.mark.redis
@pytest.mark.parametrize("wrong", [WRONG, -WRONG], ids=["ahead", "behind"])
async def test_what_a_process_with_a_wrong_clock_made_lives_as_long_as_any_other(
    wrong: float,
) -> None:
    """For everybody: no process finds what it is doing left behind by a dead one."""
    own, right, other = namespace(), Clock(), Clock(wrong)
    async with process(own, right) as store, process(own, other) as skewed:
        of = await used(skewed, other)
        await check_whole(store, right, of)
        await check_whole(skewed, other, of)
        right.ahead = other.ahead = wrong + 1_100
        assert await store.expire(now=right(), held=(), limit=9) == []
        assert await skewed.end(of) is not None
        assert await keys_of(store) == []


# --- how a process compares ------------------------------------------------------------------


class Server:
    """What time it is there, and how long it takes to answer."""

    def __init__(self) -> None:
        self.time, self.steady, self.ahead = 1_800_000_000.0, 50.0, 0.0
        self.takes, self.asked, self.is_away = 0.0, 0, False

    async def ask(self) -> float:
        self.asked += 1
        if self.is_away:
            raise StoreUnavailable("it is away")
        self.passes(self.takes / 2)
        answer = self.time
        self.passes(self.takes / 2)
        return answer

    def passes(self, seconds: float) -> None:
        self.time += seconds
        self.steady += seconds

    def wall(self) -> float:
        return self.time + self.ahead

    def clock(self) -> SharedClock:
        return SharedClock(self.ask, self.wall, lambda: self.steady)


@pytest.mark.parametrize("ahead", [-4.9, -0.5, 0, 0.5, 4.9])
@pytest.mark.parametrize("takes", [0, 3.0])
async def test_clocks_that_agree_as_clocks_do_are_not_corrected(ahead: float, takes: float) -> None:
    """Nor is an answer that took long taken for a clock that is wrong."""
    server = Server()
    server.ahead, server.takes = ahead, takes
    assert await server.clock().at(7.0) == 7.0


async def test_it_is_asked_again_when_the_answer_is_old_or_a_clock_jumped() -> None:
    """A process that was stopped, a machine that slept, a clock that was set."""
    server = Server()
    clock = server.clock()
    for _ in range(9):
        await clock.at(0)
        server.passes(FRESH / 10)
    assert server.asked == 1
    server.passes(FRESH)
    await clock.at(0)
    assert server.asked == 2
    # Set: the next thing it says is right.
    server.ahead = 600
    assert abs(await clock.at(server.wall()) - server.time) < 1
    # Slept: nothing but the clocks of others went on.
    server.time += 3_600
    assert abs(await clock.at(server.wall()) - server.time) < 1
    server.ahead = 0
    assert await clock.at(server.wall()) == server.time
    assert server.asked == 5


async def test_a_store_that_does_not_say_what_time_it_is_is_away() -> None:
    """An old comparison is not used for ever."""
    server = Server()
    clock = server.clock()
    await clock.now()
    server.is_away = True
    server.passes(2 * FRESH)
    with pytest.raises(StoreUnavailable):
        await clock.now()
