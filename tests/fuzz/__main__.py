"""All fuzzers in turn, for as long as you say.

    python -m tests.fuzz --seconds N [--seed S] [--only NAME]… [--round K]

Each turn of a fuzzer takes up to a minute and has its own seed: S, S+1, and so on. It prints a line
for each turn: the seed, the rounds, the findings, and what there was before and after (memory,
objects, tasks, files, processes). A finding ends with the command that plays it again. With
``--round`` only that round of seed S is played. The status is 1 if there was a finding.
"""

import argparse
import asyncio
import itertools
import sys
import time

from tests.fuzz.fuzzer import Fuzzer, Report, run
from tests.fuzz.fuzzers import FUZZERS

TURN = 60.0
"""Seconds."""


def turn(fuzzer: Fuzzer, seed: int, until: float) -> Report:
    return asyncio.run(run(fuzzer, seed, lambda _: time.monotonic() < until))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    names = [fuzzer.name for fuzzer in FUZZERS]
    parser.add_argument("--seconds", type=float, default=60.0, help="in all; 60")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first; any")
    parser.add_argument("--only", action="append", choices=names, help="one fuzzer, or several")
    parser.add_argument("--round", type=int, help="play this round of the seed, and no other")
    given = parser.parse_args(arguments)
    chosen = [fuzzer for fuzzer in FUZZERS if given.only is None or fuzzer.name in given.only]
    if given.round is not None:
        reports = [
            asyncio.run(run(fuzzer, given.seed, lambda rounds: rounds < 1, first=given.round))
            for fuzzer in chosen
        ]
        print(*reports, sep="\n")
        return int(any(report.findings for report in reports))
    end = time.monotonic() + given.seconds
    share = min(TURN, given.seconds / len(chosen))
    found = 0
    for number in itertools.count():
        fuzzer = chosen[number % len(chosen)]
        seed = given.seed + number // len(chosen)
        if time.monotonic() >= end:
            break
        report = turn(fuzzer, seed, min(end, time.monotonic() + share))
        print(time.strftime("%H:%M:%S"), report, flush=True)
        found += len(report.findings)
    print(f"{found} findings", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
