"""The common part of the fuzzers, and the loop that runs one.

A round sends hostile input through one door and owes three things (`tests.fuzz.watching` sees
the first and the last):

1. Nothing failed unseen: no traceback, no task that died.
2. Every request that can be identified was answered, or its connection ended, within `WITHIN`
   seconds; and so was a client next to it that does nothing wrong.
3. Nothing grew, and nothing is left when the door is closed.

A round is drawn from the fuzzer's name, the seed and its own number. Nothing else decides what it
sends, so that these three reproduce it.
"""

import asyncio
import itertools
import re
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, cast

import anyio

from tests.fuzz.hostile import Hostile
from tests.fuzz.known import known
from tests.fuzz.watching import Counts, Handles, Watch

WITHIN = 15.0
"""Seconds in which an answer comes on a busy machine."""

WARM = 30
"""Rounds after which what there is is counted first: by then everything was used once."""

SETTLES = 20.0
"""Seconds in which what expires has expired."""

MANY = 20
"""Findings with which a run ends."""


class Door(Protocol):
    """A layer that runs, and the way to its door."""

    async def play(self, hostile: Hostile) -> None:
        """Send what one round sends; return when everything that is due has come.

        Raises:
            AssertionError: Something has not.
        """
        ...

    async def expect_served(self) -> None:
        """A client that does nothing wrong is answered.

        Raises:
            AssertionError: It is not.
        """
        ...


@dataclass(frozen=True)
class Fuzzer:
    """One door, and how to open it."""

    name: str
    open: Callable[[], AbstractAsyncContextManager[Door]]


@dataclass(frozen=True)
class Finding:
    fuzzer: str
    seed: int
    round: int
    text: str

    @property
    def kind(self) -> str:
        """The same for findings that are one fault, mostly."""
        lines = self.text.strip().splitlines()
        return re.sub(r"0x\w+|\d+", "N", f"{lines[0]:.120} {lines[-1]:.120}")

    def __str__(self) -> str:
        again = f"python -m tests.fuzz --only {self.fuzzer} --seed {self.seed}"
        return f"{self.text}\nagain: {again} --round {self.round}"


@dataclass
class Report:
    fuzzer: str
    seed: int
    rounds: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    """One of each kind."""

    known: Counter[str] = field(default_factory=Counter[str])
    """How often which of the faults of `tests.fuzz.known` was found."""

    before: Counts | None = None
    after: Counts | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.fuzzer}: seed {self.seed}, {self.rounds} rounds, "
            f"{len(self.findings)} findings; before: {self.before}; after: {self.after}"
        ]
        lines += [f"known, {count} times: {what}" for what, count in self.known.items()]
        return "\n".join([*lines, *(f"--- {finding}" for finding in self.findings)])

    def add(self, number: int, text: str) -> None:
        """Keep a finding, if it is not known, and there is none of its kind yet."""
        is_known = known(self.fuzzer, text)
        if is_known is not None:
            self.known[is_known] += 1
            return
        finding = Finding(self.fuzzer, self.seed, number, text)
        if finding.kind not in {known.kind for known in self.findings}:
            self.findings.append(finding)


def described(failed: BaseException) -> str:
    """The error of a round: the words of a broken rule, or the line of any other exception."""
    if isinstance(failed, BaseExceptionGroup):
        parts = cast("BaseExceptionGroup[BaseException]", failed).exceptions
        return "\n".join(map(described, parts))
    if isinstance(failed, AssertionError):
        return str(failed)
    return "".join(traceback.format_exception(failed))


async def run(
    fuzzer: Fuzzer, seed: int, continues: Callable[[int], bool], *, first: int = 0
) -> Report:
    """Play rounds.

    Args:
        continues: Whether there is one more, after so many.
        first: The number of the first one.
    """
    report, watch = Report(fuzzer.name, seed), Watch()
    with watch.watching():
        while continues(report.rounds) and len(report.findings) < MANY:
            begun = first + report.rounds
            try:
                async with _empty_afterwards(fuzzer) as door:
                    await _rounds(door, report, watch, continues, first)
            except Exception as failed:
                number = first + report.rounds - 1
                report.add(max(number, begun), described(failed))
            for seen in watch.taken():
                report.add(max(first + report.rounds - 1, begun), f"as the door was closed: {seen}")
    return report


async def _rounds(
    door: Door, report: Report, watch: Watch, continues: Callable[[int], bool], first: int
) -> None:
    """Play until the end, or until there is a finding: then the next door is a new one."""
    found_before = len(report.findings)
    report.before = None
    for number in itertools.count():
        if not continues(report.rounds):
            break
        at = first + report.rounds
        report.rounds += 1
        is_well = True
        try:
            hostile = Hostile(Random(f"{report.fuzzer} {report.seed} {at}"))
            async with asyncio.timeout(4 * WITHIN):
                await door.play(hostile)
                await door.expect_served()
        except Exception as failed:
            report.add(at, described(failed))
            is_well = False
        for seen in watch.taken():
            report.add(at, seen)
        if not is_well or len(report.findings) > found_before:
            return
        if number == WARM:
            report.before = Counts.now()
    if report.before is not None:
        report.after = await _settled(report.before)
        for grown in report.after.grown_from(report.before):
            report.add(first + report.rounds - 1, grown)


async def _settled(before: Counts) -> Counts:
    """The counts, once they are no more than before, or after `SETTLES` seconds."""
    until = asyncio.get_running_loop().time() + SETTLES
    while (now := Counts.now()).grown_from(before):
        if asyncio.get_running_loop().time() > until:
            break
        # Nothing says when the last thing has expired.
        await asyncio.sleep(0.25)
    return now


@asynccontextmanager
async def _empty_afterwards(fuzzer: Fuzzer) -> AsyncGenerator[Door]:
    """The open door; afterwards none of its tasks, files and processes is left."""
    before = Handles.now()
    async with fuzzer.open() as door:
        yield door
    left: list[str] = []
    with anyio.move_on_after(SETTLES):
        # Nothing says when the last connection is closed.
        while left := _left(before):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not left, f"left after the door was closed: {left}"


def _left(before: Handles) -> list[str]:
    now = Handles.now()
    names = ("tasks", "files", "processes")
    counted = [(name, getattr(before, name), getattr(now, name)) for name in names]
    return [f"{name}: {had}, then {has}" for name, had, has in counted if has > had]
