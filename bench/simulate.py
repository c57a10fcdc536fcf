"""A million sessions on many replicas and a Redis Cluster: what they take, and what breaks first.

    python -m bench.simulate [--json docs/figures.json] [--page]

On paper (`bench.sizing`), then by simulation: replicas and shards are queues that do one
piece of work after the other, each for as long as a bench measured. Events come at random, seeded,
so that two runs say the same. ``--page`` writes both into ``docs/scale.md``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.sizing import (
    Costs,
    Load,
    Size,
    most_changes,
    most_of_one,
    most_published,
    size,
)

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- simulated -->\n", "<!-- end -->"
HOP = 0.000_25
"""Seconds from one machine to another."""

TICK = 0.005
"""Seconds after which what happened at one is work for all others."""


@dataclass(eq=False)
class Station:
    free_at: float = 0.0
    busy: float = 0.0
    """Seconds of work that it was given."""

    def serve(self, now: float, work: float) -> float:
        self.free_at = max(now, self.free_at) + work
        self.busy += work
        return self.free_at


Way = Iterator[tuple[Station, float]]
"""From station to station, with the seconds of work at each."""


@dataclass
class Simulation:
    hop: float = HOP
    begun: int = 0
    took: list[float] = field(default_factory=list[float])
    """Seconds of each that is done."""

    _next: list[tuple[float, int, Callable[[float], object]]] = field(
        default_factory=list[tuple[float, int, Callable[[float], object]]]
    )
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def at(self, when: float, do: Callable[[float], object]) -> None:
        heapq.heappush(self._next, (when, next(self._numbers), do))

    def send(self, now: float, way: Way) -> None:
        self.begun += 1

        def step(at: float) -> None:
            stop = next(way, None)
            if stop is None:
                self.took.append(at - now)
                return
            station, work = stop
            self.at(station.serve(at, work) + self.hop, step)

        step(now)

    @property
    def is_under_way(self) -> bool:
        return len(self.took) < self.begun

    def run(self) -> float:
        now = 0.0
        while self._next:
            now, _, do = heapq.heappop(self._next)
            do(now)
        return now


@dataclass
class Fleet:
    """Replicas and shards under a load.

    Args:
        hot: The part of the events that is of one session.
    """

    load: Load
    costs: Costs
    replicas: int
    shards: int
    seed: int = 1
    hot: float = 0.0
    simulation: Simulation = field(default_factory=Simulation)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.notified = 0
        """Messages that went to all other replicas."""

        self.at_replicas = [Station() for _ in range(self.replicas)]
        self.at_shards = [Station() for _ in range(self.shards)]
        self._published = 0
        self._changed = 0
        self._opened = 0

    def run(self, seconds: float) -> Found:
        for rate, way in (
            (self.load.events - self.load.changes, self._event),
            (self.load.changes, self._change),
            (self.load.calls, self._call),
            (self.load.opens, self._open),
        ):
            self._come(rate, seconds, way)
        self._tick(seconds)
        # Those are busy with each open stream all the time.
        for stations, each in ((self.at_replicas, "idle"), (self.at_shards, "idle_redis")):
            work = self.load.streams * getattr(self.costs, each) / 1e6 / len(stations)
            for station in stations:
                for tick in range(math.ceil(seconds / TICK)):
                    self.simulation.at(
                        tick * TICK,
                        lambda now, station=station, work=work: station.serve(now, work * TICK),
                    )
        finished = self.simulation.run()
        took = sorted(self.simulation.took)
        return Found(
            took[int(len(took) * 0.99) - 1] * 1e3,
            max(each.busy for each in self.at_replicas) / seconds,
            max(each.busy for each in self.at_shards) / seconds,
            finished - seconds,
        )

    def storm(self, streams: int, within: float) -> float:
        """Seconds until so many streams that were cut are back, who all come within that."""
        for _ in range(streams):
            self.simulation.at(
                self._random.random() * within,
                lambda now: self.simulation.send(now, self._open()),
            )
        self._tick(within)
        finished = self.simulation.run()
        # The messages to others are work as well.
        return max(finished, *(each.free_at for each in self.at_replicas))

    def _come(self, rate: float, seconds: float, way: Callable[[], Way]) -> None:
        def come(now: float) -> None:
            self.simulation.send(now, way())
            following = now + self._random.expovariate(rate)
            if following < seconds:
                self.simulation.at(following, come)

        if rate:
            self.simulation.at(self._random.expovariate(rate), come)

    def _tick(self, seconds: float) -> None:
        """Do work that all replicas have to do, until the last one has done it."""

        def tick(now: float) -> None:
            published, self._published = self._published, 0
            self.notified += published
            changed, self._changed = self._changed, 0
            opened, self._opened = self._opened, 0
            received = (
                changed * self.costs.change_received + opened * self.costs.opens_received
            ) / 1e6
            for station in self.at_replicas:
                station.serve(now, received)
            for station in self.at_shards:
                station.serve(now, published * self.costs.bus / 1e6)
            if now < seconds or published or self.simulation.is_under_way:
                self.simulation.at(now + TICK, tick)

        self.simulation.at(TICK, tick)

    def _one(self, stations: list[Station]) -> Station:
        return stations[int(self._random.random() * len(stations))]

    def _call(self) -> Way:
        yield self._one(self.at_replicas), self.costs.call / 2e6
        yield self._one(self.at_shards), self.costs.call_redis / 1e6
        yield self._one(self.at_replicas), self.costs.call / 2e6

    def _event(self) -> Way:
        """Half of its work is where it is made, half where its stream is."""
        is_hot = self._random.random() < self.hot
        yield self._one(self.at_replicas), self.costs.event / 2e6
        shard = self.at_shards[0] if is_hot else self._one(self.at_shards)
        yield shard, self.costs.event_redis / 1e6
        self._published += 1
        yield self._one(self.at_replicas), self.costs.event / 2e6

    def _change(self) -> Way:
        self._published += 1
        self._changed += 1
        yield from self._event()

    def _open(self) -> Way:
        yield self._one(self.at_replicas), self.costs.opens / 1e6
        self._published += 1
        self._opened += 1
        yield self._one(self.at_shards), self.costs.opens_redis / 1e6


@dataclass(frozen=True)
class Found:
    p99: float
    """Milliseconds of an event, a call or a stream that opens."""

    replica: float
    """How busy the busiest was; above 1 it does not keep up."""

    shard: float
    behind: float
    """Seconds after the last came until all was done."""


LOADS = {
    "events of one session each": Load(),
    "the same without open streams, calls only": Load(streams=0, events=0),
    "1,000 of the events server-wide changes": Load(changes=1_000),
    "4,000 of them": Load(changes=4_000),
    "all of them": Load(changes=100_000),
    "every session has a stream": Load(streams=1_000_000),
}


def paper(costs: Costs) -> Iterator[str]:
    yield "| load | replicas | shards | memory | network | of a replica, for others | of a shard |"
    yield "|---|---|---|---|---|---|---|"
    for name, load in LOADS.items():
        found = size(load, costs)
        yield (
            f"| {name} | {_count(found.replicas)} | {_count(found.shards)}"
            f" | {found.memory / 1e9:.1f} GB | {found.network * 8 / 1e9:.1f} Gbit/s"
            f" | {found.received:.0%} | {found.bus:.0%} |"
        )
    yield ""
    yield "| bound that more machines do not move | |"
    yield "|---|---|"
    yield f"| server-wide changes, of all replicas together | {most_changes(costs):,.0f} a second |"
    yield f"| published messages, of all shards together | {most_published(costs):,.0f} a second |"
    yield f"| events of one session | {most_of_one(costs):,.0f} a second |"


def _count(number: float) -> str:
    return "no number is enough" if math.isinf(number) else f"{number:.0f}"


def simulated(costs: Costs) -> Iterator[str]:
    load = Load()
    planned = size(load, costs)
    replicas, shards = int(planned.replicas), int(planned.shards)
    yield f"With {replicas} replicas and {shards} shards, for a tenth of a second:"
    yield ""
    yield "| | p99 | busiest replica | busiest shard | behind at the end |"
    yield "|---|---|---|---|---|"

    def row(name: str, load: Load, size: Size = planned, hot: float = 0.0) -> str:
        fleet = Fleet(load, costs, int(size.replicas), int(size.shards), hot=hot)
        found = fleet.run(0.1)
        return (
            f"| {name} | {found.p99:.1f} ms | {found.replica:.0%} | {found.shard:.0%}"
            f" | {max(0.0, found.behind) * 1e3:.0f} ms |"
        )

    yield row("the load it is planned for", load)
    for times in (1.3, 1.6, 2.0):
        more = replace(load, events=load.events * times, calls=load.calls * times)
        yield row(f"{times:g} times the events and calls", more)
    for hot in (0.02, 0.05):
        yield row(f"{hot:.0%} of the events are of one session", load, hot=hot)
    for changes in (2_000, 5_000):
        yield row(f"{changes:,} of the events are server-wide", replace(load, changes=changes))
    yield ""
    yield "| streams that are cut, and come back within a second | until all is done |"
    yield "|---|---|"
    quiet = replace(load, events=0, calls=0)
    for name, lost in (("one replica's", 1 / replicas), ("a third of all", 1 / 3), ("all", 1.0)):
        streams = int(load.streams * lost)
        took = Fleet(quiet, costs, replicas, shards).storm(streams, 1.0)
        yield f"| {name}: {streams:,} | {took:.1f} s |"
        doubled = Fleet(quiet, costs, 2 * replicas, 2 * shards).storm(streams, 1.0)
        yield f"| the same with twice the replicas and shards | {doubled:.1f} s |"


def written(page: str, costs: Costs) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    lines = [*paper(costs), "", *simulated(costs)]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate")
    parser.add_argument("--json", type=Path, help="figures of the benches")
    parser.add_argument("--page", action="store_true", help="write docs/scale.md")
    asked = parser.parse_args()
    costs = Costs.read(json.loads(asked.json.read_text())) if asked.json else Costs()
    if asked.page:
        PAGE.write_text(written(PAGE.read_text(), costs))
    else:
        print("\n".join([*paper(costs), "", *simulated(costs)]))


if __name__ == "__main__":
    main()
