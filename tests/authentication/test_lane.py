"""Questions to a service, shared among the addresses that ask."""

import asyncio
import random

from mcp_sessions.authentication.verdicts import GaveWay, Lane, Place


class Service:
    """Answers each question after a second, and notes who asked."""

    def __init__(self, **bounds: int) -> None:
        given = {"at_once": 4, "of_one": 2, "waiting": 10, **bounds}
        self.lane = Lane(**given)
        self.asked: list[str] = []
        self.gave_way: list[str] = []
        self.open = self.most_open = 0

    async def _ask(self, place: Place, who: str) -> None:
        try:
            async with self.lane.turn(place):
                self.asked.append(who)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await asyncio.sleep(1)
                finally:
                    self.open -= 1
        except GaveWay:
            self.gave_way.append(who)

    def come(self, who: str, count: int = 1) -> list[asyncio.Task[None]]:
        """Ask so many questions at once from the address of the first letter."""
        tasks: list[asyncio.Task[None]] = []
        for _ in range(count):
            try:
                place = self.lane.enter(who[0])
            except GaveWay:
                self.gave_way.append(who)
                continue
            tasks.append(asyncio.create_task(self._ask(place, who)))
        return tasks


async def done(*tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*(each for some in tasks for each in some), return_exceptions=True)


async def test_one_address_leaves_room_for_another() -> None:
    service = Service()
    tasks = service.come("a", 12)
    other = service.come("b")
    await asyncio.sleep(0.5)
    assert service.asked == ["a", "a", "b"]
    await done(tasks, other)
    assert service.most_open == 3


async def test_addresses_take_turns_however_many_questions_one_has() -> None:
    service = Service(at_once=1, of_one=1, waiting=100)
    await done(service.come("a", 4), service.come("b", 2), service.come("c", 1))
    assert service.asked == [*"aabcaba"]


async def test_who_has_most_loses_its_newest_first() -> None:
    """A flood of one address was refused together with everybody else."""
    service = Service()
    flood = service.come("a", 1_000)
    assert service.gave_way == ["a"] * (1_000 - 2 - 10)
    others = [service.come(who) for who in "bcd"]
    few = service.come("e", 2)
    await done(flood, *others, few)
    assert set(service.gave_way) == {"a"}
    assert all(who in service.asked for who in "bcde")


async def test_where_all_have_as_much_the_newest_is_refused() -> None:
    service = Service(at_once=2, of_one=1, waiting=3)
    busy = [service.come(who) for who in "abcde"]
    assert service.come("f") == [] and service.gave_way == ["f"]
    await done(*busy)
    assert sorted(service.asked) == [*"abcde"]


async def test_questions_that_are_given_up_leave_their_places() -> None:
    """While they wait, and while they ask."""
    service = Service(at_once=2, of_one=2, waiting=20)
    for seed in range(20):
        tasks = [task for who in "abc" for task in service.come(who, 5)]
        chosen = random.Random(seed)
        await asyncio.sleep(0)
        for task in chosen.sample(tasks, 10):
            task.cancel()
            await asyncio.sleep(chosen.choice([0, 0.5, 1]))
        await done(tasks)
    service.asked.clear()
    tasks = service.come("z", 22)
    assert len(tasks) == 22 and not service.gave_way
    await done(tasks)
    assert service.asked == ["z"] * 22 and service.open == 0
