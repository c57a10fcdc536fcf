"""How long calls wait while somebody looks at the page of the sessions.

    python -m bench.bench_dashboard [--rounds N] [--seconds N] [--sessions N] [--events N]
                                    [--stores memory,redis]

A server process with the page has 10,000 detached sessions in its store, and 1,000 events a second
are stored for some of them. A client makes a trivial call in its session every few milliseconds.
The page is closed and open by turns, so other work of the machine is in both figures. A browser
loads the first view and follows it, from a process of its own. A turn begins when the page is live,
and has several looks at all sessions in it.

The figure is the p99 of the calls with the page open. The aim is 1.2 times the p99 with the page
closed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.bench_calls import HANDSHAKE, Case, Client, Server
from bench.bench_noisy import PAUSE, p99
from bench.rows import Row, report
from bench.stores import stores

MOST = 1.2


class Browser:
    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.watcher", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def does(self, step: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        if not said:
            raise SystemExit(f"the page could not {step}")
        return said

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(timeout=20)


@dataclass
class Turns:
    """Those with the page open, or closed."""

    waited: list[float] = field(default_factory=list[float])
    """Milliseconds until each answer."""

    events: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.events / self.seconds


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body or {}))
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    found: int = json.loads(answer.read())
    connection.close()
    return found


def measure(store: str, wanted: argparse.Namespace) -> tuple[Turns, Turns, int]:
    """The turns with the page closed and open, and the changes that the page got."""
    server = Server("watched", store)
    browser = Browser(server.port)
    try:
        asked(server.port, "/fill", {"sessions": wanted.sessions, "events": wanted.events})
        client = Client(Case("", "ours", HANDSHAKE, session=True), server.port)
        client.wake()
        _turn(client, server.port, Turns(), 1.0)
        closed, opened, changes = Turns(), Turns(), 0
        for _ in range(wanted.rounds):
            client.wake()
            _turn(client, server.port, closed, wanted.seconds)
            browser.does("open")
            client.wake()
            _turn(client, server.port, opened, wanted.seconds)
            changes += int(browser.does("close"))
        return closed, opened, changes
    finally:
        browser.stop()
        server.stop()


def _turn(client: Client, port: int, turns: Turns, seconds: float) -> None:
    events, begun = asked(port, "/count"), time.perf_counter()
    while time.perf_counter() < begun + seconds:
        sent = time.perf_counter()
        client.call()
        turns.waited.append((time.perf_counter() - sent) * 1_000)
        time.sleep(PAUSE)
    turns.seconds += time.perf_counter() - begun
    turns.events += asked(port, "/count") - events


def rows(wanted: argparse.Namespace) -> Iterator[Row]:
    with stores(wanted.stores) as each:
        for store in each.names:
            closed, opened, changes = measure(each.url(store, "watched"), wanted)
            alone, watched = p99(closed.waited), p99(opened.waited)
            yield Row(
                name=f"{store}, {wanted.sessions:,} sessions, the page is open: p99",
                measured=watched,
                unit="ms",
                ratio=watched / alone,
                basis="times the p99 with the page closed",
                most=MOST * alone,
                includes=f"{opened.rate:.0f} events a second, and {closed.rate:.0f} while it is "
                f"closed; {changes} changes of the page; half of the answers take "
                f"{statistics.median(opened.waited):.2f} ms, "
                f"{statistics.median(closed.waited):.2f} ms while it is closed",
            )
        yield from each.missing()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=1_000)
    parser.add_argument("--stores", default="memory,redis")
    report(rows(parser.parse_args()))


if __name__ == "__main__":
    main()
