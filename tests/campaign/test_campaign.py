"""Real processes that are killed, paused and cut off keep the rules of the simulation."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.campaign.rounds import plan_of_round
from tests.campaign.servers import Redis

ROOT = Path(__file__).parents[2]


def test_a_seed_decides_what_clients_do_and_which_faults_begin() -> None:
    def plan(seed: int) -> object:
        return plan_of_round(seed, 3, Redis.kinds)

    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.timeout(900)
def test_no_rule_is_broken_by_real_processes(tmp_path: Path) -> None:
    """One round on each store at the least. `scripts/campaign` plays for longer."""
    counts = tmp_path / "counts.json"
    ran = subprocess.run(
        ["./scripts/campaign", "--minutes", "1.5", "--seed", "1", "--json", str(counts)],
        cwd=ROOT, capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(counts.read_text())["rounds"] >= 3
