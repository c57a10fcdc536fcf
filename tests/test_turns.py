"""A few go on in each turn of the event loop."""

import asyncio
from itertools import pairwise

import pytest

from mcp_sessions.turns import Steps, Turns


class Many:
    """Those who come together, each with its number; who went on, turn by turn."""

    def __init__(self, turns: Turns, count: int) -> None:
        self.continued: list[int] = []
        self.tasks = [asyncio.create_task(self._one(turns, number)) for number in range(count)]

    async def _one(self, turns: Turns, number: int) -> None:
        await turns.take()
        self.continued.append(number)

    async def counts(self) -> list[int]:
        """How many had gone on after each turn, until all have."""
        found: list[int] = []
        while not all(task.done() for task in self.tasks):
            await asyncio.sleep(0)
            found.append(len(self.continued))
        return found


async def test_of_many_who_come_together_a_few_continue_in_each_turn() -> None:
    many = Many(Turns(10), 95)
    counts = await many.counts()
    assert many.continued == list(range(95))
    assert max(b - a for a, b in zip([0, *counts], counts, strict=False)) <= 10


async def test_who_comes_alone_does_not_wait() -> None:
    """Also the next one, some time later."""
    turns = Turns(1)
    for _ in range(3):
        step = turns.take()
        with pytest.raises(StopIteration):
            step.send(None)
        await asyncio.sleep(0)


async def test_who_is_cancelled_takes_no_turn_from_another() -> None:
    many = Many(Turns(1), 30)
    await asyncio.sleep(0)
    for task in many.tasks[5:25]:
        task.cancel()
    counts = await many.counts()
    assert many.continued == [*range(5), *range(25, 30)]
    # None of them was waited for.
    assert len(counts) <= 15


def test_what_waited_in_a_loop_that_has_ended_keeps_nobody_waiting() -> None:
    turns = Turns(1)

    async def come() -> None:
        first, second = (asyncio.create_task(turns.take()) for _ in range(2))
        await first
        assert not second.done()

    async def come_alone() -> None:
        async with asyncio.timeout(5):
            await turns.take()

    asyncio.run(come())
    asyncio.run(come_alone())


async def test_steps_of_several_are_done_in_turn() -> None:
    """A few in each turn of the event loop; who goes on comes last."""
    steps, done = Steps(2), list[str]()
    left = {"a": 3, "b": 1, "c": 2}

    def step(name: str) -> bool:
        done.append(name)
        left[name] -= 1
        return left[name] > 0

    for name in left:
        steps.add(lambda name=name: step(name))
    counts = [len(done)]
    while any(left.values()):
        await asyncio.sleep(0)
        counts.append(len(done))

    assert done == ["a", "b", "c", "a", "c", "a"]
    assert max(after - before for before, after in pairwise(counts)) == 2
