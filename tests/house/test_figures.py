"""The pages of figures are what one run of all benches wrote, and no bench is left out of them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import figures
from bench.benches import BENCHES
from bench.rows import ROWS, Row, growth, report, short
from tests.house.source import ROOT


def test_every_bench_is_run_by_the_one_command() -> None:
    """A module that reports rows is a bench; the other modules are parts of them."""
    files = (ROOT / "bench").glob("bench_*.py")
    report = {file.stem.removeprefix("bench_") for file in files if "report(" in file.read_text()}
    assert report == {bench.name for bench in BENCHES}


def test_every_bench_says_what_it_measures() -> None:
    """Its page is made from that."""
    for bench in BENCHES:
        title, prose = bench.docstring()
        assert title.endswith("."), bench.name
        assert prose, bench.name


def test_the_pages_are_made_from_the_figures() -> None:
    """Nothing in them was written by hand."""
    results = json.loads(figures.JSON.read_text())
    there = [figures.DOCS / figures.PAGE, *(figures.DOCS / "figures").iterdir()]

    assert not results["quick"]
    assert {
        str(file.relative_to(figures.DOCS)): file.read_text() for file in there
    } == figures.pages(results)


def test_every_bench_is_on_one_page() -> None:
    named = [name for _, benches in figures.PARTS.values() for name in benches]
    assert sorted(named) == sorted(bench.name for bench in BENCHES)


def test_a_row_says_how_its_figure_stands_to_its_aim() -> None:
    """At most, or a ratio of at least."""
    assert Row(name="x", measured=2.0, most=1.0).has_missed
    assert not Row(name="x", measured=1.0, most=1.0).has_missed
    assert Row(name="x", measured=1.0, ratio=1.9, least_ratio=2.0).has_missed
    assert not Row(name="x", measured=1.0, ratio=2.0, least_ratio=2.0).has_missed
    assert not Row(name="x", absent="no program", most=1.0).has_missed


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(2.0, "2.00 times cheaper than X"), (0.5, "2.00 times as much as X")],
)
def test_a_row_that_is_not_cheaper_says_how_much_more_it_is(ratio: float, text: str) -> None:
    """A reader cannot read half a time cheaper."""
    assert Row(name="x", ratio=ratio, basis="times cheaper than X").compared == text


def test_one_of_a_unit_is_singular() -> None:
    row = Row(name="x", measured=1.0, unit="rows", most=2.0)
    assert (row.figure, row.aim) == ("1 row", "≤ 2 rows")
    assert Row(name="x", measured=1.0, unit="s").figure == "1 s"


def test_the_missed_aims_are_counted_on_the_page() -> None:
    """And the benches that the run did not have are named."""
    rows = [asdict(Row(name=name, measured=2.0, most=most)) for name, most in (("a", 1), ("b", 3))]
    bench = {"name": "idle", "command": "c", "seconds": 1, "failed": "", "rows": rows}
    results = {"python": "3", "system": "s", "cores": 1, "quick": False, "benches": [bench]}
    made = figures.pages(results)
    page = made["figures.md"] + made["figures/sessions.md"]
    assert "missed 1 of 2 aims" in page
    assert "| CPU of open streams while nothing happens | a | 2 | ≤ 1 |" in page
    assert "not in the run: `calls`" in page


def test_what_is_absent_is_on_the_page() -> None:
    """And what failed, with what it said."""
    rows = [asdict(Row(name="redis", absent="no redis-server"))]
    bench = {"name": "idle", "command": "c", "seconds": 1, "failed": "it broke", "rows": rows}
    results = {"python": "3", "system": "s", "cores": 1, "quick": False, "benches": [bench]}
    page = figures.pages(results)["figures/sessions.md"]
    assert "| redis |  | absent: no redis-server |" in page
    assert "**Failed**: it broke" in page


def test_rows_are_written_to_the_file_and_a_missed_aim_is_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row, also those after the one that missed."""
    file = tmp_path / "rows"
    monkeypatch.setenv(ROWS, str(file))
    rows = [Row(name="a", measured=2.0, unit="µs", most=1.0), Row(name="b", measured=3.0)]
    with pytest.raises(SystemExit) as ended:
        report(rows)
    assert ended.value.code == 1
    assert [Row(**json.loads(line)) for line in file.read_text().splitlines()] == rows
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize(("power", "points"), [(1, (10, 20, 40)), (2, (10, 100))])
def test_growth_is_the_power_of_the_number(power: int, points: tuple[int, ...]) -> None:
    """1 for linear, 2 for quadratic."""
    row = growth("x", {n: 3.0 * n**power for n in points})
    assert row.measured == pytest.approx(power)
    assert row.has_missed == (power == 2)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.2469, "0.247"), (24.66, "24.7"), (1_272.4, "1,272"), (250.0, "250"), (8.0, "8")],
)
def test_a_figure_has_three_digits(number: float, text: str) -> None:
    """More would be noise."""
    assert short(number) == text
