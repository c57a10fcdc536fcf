"""Play many seeds, and tell which of them break a rule: ``scripts/simulate --help``."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tests.simulation.campaign import broken_rules, finds, of_seeds, quiet
from tests.simulation.chance import is_reproducible
from tests.simulation.defects import DEFECTS
from tests.simulation.plan import plan_of
from tests.simulation.runner import play
from tests.simulation.shrink import shrunk

Json = dict[str, Any]

SEEDS: Final = Path(__file__).parent / "seeds"
"""The shrunk plans of what was found, each a test."""

_SHOWN: Final = 20
"""Violations that are printed."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many (1,000)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--seed", type=int, help="play one, and print its plan and its history")
    parser.add_argument("--plan", type=Path, help="the same for the plan in a file")
    parser.add_argument("--shrink", action="store_true", help="print the smallest plan that fails")
    parser.add_argument(
        "--defects",
        nargs="?",
        const="",
        metavar="NAME",
        help="put old defects back, one by one, and tell which seed finds each",
    )
    parser.add_argument("--digests", action="store_true", help="print a digest of each history")
    parser.add_argument("--kept", action="store_true", help="play the plans that are kept as tests")
    chosen = parser.parse_args(arguments)
    quiet()
    if not is_reproducible():
        parser.error("start it with PYTHONHASHSEED=0, as scripts/simulate does")
    if chosen.kept:
        return _kept()
    if chosen.seed is not None or chosen.plan is not None:
        plan = plan_of(chosen.seed or 0) if chosen.plan is None else _plan_in(chosen.plan)
        return _shrink(plan) if chosen.shrink else _show(plan)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    if chosen.defects is not None:
        return _defects(chosen.defects, seeds, chosen.jobs)
    if chosen.digests:
        for seed in seeds:
            print(seed, sha256(play(plan_of(seed)).lines().encode()).hexdigest())
        return 0
    return _many(seeds, chosen.jobs, chosen.shrink)


def _show(plan: Json) -> int:
    print(json.dumps(plan, indent=1))
    print(play(plan).lines(), end="")
    found = broken_rules(plan)
    for violation in found:
        print(violation)
    return 1 if found else 0


def _shrink(plan: Json) -> int:
    found = broken_rules(plan)
    if not found:
        print("it breaks no rule")
        return 0
    rule = found[0].rule
    smallest = shrunk(plan, lambda smaller: any(v.rule == rule for v in broken_rules(smaller)))
    return _show(smallest)


def _many(seeds: range, jobs: int, shrinks: bool) -> int:
    began, counts, failed = time.monotonic(), Counter[str](), list[int]()
    for seed, found in of_seeds(seeds, jobs):
        counts.update({violation.rule for violation in found})
        if found:
            failed.append(seed)
        for violation in found[:1]:
            if len(failed) <= _SHOWN:
                print(f"seed {seed}: {violation}", flush=True)
    seconds = time.monotonic() - began
    print(f"{len(seeds)} seeds, {len(failed)} with a violation, {seconds:.0f} s")
    for rule, count in counts.most_common():
        print(f"  {count:6} {rule}")
    if shrinks and failed:
        print("the smallest plan of the first:")
        _shrink(plan_of(min(failed)))
    return 1 if failed else 0


def _defects(wanted: str, seeds: range, jobs: int) -> int:
    found = 0
    chosen = [name for name in DEFECTS if wanted in name]
    for name in chosen:
        first = finds(name, seeds, jobs)
        if first is None:
            print(f"not found: {name}", flush=True)
            continue
        found += 1
        print(f"seed {first[0]:5}: {name}\n            {first[1]}", flush=True)
    print(f"{found} of {len(chosen)} defects found within {len(seeds)} seeds")
    return 0 if found * 15 >= len(chosen) * 13 else 1


def _plan_in(path: Path) -> Json:
    kept: Json = json.loads(path.read_text())
    return kept.get("plan", kept)


def _kept() -> int:
    failed = 0
    paths = sorted(SEEDS.glob("*.json"))
    for path in paths:
        for violation in broken_rules(_plan_in(path)):
            failed += 1
            print(f"{path.name}: {violation}")
    print(f"{len(paths)} kept plans, {failed} violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
