"""No request costs more function calls than ``costs.toml`` says."""

import tomllib
from collections.abc import Iterator

import pytest

from mcp_sessions import metrics
from tests.house.source import ROOT
from tests.support.recorded import record
from tests.support.walks import WALKS

COSTS: dict[str, int] = tomllib.loads((ROOT / "tests/house/costs.toml").read_text("utf-8"))
SLACK = 1.02


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test before, in the same process, may have had an operator's page, which counts."""
    monkeypatch.setattr(metrics, "_tally", None)
    metrics._counter.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    metrics._counter.cache_clear()  # pyright: ignore[reportPrivateUsage]


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
