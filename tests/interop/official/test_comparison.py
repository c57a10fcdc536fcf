"""The comparison itself, over hand-made results: it sees what it must see."""

import json
from pathlib import Path

from tests.interop.official.suites import (
    ABSENT,
    CheckName,
    Departure,
    Outcome,
    differences,
    read,
)

Results = dict[str, list[tuple[str, str]]]
"""By scenario, (check, status) in order."""


def outcome(folder: Path, results: Results) -> Outcome:
    """What `read` makes of results that a suite would have written into ``folder``."""
    for scenario, entries in results.items():
        written = folder / f"server-{scenario}-2026-11-20T11-35-03-857Z"
        written.mkdir(parents=True)
        checks = [{"id": i, "status": s, "description": "It works."} for i, s in entries]
        (written / "checks.json").write_text(json.dumps(checks))
    return read(folder)


def statuses(bare: Results, wrapped: Results, tmp_path: Path) -> list[tuple[str, str, str]]:
    """The differences, as (check, status when bare, status when wrapped)."""
    found, _ = differences(outcome(tmp_path / "bare", bare), outcome(tmp_path / "ours", wrapped))
    return [(str(d.name), d.bare.status, d.wrapped.status) for d in found]


def test_equal_results_are_equal_whatever_was_logged_between(tmp_path: Path) -> None:
    bare: Results = {"ping": [("event", "INFO"), ("pong", "SUCCESS"), ("slow", "SKIPPED")]}
    wrapped: Results = {"ping": [("pong", "SUCCESS"), ("event", "INFO"), ("event", "INFO")]}

    assert statuses(bare, wrapped, tmp_path) == []


def test_each_way_to_come_out_otherwise_is_seen(tmp_path: Path) -> None:
    good: Results = {
        "tools": [("same", "SUCCESS"), ("fails", "SUCCESS"), ("logged", "SUCCESS")],
        "tools-list": [("gone", "SUCCESS")],
    }
    other: Results = {
        "tools": [("same", "SUCCESS"), ("fails", "FAILURE"), ("logged", "INFO")],
        "tools-more": [("new", "SUCCESS")],
    }

    assert statuses(good, other, tmp_path) == [
        ("tools / fails", "SUCCESS", "FAILURE"),
        ("tools / logged", "SUCCESS", "INFO"),
        ("tools-list / gone", "SUCCESS", ABSENT),
        ("tools-more / new", ABSENT, "SUCCESS"),
    ]


def test_a_check_that_is_made_twice_is_compared_twice(tmp_path: Path) -> None:
    bare: Results = {"headers": [("reject", "SUCCESS"), ("reject", "SUCCESS")]}
    wrapped: Results = {"headers": [("reject", "SUCCESS"), ("reject", "FAILURE")]}

    assert statuses(bare, wrapped, tmp_path) == [("headers / reject (2)", "SUCCESS", "FAILURE")]


def test_a_departure_is_let_through_and_missed_once_it_is_gone(tmp_path: Path) -> None:
    bare = outcome(tmp_path / "bare", {"sse": [("primes", "WARNING"), ("retry", "SUCCESS")]})
    wrapped = outcome(tmp_path / "ours", {"sse": [("primes", "SUCCESS"), ("retry", "SUCCESS")]})
    meant = Departure("sse", "primes", "WARNING", "SUCCESS")
    stale = Departure("sse", "retry", "WARNING", "SUCCESS")
    inverse = Departure("sse", "primes", "SUCCESS", "WARNING")

    assert differences(bare, wrapped, but=[meant, stale]) == ([], [stale])
    found, gone = differences(bare, wrapped, but=[inverse])
    assert [difference.name for difference in found] == [CheckName("sse", "primes", 1)]
    assert gone == [inverse]
