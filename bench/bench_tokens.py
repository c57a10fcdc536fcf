"""What a token costs that was seen before, and how a good client fares next to many bad tokens.

    python -m bench.bench_tokens [--calls N] [--rounds N] [--connections N,…]

The cost is the server's CPU for each call with a JWT, next to a server without authentication.
Rounds alternate between the two. The aim: at most 15 % more.

The flood is made by a process on another core. Each of its connections sends one bad token after
the other. Each token has the shape of a good one, and a wrong signature. With many connections it
sends more than the server can refuse, and the server lets these answers wait. The aim: the p99 of a
good client is at most twice what it is alone, and the server keeps nothing of the bad tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from bench.bench_calls import HANDSHAKE, Case, Client, Server
from bench.bench_noisy import CORES, MOST, on_cores, p99, waited
from bench.rows import Row, report
from tests.support.issuers import Login, jwk
from tests.support.world import Clock

TOKENS = 100_000
"""Bad tokens that are different. Then they come again."""

LARGER = 20.0
"""MB by which the server may be larger after a flood."""


def good_token() -> str:
    now = time.time()
    return Login(Clock(now)).token("P-256", exp=int(now) + 86_400)


def bad_tokens() -> Generator[str]:
    claims = good_token().rpartition(".")[0]
    while True:
        yield f"{claims}.{secrets.token_urlsafe(64)}"


def guarded() -> Server:
    return Server("guarded", json.dumps({"keys": [jwk("P-256", "one")]}))


def resident(server: Server) -> float:
    """MB of the server's memory."""
    with open(f"/proc/{server.process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1_000_000


class Flood:
    def __init__(self, port: int, connections: int, path: str) -> None:
        command = [sys.executable, "-m", "bench.flood", str(port), str(connections), path]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answers = 0
        self.seconds = 0.0
        if self._line() != "ready":
            raise SystemExit("the flood could not begin")

    def go(self) -> None:
        self._say("go")

    def stop(self) -> None:
        self._say("stop")
        answers, seconds = self._line().split()
        self.answers += int(answers)
        self.seconds += float(seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def file_of_bad_tokens() -> Generator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".tokens") as file:
        tokens = bad_tokens()
        file.writelines(f"{next(tokens)}\n" for _ in range(TOKENS))
        file.flush()
        yield file.name


def cost(calls: int, rounds: int) -> Row:
    case = Case("", "ours", HANDSHAKE)
    servers = {"alone": Server("ours"), "token": guarded()}
    try:
        clients = {
            "alone": Client(case, servers["alone"].port),
            "token": Client(case, servers["token"].port, token=good_token()),
        }
        spent: dict[str, list[float]] = {name: [] for name in servers}
        for client in clients.values():
            client.wake()
            for _ in range(300):
                client.call()
        for _ in range(rounds):
            for name, client in clients.items():
                client.wake()
                before = servers[name].cpu()
                for _ in range(calls):
                    client.call()
                spent[name].append((servers[name].cpu() - before) / calls * 1_000_000)
    finally:
        for server in servers.values():
            server.stop()
    alone, token = (statistics.median(spent[name]) for name in ("alone", "token"))
    return Row(
        name="a call with a token that was seen before",
        measured=token,
        unit="µs",
        ratio=token / alone,
        basis="times one without authentication",
        most=1.15 * alone,
    )


def basis(connections: int, rounds: int, path: str) -> Iterator[Row]:
    """A good client next to bad tokens on so many connections."""
    with on_cores(CORES[:1]):
        server = guarded()
    try:
        client = Client(Case("", "ours", HANDSHAKE), server.port, token=good_token())
        flood = Flood(server.port, connections, path)
        try:
            client.wake()
            waited(client)
            alone, with_bad = list[float](), list[float]()
            before = resident(server)
            for _ in range(rounds):
                client.wake()
                alone += waited(client)
                flood.go()
                # In the first second the server refuses as many at once as it may.
                waited(client)
                with_bad += waited(client)
                flood.stop()
            larger = resident(server) - before
        finally:
            flood.end()
    finally:
        server.stop()
    yield Row(
        name=f"with bad tokens on {connections} connections: p99",
        measured=p99(with_bad),
        unit="ms",
        ratio=p99(with_bad) / p99(alone),
        basis="times the p99 alone",
        most=MOST * p99(alone),
        includes=f"half of the answers take {statistics.median(alone):.2f} ms alone, "
        f"{statistics.median(with_bad):.2f} ms with them; "
        f"{flood.answers / flood.seconds:,.0f} refused a second",
    )
    yield Row(
        name=f"after bad tokens on {connections} connections: memory",
        measured=larger,
        unit="MB",
        most=LARGER,
        includes=f"{flood.answers:,} refused",
    )


def rows(calls: int, rounds: int, connections: list[int]) -> Iterator[Row]:
    with on_cores(CORES[1:]), file_of_bad_tokens() as path:
        yield cost(calls, rounds)
        for number in connections:
            yield from basis(number, rounds, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", default="1,50,500")
    asked = parser.parse_args()
    report(rows(asked.calls, asked.rounds, [int(n) for n in asked.connections.split(",")]))


if __name__ == "__main__":
    main()
