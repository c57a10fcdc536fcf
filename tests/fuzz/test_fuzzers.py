"""Each fuzzer for some seconds; and that it sees what it is there to see."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from mcp_sessions import background
from tests.fuzz import fuzzer
from tests.fuzz.__main__ import main
from tests.fuzz.fuzzer import Fuzzer, run
from tests.fuzz.fuzzers import FUZZERS
from tests.fuzz.hostile import Hostile

SEED = 1
"""The same in every run; ``python -m tests.fuzz`` has others."""

on_every_door = pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.redis] if each.name == "redis" else [])
        for each in FUZZERS
    ],
)


def expect_nothing(each: Fuzzer, seconds: float, rounds: int) -> None:
    until = time.monotonic() + seconds

    def continues(done: int) -> bool:
        return done < rounds and time.monotonic() < until

    report = asyncio.run(run(each, SEED, continues))
    assert report.rounds > 0 and not report.findings, str(report)


@on_every_door
def test_a_door_withstands_what_is_sent_for_some_seconds(each: Fuzzer) -> None:
    expect_nothing(each, seconds=3, rounds=60)


@pytest.mark.full
@pytest.mark.timeout(180)
@on_every_door
def test_a_door_withstands_what_is_sent_for_longer_and_nothing_grows(each: Fuzzer) -> None:
    expect_nothing(each, seconds=15, rounds=1_000_000)


# --- the rules, each broken ------------------------------------------------------------------


class Broken:
    """A door behind which something is wrong."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.kept: list[object] = []
        self._is_served = True

    async def play(self, hostile: Hostile) -> None:
        match self._what:
            case "traceback":
                try:
                    raise ValueError("wrong")
                except ValueError:
                    logging.getLogger("any").warning("it failed", exc_info=True)
            case "task":
                loop = asyncio.get_running_loop()
                handler = loop.get_exception_handler()
                assert handler is not None
                # Past what looks for that in all tests.
                handler(loop, {"message": "a task died"})
            case "work":
                logging.getLogger(background.__name__).error("%s: it failed", "work")
            case "unanswered":
                raise AssertionError("unanswered: b'x'")
            case "hangs":
                await asyncio.Event().wait()
            case "beside":
                self._is_served = False
            case "growth":
                self.kept.append(bytearray(8_000_000))
            case "left":
                self.kept.append(asyncio.create_task(asyncio.sleep(5)))
            case _:
                pass

    async def expect_served(self) -> None:
        assert self._is_served, "a client beside it is refused"


BROKEN = {
    "traceback": "ValueError: wrong",
    "task": "a task died",
    "work": "work: it failed",
    "unanswered": "unanswered: b'x'",
    "hangs": "TimeoutError",
    "beside": "a client beside it is refused",
    "growth": "growth: memory",
    "left": "left after the door was closed: ['tasks: 1, then",
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.fails_in_background("work")])
        if what == "work"
        else what
        for what in BROKEN
    ],
)
def test_what_is_broken_is_found_and_can_be_played_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "WITHIN", 0.05)
    monkeypatch.setattr(fuzzer, "SETTLES", 0.05)
    monkeypatch.setattr(fuzzer, "WARM", 0)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Broken]:
        yield Broken(what)

    broken = Fuzzer("broken", opened)

    report = asyncio.run(run(broken, 7, lambda rounds: rounds < 12, first=3))

    assert len(report.findings) == 1, str(report)
    assert BROKEN[what] in report.findings[0].text
    assert f"--only broken --seed 7 --round {report.findings[0].round}" in str(report)


def test_a_door_that_is_well_has_no_findings() -> None:
    @asynccontextmanager
    async def opened() -> AsyncGenerator[Broken]:
        yield Broken("nothing")

    report = asyncio.run(run(Fuzzer("well", opened), 7, lambda rounds: rounds < 50))

    assert (report.rounds, report.findings) == (50, [])
    assert report.before is not None and report.after is not None


def test_a_round_is_drawn_from_the_name_the_seed_and_its_number() -> None:
    drawn: list[bytes] = []

    class Noting(Broken):
        async def play(self, hostile: Hostile) -> None:
            drawn.append(hostile.spoiled({"a": [1, 2, {"b": "c"}]}) + hostile.damaged(b"x" * 99))

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Broken]:
        yield Noting("nothing")

    for seed, first, rounds in ((1, 0, 8), (1, 5, 1), (2, 5, 1)):
        asyncio.run(run(Fuzzer("a", opened), seed, rounds.__gt__, first=first))

    assert drawn[8] == drawn[5]
    assert drawn[9] != drawn[5]


def test_the_command_plays_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "http", "--seed", "3", "--round", "5"]) == 0
    assert "http: seed 3, 1 rounds, 0 findings" in capsys.readouterr().out
