"""How long a quiet client waits for its answers next to a noisy one, on each store.

    python -m bench.bench_noisy [--rounds N] [--stores memory,sqlite,redis] [--noises …]

Both are clients of one server process, over real sockets. The quiet client makes a trivial call in
its session every few milliseconds. The noisy client makes one request after the other, as fast as
it gets answers, and stays within its limits. The quiet client is measured alone and with the noise
by turns, so other work of the machine is in both figures. The server has a core of its own. On the
other cores the quiet client has priority over the noisy one.

The figure is the p99 of the quiet client with the noise. The aim is twice its p99 alone, and no
client gets an error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from bench.bench_calls import HANDSHAKE, Case, Client, Server
from bench.bench_noise import KINDS
from bench.rows import Row, report
from bench.stores import STORES, stores

MOST = 2.0
PAUSE = 0.002
"""Seconds between two calls of the quiet client."""

CALLS = 150
"""Calls of one turn."""


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""The first is the server's."""


class Noise:
    def __init__(self, kind: str, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.bench_noise", kind, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.count = 0
        self.errors = 0
        if self._receive() != ["ready"]:
            raise SystemExit(f"the client that makes {kind} could not begin")

    def go(self) -> None:
        self._say("go")

    def stop(self) -> None:
        self._say("stop")
        _, count, errors = self._receive()
        self.count += int(count)
        self.errors += int(errors)

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait(timeout=20)

    def _say(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _receive(self) -> list[str]:
        return self._process.stdout.readline().split() if self._process.stdout is not None else []


class Figures(NamedTuple):
    """Milliseconds until an answer, alone and with the noise."""

    alone: list[float]
    with_noise: list[float]
    noise: int
    errors: int


def p99(times: Sequence[float]) -> float:
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
    with on_cores(CORES[:1]):
        server = Server("noisy", store)
    try:
        quiet = Client(Case("", "ours", HANDSHAKE, session=True), server.port)
        noise = Noise(kind, server.port)
        try:
            quiet.wake()
            waited(quiet)
            alone: list[float] = []
            with_noise: list[float] = []
            for _ in range(rounds):
                quiet.wake()
                alone += waited(quiet)
                noise.go()
                with_noise += waited(quiet)
                noise.stop()
            return Figures(alone, with_noise, noise.count, noise.errors)
        finally:
            noise.end()
    finally:
        server.stop()


def rows(wanted: str, noises: Sequence[str], rounds: int) -> Iterator[Row]:
    with on_cores(CORES[1:]), stores(wanted) as each:
        for store in each.names:
            for kind in noises:
                found = measure(kind, each.url(store, kind), rounds)
                alone, with_noise = p99(found.alone), p99(found.with_noise)
                yield Row(
                    name=f"{store}, with {kind}: p99",
                    measured=with_noise,
                    unit="ms",
                    ratio=with_noise / alone,
                    basis="times the p99 alone",
                    most=MOST * alone,
                    includes=f"noise: {KINDS[kind]}; half of the answers take "
                    f"{statistics.median(found.alone):.2f} ms alone, "
                    f"{statistics.median(found.with_noise):.2f} ms with the noise",
                )
                if found.errors:
                    yield Row(
                        name=f"{store}, {kind}: errors",
                        measured=found.errors,
                        most=0,
                        includes=f"of {found.noise}",
                    )
        yield from each.missing()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--stores", default=STORES)
    parser.add_argument("--noises", default=",".join(KINDS))
    asked = parser.parse_args()
    report(rows(asked.stores, asked.noises.split(","), asked.rounds))


if __name__ == "__main__":
    main()
