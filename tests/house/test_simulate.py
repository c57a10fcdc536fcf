"""The simulator against what is known without it, and the page against the program."""

import json
import random
from dataclasses import asdict, replace

import pytest

from bench.figures import JSON
from bench.rows import Row
from bench.simulate import LOADS, PAGE, Fleet, Simulation, Station, paper
from bench.sizing import BUSY, Costs, Load, most_changes, most_of_one, published, size

SMALL = Load(sessions=10_000, streams=1_000, calls=500, events=2_000)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_a_station_with_work_that_comes_at_random_waits_as_theory_says(busy: float) -> None:
    """M/D/1, Pollaczek and Khinchine: the mean wait is busy / (2 (1 - busy)) pieces of work."""
    rng, simulation, station = random.Random(7), Simulation(hop=0.0), Station()
    now = 0.0
    for _ in range(100_000):
        now += rng.expovariate(busy)
        simulation.at(now, lambda at: simulation.send(at, iter([(station, 1.0)])))
    simulation.run()
    wait = sum(simulation.took) / len(simulation.took) - 1.0
    assert wait == pytest.approx(busy / (2 * (1 - busy)), rel=0.06)
    assert station.busy == 100_000


@pytest.mark.parametrize("changes", [0, 400])
def test_nothing_that_began_is_lost_and_nothing_is_done_twice(changes: int) -> None:
    """Also under a load that the fleet does not keep up with."""
    load = replace(SMALL, changes=changes)
    fleet = Fleet(load, Costs(), replicas=1, shards=1)
    found = fleet.run(1.0)
    simulation = fleet.simulation
    assert simulation.begun == len(simulation.took)
    expected = load.events + load.calls + load.opens
    assert simulation.begun == pytest.approx(expected, rel=0.1)
    # A change is asked to all, and its event is published.
    assert fleet.notified == pytest.approx(published(load), rel=0.15)
    assert found.behind >= 0


def test_a_fleet_of_the_planned_size_is_as_busy_as_it_was_planned_for() -> None:
    """What is on paper is what the simulation finds."""
    load, costs = Load(events=20_000, calls=4_000, changes=500, streams=20_000), Costs()
    planned = size(load, costs)
    fleet = Fleet(load, costs, int(planned.replicas), int(planned.shards))
    fleet.run(0.5)
    for stations in (fleet.at_replicas, fleet.at_shards):
        mean = sum(each.busy for each in stations) / len(stations) / 0.5
        assert mean == pytest.approx(BUSY, rel=0.12)


def test_two_runs_say_the_same() -> None:
    """They are seeded."""
    one, other = (Fleet(SMALL, Costs(), 3, 2).run(0.2) for _ in range(2))
    assert one == other
    assert Fleet(SMALL, Costs(), 3, 2, seed=2).run(0.2) != one


def test_one_session_cannot_have_more_events_than_its_core_stores() -> None:
    """A hot slot: more shards do not help."""
    costs = Costs()
    rate = most_of_one(costs) * 1.5
    load = Load(streams=0, calls=0, events=rate)
    assert Fleet(load, costs, 20, 4).run(0.5).shard < 0.8
    for shards in (4, 16):
        assert Fleet(load, costs, 20, shards, hot=1.0).run(0.5).shard > 1.2


def test_more_replicas_do_not_help_with_changes_that_all_of_them_get() -> None:
    """Nor on paper."""
    costs = Costs()
    most = most_changes(costs)
    load = Load(streams=0, calls=0, events=most * 2.5, changes=most * 2.5)
    assert size(load, costs).replicas == float("inf")
    assert Fleet(load, costs, 100, 100).run(0.05).replica > 1.0


def test_a_storm_ends_when_the_last_replica_has_learned_of_the_last_stream() -> None:
    """All of them learn of each, however many there are."""
    costs = Costs()
    received = 5_000 * costs.opens_received / 1e6
    for replicas in (50, 200):
        assert Fleet(Load(), costs, replicas, 50).storm(5_000, 0.1) > received


def test_what_was_measured_replaces_what_was() -> None:
    """A row by the name of its bench; idle streams from percent of a core for each 1,000."""
    rows = [asdict(Row(name="redis, GET", measured=1.5)), asdict(Row(name="x", absent="y"))]
    costs = Costs.read({"benches": [{"name": "idle", "rows": rows}]})
    assert costs == replace(Costs(), idle=15.0)


def test_the_page_has_what_the_program_says() -> None:
    """Each line of what is on paper, with the costs that stand in the program."""
    page = PAGE.read_text().splitlines()
    for line in paper(Costs()):
        assert line in page
    assert all(any(name in line for line in page) for name in LOADS)


def test_each_cost_names_a_row_that_its_bench_writes() -> None:
    """The stored run has it. Otherwise ``--json`` would leave the cost as it is."""
    results = json.loads(JSON.read_text())
    rows = {(bench["name"], row["name"]) for bench in results["benches"] for row in bench["rows"]}
    for each in Costs.__dataclass_fields__.values():
        assert (each.metadata["bench"], each.metadata["row"]) in rows, each.name
        assert json.dumps(each.default)
