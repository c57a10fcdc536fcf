"""The page that says how we know is what the machines said."""

import json

from scripts import how_we_know
from tests.campaign.rounds import plan_of_round
from tests.campaign.servers import CLOCKS_JUMP, Postgres, Redis


def test_the_page_is_made_from_the_results() -> None:
    """Nothing in it was written by hand."""
    found = json.loads(how_we_know.JSON.read_text())
    assert how_we_know.PAGE.read_text() == how_we_know.page(found)


def test_the_page_names_each_fault_of_the_campaign() -> None:
    of_stores = (*Redis.kinds, *Postgres.kinds, "file locked", "disk full")
    plans = [plan_of_round(seed, 3, of_stores) for seed in range(200)]
    kinds = {fault["kind"] for plan in plans for fault in plan["faults"]}
    found = json.loads(how_we_know.JSON.read_text())
    page = how_we_know.page(found)
    assert len(kinds) == 24 + CLOCKS_JUMP
    for kind in kinds:
        assert f"| {kind} |" in page


def test_a_figure_that_changes_changes_the_page() -> None:
    found = json.loads(how_we_know.JSON.read_text())
    found["restart"][0]["lost"] = 4_321
    assert "4321" in how_we_know.page(found)
