"""The simulation finds nothing in the layer as it is, and plays each seed in one way only."""

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.errors import StoreUnavailable
from tests.simulation.defects import DEFECTS
from tests.simulation.faults import Aimed, StoreFaults
from tests.simulation.plan import plan_of
from tests.simulation.scheduler import Host, SimulationLoop
from tests.simulation.shrink import shrunk

ROOT = Path(__file__).parents[2]


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, whose sets have the same order each time."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.timeout(300)
def test_no_seed_breaks_a_rule() -> None:
    """`scripts/simulate` plays more of them."""
    ran = simulated("--seeds", "40", "--jobs", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.timeout(300)
def test_what_was_found_once_is_not_found_again() -> None:
    ran = simulated("--kept")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.timeout(300)
def test_a_seed_has_the_same_history_in_every_process() -> None:
    """Byte for byte, also if other seeds were played before it."""
    all_of_them = simulated("--seeds", "16", "--digests")
    later_ones = simulated("--seeds", "8", "--from", "8", "--digests")
    assert len(all_of_them.stdout.splitlines()) == 16, all_of_them.stderr
    assert all_of_them.stdout.splitlines()[8:] == later_ones.stdout.splitlines()


def test_a_process_with_another_order_of_sets_refuses() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "1"]
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    assert ran.returncode == 2 and b"PYTHONHASHSEED" in ran.stderr


def test_a_plan_is_shrunk_to_what_fails() -> None:
    """Here a plan fails if one of its clients asks while a store is slow."""

    def fails(plan: dict[str, Any]) -> bool:
        steps = [step for client in plan["clients"] for step in client["steps"]]
        asks = any("ask" in step.get("script", ()) for step in steps)
        return asks and any(fault.get("how") == "slow" for fault in plan["faults"])

    plan = next(plan for plan in map(plan_of, range(10_000)) if fails(plan))
    smallest = shrunk(plan, fails)

    (client,) = smallest["clients"]
    (step,) = client["steps"]
    assert step["script"] == ["ask"]
    assert [fault["how"] for fault in smallest["faults"]] == ["slow"]
    assert fails(smallest)


# --- the scheduler --------------------------------------------------------------------------------


def run(work: Callable[[], Awaitable[None]], *, seed: int = 1, disorder: float = 0.3) -> None:
    loop = SimulationLoop(random.Random(seed), disorder)
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()


async def _counts(taken: list[float]) -> None:
    while True:
        await asyncio.sleep(1)
        taken.append(asyncio.get_running_loop().time())


def test_a_killed_host_takes_no_step() -> None:
    async def work() -> None:
        host, taken = Host("one"), list[float]()
        task = host.starts(_counts(taken))
        await asyncio.sleep(3.5)
        host.kill()
        await asyncio.sleep(10)
        assert len(taken) == 3
        host.resume()
        task.cancel()
        await asyncio.wait({task})

    run(work)


def test_a_paused_host_goes_on_where_it_was() -> None:
    async def work() -> None:
        host, taken = Host("one"), list[float]()
        begun = asyncio.get_running_loop().time()
        task = host.starts(_counts(taken))
        await asyncio.sleep(1.5)
        host.pause()
        await asyncio.sleep(10)
        host.resume()
        await asyncio.sleep(1.5)
        assert [round(at - begun, 1) for at in taken] == [1.0, 11.5, 12.5]
        task.cancel()
        await asyncio.wait({task})

    run(work)


def test_a_seed_decides_which_task_runs_next() -> None:
    def order(seed: int, disorder: float) -> list[int]:
        ran: list[int] = []

        async def one(n: int) -> None:
            await asyncio.sleep(0)
            ran.append(n)

        async def work() -> None:
            await asyncio.gather(*(one(n) for n in range(8)))

        run(work, seed=seed, disorder=disorder)
        return ran

    assert order(1, 0.3) == order(1, 0.3)
    assert len({tuple(order(seed, 0.3)) for seed in range(20)}) > 10
    assert order(1, 0.0) == [*range(8)]


def _never() -> None:
    raise AssertionError("nobody is killed here")


@pytest.mark.parametrize(("how", "had_its_effect"), [("before", False), ("after", True)])
def test_a_store_fails_before_or_after_the_effect(how: str, had_its_effect: bool) -> None:
    done: list[str] = []

    async def effect() -> None:
        done.append("done")

    async def work() -> None:
        faults = StoreFaults(_never, at_calls={1: how})
        await faults.around("append", effect)
        done.clear()
        with pytest.raises(StoreUnavailable):
            await faults.around("append", effect)
        assert bool(done) is had_its_effect

    run(work)


@pytest.mark.parametrize(("how", "had_its_effect"), [("before", False), ("after", True)])
def test_a_process_dies_at_the_call_that_was_aimed_at(how: str, had_its_effect: bool) -> None:
    done: list[str] = []
    host = Host("a replica")

    async def effect() -> None:
        done.append("done")

    async def calls(faults: StoreFaults) -> None:
        await faults.around("read", effect)
        await faults.around("append", effect)
        done.clear()
        await faults.around("append", effect)
        raise AssertionError("it is dead")

    async def work() -> None:
        aimed = Aimed("append", f"kill {how}", skips=1)
        task = host.starts(calls(StoreFaults(host.kill, aimed=[aimed])))
        await aimed.has_hit.wait()
        await asyncio.sleep(1)
        assert host.is_dead and bool(done) is had_its_effect and not task.done()
        host.resume()
        task.cancel()
        await asyncio.wait({task})

    run(work)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["a key that runs elsewhere", "passed on once", "words are proof"])
def test_a_defect_that_is_put_back_is_found(name: str) -> None:
    """`scripts/simulate --defects` puts back all of them."""
    ran = simulated("--defects", name, "--seeds", "1500", "--jobs", "1")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_defect_replaces_what_is_there() -> None:
    """And leaves nothing broken behind."""
    for name, defect in DEFECTS.items():
        before = [getattr(owner, attribute) for owner, attribute, _ in defect.places]
        with defect.put_back():
            broken = [getattr(owner, attribute) for owner, attribute, _ in defect.places]
        after = [getattr(owner, attribute) for owner, attribute, _ in defect.places]
        assert before == after, name
        for one, other in zip(before, broken, strict=True):
            assert one is not other, name
            # Another kind of function would be a defect that nobody had.
            assert iscoroutinefunction(one) == iscoroutinefunction(other), name
