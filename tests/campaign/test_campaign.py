"""The plan of a round of `scripts/campaign`."""

from tests.campaign.rounds import plan_of_round
from tests.campaign.servers import Redis


def test_a_seed_decides_what_clients_do_and_which_faults_begin() -> None:
    def plan(seed: int) -> object:
        return plan_of_round(seed, 3, Redis.kinds)

    assert plan(7) == plan(7)
    assert plan(7) != plan(8)
