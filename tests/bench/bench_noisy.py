"""How long a quiet client waits for its answers beside a noisy one, on each store.

    python -m tests.bench.bench_noisy [--rounds N] [--stores memory,sqlite,redis] [--noises …]

Both are clients of one server process, over real sockets. The quiet one makes a trivial call
in its session every few milliseconds, alone and beside each kind of noise by turns, so that
what else the machine does is in both figures. The noisy one stays within its limits: one
client, one thing after the other, as fast as it is served. Its own work (it reads and writes
as much JSON as the server does) is no server's, so that the server has a core of its own, and
on the others the quiet client goes before it.

Ends with status 1 if the quiet client's p99 is more than ``MOST`` times what it is alone, or
if anybody was answered with an error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench.bench_calls import HANDSHAKE, Case, Client, Server
from tests.bench.bench_noise import KINDS
from tests.support.redis_server import redis_server

MOST = 2.0
PAUSE = 0.002
"""Seconds between two calls of the quiet client."""

CALLS = 150
"""Of one turn."""


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""The first is the server's."""


class Noise:
    """A noisy client, and what it did."""

    def __init__(self, kind: str, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bench_noise", kind, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.count = 0
        self.errors = 0
        if self._hear() != ["ready"]:
            raise SystemExit(f"the client that makes {kind} could not begin")

    def go(self) -> None:
        """Make noise."""
        self._say("go")

    def stop(self) -> None:
        """Be quiet."""
        self._say("stop")
        _, count, errors = self._hear()
        self.count += int(count)
        self.errors += int(errors)

    def end(self) -> None:
        """Go."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait(timeout=20)

    def _say(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _hear(self) -> list[str]:
        return self._process.stdout.readline().split() if self._process.stdout is not None else []


class Figures(NamedTuple):
    """Milliseconds until an answer, alone and beside."""

    alone: list[float]
    beside: list[float]
    noise: int
    errors: int

    @property
    def ratio(self) -> float:
        """Of the p99s."""
        return p99(self.beside) / p99(self.alone)


def p99(times: Sequence[float]) -> float:
    """The time that one in a hundred exceeds."""
    return statistics.quantiles(times, n=100)[98]


def waited(client: Client) -> list[float]:
    """Milliseconds until each answer of one turn."""
    times: list[float] = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        client.call()
        times.append((time.perf_counter() - begun) * 1_000)
        time.sleep(PAUSE)
    return times


@contextmanager
def on_cores(cores: Sequence[int]) -> Generator[None]:
    """What is started here runs there, where a system and a machine have that."""
    if len(CORES) < 2:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(kind: str, store: str, rounds: int) -> Figures:
    """The quiet client beside one kind of noise."""
    with on_cores(CORES[:1]):
        server = Server("noisy", store)
    try:
        quiet = Client(Case("", "ours", HANDSHAKE, session=True), server.port)
        noise = Noise(kind, server.port)
        try:
            quiet.wake()
            waited(quiet)
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(rounds):
                quiet.wake()
                alone += waited(quiet)
                noise.go()
                beside += waited(quiet)
                noise.stop()
            return Figures(alone, beside, noise.count, noise.errors)
        finally:
            noise.end()
    finally:
        server.stop()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--stores", default="memory,sqlite,redis")
    parser.add_argument("--noises", default=",".join(KINDS))
    asked = parser.parse_args()
    failed = False
    print(f"ms until a trivial call is answered, {asked.rounds} x {CALLS} calls, alone and beside")
    with (
        tempfile.TemporaryDirectory() as directory,
        on_cores(CORES[1:]),
        redis_server() as redis,
    ):
        for store in asked.stores.split(","):
            for kind in asked.noises.split(","):
                urls = {
                    "memory": "memory://",
                    "sqlite": f"sqlite:///{Path(directory)}/{kind}.db",
                    "redis": f"{redis.url}?namespace={kind}",
                }
                found = measure(kind, urls[store], asked.rounds)
                is_over = found.ratio > MOST or found.errors > 0
                failed = failed or is_over
                alone, beside = statistics.median(found.alone), statistics.median(found.beside)
                print(
                    f"  {store:<7} {kind:<10}   p50 {alone:6.2f} {beside:6.2f}"
                    f"   p99 {p99(found.alone):6.2f} {p99(found.beside):6.2f}"
                    f"   {found.ratio:5.2f} x   {found.noise:6} of it, {found.errors} errors"
                    f"{'   TOO MUCH' if is_over else ''}",
                    flush=True,
                )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
