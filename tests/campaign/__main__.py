"""Play clients against real processes that are killed, paused and cut off.

Three replicas share a Redis, then a Postgres; then one process has a SQLite file, with each of the
two durabilities. What the clients saw and what the servers ran is judged by the simulation's rules.
The exit status is 1 if a rule was broken.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from tests.campaign.rounds import Round, plan_of_round
from tests.campaign.servers import CLOCKS_JUMP, Fleet, fleet
from tests.simulation.rules import violations

STORES: Final = {"redis": 2, "postgres": 2, "normal": 1, "full": 1}
"""Where sessions are stored, and its share of the time."""


class Campaign:
    """Counts what was played, and prints what happens."""

    def __init__(self, kept: Path | None) -> None:
        self.kept = kept
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    async def play(self, served: Fleet, store: str, seed: int) -> None:
        plan = plan_of_round(seed, len(served.replicas), served.store.kinds)
        print(f"{store}, seed {seed}: {len(plan['clients'])} clients", flush=True)
        for fault in plan["faults"]:
            print(f"  {fault['at']:6.3f} s: {_described(fault)}", flush=True)
        history = await Round(served, plan).play()
        found = violations(history)
        for violation in found:
            print(f"  BROKEN {violation}", flush=True)
        calls = {record["call"] for record in history.of("sends")}
        print(f"  {len(calls)} calls, {len(history.records)} records", flush=True)
        self.faults.update(fault["kind"] for fault in plan["faults"])
        self.counts.update(
            rounds=1, clients=len(plan["clients"]), calls=len(calls),
            records=len(history.records), violations=len(found),
        )  # fmt: skip
        if self.kept is not None:
            history.write(self.kept / f"{store}-{seed}.jsonl")


def _described(fault: dict[str, object]) -> str:
    match fault["kind"]:
        case "cut" | "half-open" | "still":
            return f"{fault['kind']}, {fault['client']}, {fault['for']} s"
        case "clock":
            return f"clock of replica {fault['replica']} {fault['skew']:+} s, {fault['for']} s"
        case "kill" | "stop" | "pause":
            return f"{fault['kind']} replica {fault['replica']}, {fault['for']} s"
        case kind:
            return f"{kind}, {fault['for']} s"


async def _play(campaign: Campaign, minutes: float, seed: int, stores: list[str]) -> None:
    shares = sum(STORES[store] for store in stores)
    for store in stores:
        until = time.monotonic() + minutes * 60 * STORES[store] / shares
        async with fleet(store) as served:
            await served.start()
            while True:
                await campaign.play(served, store, seed)
                seed += 1
                if time.monotonic() > until:
                    break


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("scripts/campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="at least one round a store (10)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--store", choices=STORES, help="only this one")
    parser.add_argument("--keep", type=Path, help="write each history into this folder")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    # Its processes end with it, and its disk.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if not CLOCKS_JUMP:
        print("no clock jumps: libfaketime is not here (Debian: apt install libfaketime)")
    campaign, began = Campaign(options.keep), time.monotonic()
    stores = [options.store] if options.store is not None else [*STORES]
    asyncio.run(_play(campaign, options.minutes, options.seed, stores))
    seconds = round(time.monotonic() - began)
    print(f"{dict(campaign.counts)}, {seconds} s")
    if options.json is not None:
        counts = {"seed": options.seed, "seconds": seconds, **campaign.counts}
        counts["faults"] = dict(sorted(campaign.faults.items()))
        options.json.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if campaign.counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
