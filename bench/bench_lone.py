"""Server CPU of a call alone, and of each of 16 calls at once.

    python -m bench.bench_lone [CALLS]

The figure is the server CPU of a ``tools/call`` of the 2025 era, outside of a session. A call
that is alone pays for the process to sleep and to wake up. This is so for every server, also for
one without MCP. Calls that are open together (*16 in flight*) share that cost. Over HTTP each of
them has its own connection. Over stdio they share one. *handshake* is ``initialize`` and
``notifications/initialized``. *sdk-json* is the SDK in JSON mode. The servers take turns, and the
round with the least CPU counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from bench import bench_calls, bench_duplex
from bench.bench_calls import HANDSHAKE, Case, Server
from bench.rows import Row, report
from bench.stores import cpu_of

ROUNDS = 7
AT_ONCE = 16
CALL = {"name": "echo", "arguments": {"text": "hello"}}


class Measured(NamedTuple):
    name: str
    pid: int
    wake: Callable[[], None]
    """Before each round: a server closes a connection that was idle for some seconds."""

    run: Callable[[int], None]
    basis: str
    most: float | None = None
    """The aim, in microseconds."""


def over_http(kind: str, aim: float | None, stack: ExitStack) -> Iterator[Measured]:
    server = Server(kind)
    stack.callback(server.stop)
    case = Case("", kind, HANDSHAKE)
    clients = [bench_calls.Client(case, server.port) for _ in range(AT_ONCE)]

    def wake() -> None:
        for client in clients:
            client.wake()

    def lone(calls: int) -> None:
        for _ in range(calls):
            clients[0].call()

    def together(calls: int) -> None:
        for _ in range(calls // AT_ONCE):
            for client in clients:
                client.put("tools/call", CALL)
            for client in clients:
                client.get("tools/call")

    def handshakes(calls: int) -> None:
        for _ in range(calls):
            clients[0].initialize()

    pid = server.process.pid
    alone = f"HTTP, {kind}, alone"
    yield Measured(alone, pid, wake, lone, "HTTP, sdk-json, alone", aim)
    yield Measured(f"HTTP, {kind}, {AT_ONCE} in flight", pid, wake, together, alone)
    if kind != "floor":
        most = 400.0 if kind == "ours" else None
        name, basis = f"HTTP, {kind}, handshake", "HTTP, sdk, handshake"
        yield Measured(name, pid, wake, handshakes, basis, most)


def over_stdio(kind: str, aim: float | None, stack: ExitStack) -> Iterator[Measured]:
    client = bench_duplex.StdioClient(Case(kind, kind, HANDSHAKE))
    stack.callback(client.stop)
    client.begin()

    def lone(calls: int) -> None:
        for _ in range(calls):
            client.call()

    def together(calls: int) -> None:
        for _ in range(calls // AT_ONCE):
            for number in range(AT_ONCE):
                client.put(bench_duplex.request(number, "tools/call", CALL))
            for _ in range(AT_ONCE):
                client.get()

    alone, many = f"{kind}, alone", f"{kind}, {AT_ONCE} in flight"
    yield Measured(alone, client.pid, client.call, lone, "sdk-stdio, alone", aim)
    yield Measured(many, client.pid, client.call, together, alone)


def measure(calls: int) -> tuple[list[Measured], dict[str, float]]:
    """Microseconds of server CPU, by the name of the row: the least of all rounds."""
    with ExitStack() as stack:
        rows = [
            *over_http("floor", None, stack),
            *over_http("sdk", None, stack),
            *over_http("sdk-json", None, stack),
            *over_http("ours", 330, stack),
            *over_stdio("sdk-stdio", None, stack),
            *over_stdio("ours-stdio", 250, stack),
        ]
        least: dict[str, float] = {}
        for number in range(ROUNDS + 1):
            for row in rows:
                row.wake()
                before = cpu_of(row.pid)
                row.run(calls)
                spent = (cpu_of(row.pid) - before) / calls * 1_000_000
                if number:  # the first one warms up
                    least[row.name] = min(spent, least.get(row.name, spent))
        return rows, least


def rows(calls: int) -> Iterator[Row]:
    measured, least = measure(calls)
    for row in measured:
        is_alike = row.basis.endswith(row.name.rpartition(", ")[2])
        yield Row(
            name=row.name,
            measured=least[row.name],
            unit="µs",
            ratio=least[row.basis] / least[row.name] if row.basis != row.name else None,
            basis="times cheaper than " + (row.basis if is_alike else "alone"),
            most=row.most,
        )


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 512))


if __name__ == "__main__":
    main()
