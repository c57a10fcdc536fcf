"""No request costs more function calls than ``costs.toml`` says."""

import tomllib

import pytest

from mcp_sessions.ids import digest
from tests.house.source import ROOT
from tests.support.recorded import Recorded, record, recorded
from tests.support.walks import WALKS

COSTS: dict[str, int] = tomllib.loads((ROOT / "tests/house/costs.toml").read_text("utf-8"))
SLACK = 1.02


@pytest.mark.anyio
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.redis if "redis" in name else ()) for name in WALKS],
)
async def test_a_request_costs_no_more_than_before(name: str) -> None:
    found = await record(WALKS[name])

    assert found.calls <= COSTS[name] * SLACK, (
        f"{name}: {found.calls} function calls, and {COSTS[name]} before; ./scripts/walk --show"
        f" {name} prints the way of the request. Make it cheaper, or raise the number in"
        " tests/house/costs.toml and write the reason behind it."
    )


def test_every_walk_has_a_cost() -> None:
    assert [*COSTS] == [*WALKS]


def test_what_is_entered_is_recorded_once_in_its_order() -> None:
    found = Recorded()
    with recorded(found):
        digest("s")
    again = Recorded()
    with recorded(again):
        digest("s")
        digest("s")

    assert found.functions[0] == ("mcp_sessions/ids.py", "digest")
    assert (found.files, found.stays, found.returns) == (1, 1, 0)
    assert again.calls == 2 * found.calls > 2


def test_a_stay_a_return_and_a_climb_are_counted() -> None:
    found = Recorded(
        [("a.py", "f"), ("a.py", "g"), ("b.py", "h"), ("a.py", "i")], ["", "a.py", "a.py", "b.py"]
    )

    assert (found.files, found.stays, found.returns) == (2, 3, 1)
    assert found.climbs({"a.py": (0,), "b.py": (1,)}) == 1
