"""The plan of a round of `scripts/campaign`."""

from tests.campaign.rounds import PLAYED, plan_of_round
from tests.campaign.servers import Redis


def test_a_seed_decides_what_clients_do_and_which_faults_begin() -> None:
    def plan(seed: int) -> object:
        return plan_of_round(seed, 3, Redis.kinds)

    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


def test_the_campaign_has_each_client_of_a_round() -> None:
    """The simulation has plans for which the fleet would need other servers."""
    for seed in range(60):
        plan = plan_of_round(seed, 3, Redis.kinds)
        assert {client["kind"] for client in plan["clients"]} <= PLAYED.keys(), seed
