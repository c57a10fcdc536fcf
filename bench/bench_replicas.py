"""Cost of a session and of an event, with Redis and two replicas.

    python -m bench.bench_replicas [--count N] [--rounds N]

Two workers use one Redis server on a Unix socket. Everything happens at one of them. The rows *CPU
of another* show what this costs the other worker. The sessions belong to stock clients of the 2025
era. An event is an update to one stream. Its figures are those of a call that causes it, less those
of a call that causes no event. The least CPU of all rounds counts, without the CPU of an idle
process. The last rows are for a Redis Cluster with two nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import tempfile
import time
from collections.abc import Awaitable, Iterator
from dataclasses import astuple, dataclass, field, replace

import uvloop

from bench.bench_workers import ECHO, Workers, serving
from bench.rows import Row, report
from bench.stores import cpu_of, is_there
from bench.wire import Connection, Stream, until
from tests.support.redis_server import RedisServer, redis_server

URI = "note://replicas"
MESSAGE = 400
"""Bytes: an event with its address."""


@dataclass(frozen=True)
class Used:
    """Until now, or for each of what was done: CPU in seconds, or in µs; bytes."""

    here: float
    """The worker at which it happens."""

    there: float
    """The other one."""

    redis: float
    memory: float
    """Memory of Redis."""

    network: float
    """Between the workers and Redis, both ways."""

    def less(self, other: Used, times: float = 1) -> Used:
        mine, its = astuple(self), astuple(other)
        return Used(*(a - b * times for a, b in zip(mine, its, strict=True)))


def used_by(workers: Workers) -> Used:
    said = workers.redis.ask("INFO everything")
    info = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    here, there = map(cpu_of, workers.pids)
    network = int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"])
    return Used(here, there, cpu_of(workers.redis.pid), int(info["used_memory"]), network)


async def cost(
    workers: Workers, work: Awaitable[None], count: int, second: Used | None = None
) -> Used:
    """Return the cost of each of so many actions.

    Args:
        second: The cost of a second in which nothing happens.
    """
    before, begun = used_by(workers), time.monotonic()
    await work
    used = used_by(workers).less(before)
    if second is not None:
        used = used.less(second, time.monotonic() - begun)
    cpu = 1e6 / count
    return Used(
        used.here * cpu,
        used.there * cpu,
        used.redis * cpu,
        used.memory / count,
        used.network / count,
    )


@dataclass
class Round:
    client: Connection
    carriers: list[Connection]
    sessions: list[str] = field(default_factory=list[str])
    streams: list[Stream] = field(default_factory=list[Stream])

    async def begin(self) -> None:
        for _ in self.carriers:
            self.client.session = None
            await self.client.initialize()
            assert self.client.session is not None
            self.sessions.append(self.client.session)

    async def subscribe(self) -> None:
        for session in self.sessions:
            self.client.session = session
            await self.client.ask("resources/subscribe", {"uri": f"{URI}/{session}"})

    async def listen(self) -> None:
        for session, carrier in zip(self.sessions, self.carriers, strict=True):
            carrier.meta = {}
            stream = Stream(session, lambda _: None)
            stream.open_on(carrier)
            await until(lambda stream=stream: stream.is_open, "a stream is open")
            self.streams.append(stream)

    async def call(self) -> None:
        request = self.client.request("tools/call", ECHO)
        for _ in self.sessions:
            await self.client.send(request)

    async def touch(self) -> None:
        was = [stream.last for stream in self.streams]
        for session in self.sessions:
            arguments = {"uri": f"{URI}/{session}"}
            await self.client.ask("tools/call", {"name": "touch", "arguments": arguments})
        notified = zip(self.streams, was, strict=True)
        pending = [(stream, last) for stream, last in notified]
        await until(lambda: all(each.last != last for each, last in pending), "all are told")


async def a_round(workers: Workers, count: int) -> dict[str, Used]:
    async with workers.connections(count + 1) as at:
        client, *carriers = at[workers.pids[0]]
        client.meta = {}
        does = Round(client, carriers)
        second = await cost(workers, asyncio.sleep(4), 4)
        second = Used(second.here / 1e6, second.there / 1e6, second.redis / 1e6, 0, second.network)
        found: dict[str, Used] = {}
        for step in (does.begin, does.subscribe, does.listen, does.call, does.touch):
            found[step.__name__] = await cost(workers, step(), count, second)
        found["touch"] = replace(found["touch"].less(found["call"]), memory=found["touch"].memory)
    return found


NAMES = {
    "begin": "a session begins",
    "subscribe": "a subscription",
    "listen": "a stream opens",
    "call": "a call in a session",
    "touch": "an event to its stream",
}


def rows(count: int, rounds: int) -> Iterator[Row]:
    if not is_there("redis"):
        yield Row(name="replicas", absent="no redis-server, no valkey-server")
        return
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-bench-") as directory:
        path = f"{directory}/redis.sock"
        with (
            redis_server("--unixsocket", path, "--unixsocketperm", "700") as redis,
            serving(2, redis, f"unix://{path}") as workers,
        ):
            found = [uvloop.run(a_round(workers, count)) for _ in range(rounds)]
    for step, name in NAMES.items():
        columns = zip(*(astuple(each[step]) for each in found), strict=True)
        least = Used(*map(min, columns))
        yield Row(name=f"{name}: CPU of its replica", measured=max(0.0, least.here), unit="µs")
        yield Row(name=f"{name}: CPU of another", measured=max(0.0, least.there), unit="µs")
        yield Row(name=f"{name}: CPU of Redis", measured=max(0.0, least.redis), unit="µs")
        yield Row(name=f"{name}: network", measured=max(0.0, least.network), unit="bytes")
        if step != "call":
            yield Row(
                name=f"{name}: memory of Redis",
                measured=max(0.0, least.memory),
                unit="bytes",
                includes="`used_memory`",
            )
    yield from cluster(20_000)


def cluster(count: int) -> Iterator[Row]:
    own = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with redis_server(*own) as here, redis_server(*own) as there:
        here.ask("CLUSTER ADDSLOTSRANGE 0 8191")
        there.ask("CLUSTER ADDSLOTSRANGE 8192 16383")
        here.ask(f"CLUSTER MEET 127.0.0.1 {there.port}")
        for node in (here, there):
            node.wait_for("CLUSTER INFO", "cluster_state:ok")
        before = cpu_of(here.pid), cpu_of(there.pid)
        publish(here, count)
        received = f"cluster_stats_messages_publish_received:{count}"
        there.wait_for("CLUSTER INFO", received)
        used = [(cpu_of(node.pid) - its) / count * 1e6
                for node, its in zip((here, there), before, strict=True)]  # fmt: skip
    what = f"a message of {MESSAGE} bytes that nobody there listens to"
    yield Row(name="a published message: CPU of its node", measured=used[0], unit="µs")
    yield Row(
        name="a published message: CPU of each other node",
        measured=used[1],
        unit="µs",
        includes=what,
    )


def publish(node: RedisServer, count: int) -> None:
    message = b"PUBLISH channel " + b"x" * MESSAGE + b"\r\n"
    some = 100
    with socket.create_connection(("127.0.0.1", node.port), timeout=30) as connection:
        for _ in range(count // some):
            connection.sendall(message * some)
            answers = b""
            while answers.count(b"\n") < some:
                answers += connection.recv(65_536)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    report(rows(asked.count, asked.rounds))


if __name__ == "__main__":
    main()
