"""The client that tries an address that is away, the time, and how fast the others follow."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.scouting import OVERDUE, RATE, ScoutedAddress, ScoutedAddresses
from tests.support.virtual_time import VIRTUAL, Backend, VirtualTimeLoop

POLICY = ReconnectPolicy()


@pytest.fixture
def anyio_backend() -> Backend:
    """Time passes when nothing else can happen."""
    return VIRTUAL


@dataclass
class Outage:
    """Clients that are cut in the same moment, and an address that answers again at a time."""

    seconds: float
    draw: Callable[[], float]
    hangs: float = 0.0
    """Seconds that a failing attempt takes."""

    scouted: ScoutedAddress = field(default_factory=ScoutedAddress)
    tries: list[float] = field(default_factory=list[float])
    """When clients tried in vain."""

    back: list[float] = field(default_factory=list[float])
    """How long after the server each client was."""

    async def come_back(self) -> None:
        began = anyio.current_time()
        delay = POLICY.backoff_base * self.draw()
        while True:
            await self.scouted.first_turn(delay, clock=anyio.current_time, draw=self.draw)
            now = anyio.current_time() - began
            if now >= self.seconds:
                self.scouted.answered(now=anyio.current_time())
                self.back.append(now - self.seconds)
                return
            self.tries.append(now)
            tried_at = anyio.current_time()
            await anyio.sleep(self.hangs)
            now = anyio.current_time()
            self.scouted.failed(now=now, random=self.draw(), policy=POLICY, began=tried_at)
            delay = 0.0

    async def all_come_back(self, clients: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(clients):
                tasks.start_soon(self.come_back)


def most_in_a_second(times: list[float]) -> int:
    return max((sum(start <= time < start + 1 for time in times) for start in times), default=0)


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [1.0, 2.0, 4.0, 12.0, 30.0])
@pytest.mark.parametrize("clients", [1, 10])
async def test_a_client_is_back_within_a_second(seconds: float, clients: int) -> None:
    for seed in range(20):
        outage = Outage(seconds, random.Random(seed).random)
        await outage.all_come_back(clients)
        assert len(outage.back) == clients
        assert max(outage.back) <= 1.0


@pytest.mark.anyio
async def test_after_a_minute_most_are_back_within_a_second_and_all_within_two() -> None:
    back: list[float] = []
    for seed in range(50):
        outage = Outage(60, random.Random(seed).random)
        await outage.all_come_back(10)
        back += outage.back
    back.sort()
    assert back[len(back) // 2] <= 1.0
    assert back[-1] <= 2.0


@pytest.mark.anyio
async def test_a_thousand_clients_try_no_more_often_than_one_does() -> None:
    """But for the first attempts after the loss, which are spread."""
    alone, crowd = (Outage(60, random.Random(1).random) for _ in range(2))
    await alone.all_come_back(1)
    await crowd.all_come_back(1_000)
    later = [time for time in crowd.tries if time > 1_000 / RATE + 1]
    assert most_in_a_second(later) <= 2 * most_in_a_second(alone.tries)
    assert most_in_a_second(crowd.tries) <= RATE


@pytest.mark.anyio
async def test_a_thousand_clients_follow_at_a_bounded_rate() -> None:
    outage = Outage(12, random.Random(2).random)
    await outage.all_come_back(1_000)
    assert len(outage.back) == 1_000
    assert most_in_a_second(outage.back) <= 1.3 * RATE
    assert max(outage.back) <= 1_000 / RATE + 1.0


@pytest.mark.anyio
async def test_clients_that_are_cut_without_an_outage_are_spread_as_well() -> None:
    """CLI2."""
    outage = Outage(0, random.Random(3).random)
    await outage.all_come_back(1_000)
    assert most_in_a_second(outage.back) <= 1.6 * RATE


@pytest.mark.anyio
async def test_a_client_whose_attempt_hangs_does_not_hold_up_the_next() -> None:
    outage = Outage(8, random.Random(4).random, hangs=10)
    outage.scouted.failed(now=anyio.current_time(), random=0.5, policy=POLICY)
    await outage.all_come_back(20)
    first, second = sorted(outage.tries)[:2]
    assert second - first <= OVERDUE + 0.01
    assert min(outage.back) <= OVERDUE + 0.5


@pytest.mark.anyio
async def test_whoever_asks_for_a_rest_is_left_alone_by_all() -> None:
    scouted, tried = ScoutedAddress(), list[float]()
    began = anyio.current_time()
    scouted.failed(now=began, random=0.0, policy=POLICY, rest=7.0)

    async def client() -> None:
        await scouted.turn(clock=anyio.current_time, draw=lambda: 0.0)
        tried.append(anyio.current_time() - began)
        scouted.answered(now=anyio.current_time())

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(client)
    assert min(tried) == pytest.approx(7.0)
    assert max(tried) <= 7.3


@pytest.mark.anyio
async def test_a_client_that_leaves_the_line_does_not_hold_it_up() -> None:
    scouted, tried = ScoutedAddress(), list[str]()
    scouted.failed(now=anyio.current_time(), random=1.0, policy=POLICY)

    async def client(name: str) -> None:
        await scouted.turn(clock=anyio.current_time, draw=lambda: 0.0)
        tried.append(name)

    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.1):
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(client, "gone")
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(client, "stays")
                await anyio.sleep_forever()
    assert tried == ["stays"]


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.floats(0, 90),
    clients=st.integers(1, 40),
    hangs=st.sampled_from([0.0, 0.3, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_every_client_comes_back_whatever_the_order(
    seconds: float, clients: int, hangs: float, seed: int
) -> None:
    """No outage, no number of clients and no slow attempt leaves one in the line for ever."""
    outage = Outage(seconds, random.Random(seed).random, hangs=hangs)
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(outage.all_come_back(clients))
    finally:
        loop.close()
    assert len(outage.back) == clients
    assert max(outage.back) <= OVERDUE + seconds / 80 + hangs + 1.5


def test_an_address_is_forgotten_when_nobody_uses_it() -> None:
    """So that a process that talks to ever other servers does not grow."""
    scouted_addresses = ScoutedAddresses()
    first = scouted_addresses.address_of("http://one/mcp", now=0)
    assert scouted_addresses.address_of("http://one/mcp", now=30) is first
    assert scouted_addresses.address_of("http://one/mcp", now=60) is first
    scouted_addresses.address_of("http://two/mcp", now=200)
    assert scouted_addresses.address_of("http://one/mcp", now=200) is not first
