"""Each violation of the example servers can be played; see `tests.conformance.violations`."""

import argparse
import json

import pytest

from mcp_sessions_conformance.loader import level_of, load_vectors
from tests.conformance.violations import EXAMPLES, JAVASCRIPT, Example, liberties, load
from tests.conformance.violations.__main__ import play
from tests.interop.environments import ROOT

SAMPLE = 37
"""Every so many violations of the example in JavaScript are played."""

of_each_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


@of_each_example
def test_each_violation_is_of_a_clause_and_applies_to_the_server_as_it_is(example: Example) -> None:
    clauses = json.loads((ROOT / "spec" / "clauses.json").read_text("utf-8"))
    known = {clause["id"] for clause in clauses}
    violations = load(example)

    assert len({violation.name for violation in violations}) == len(violations)
    for violation in violations:
        assert violation.clause in known, violation.name
        assert violation.edited(), violation.name


@of_each_example
def test_what_catches_a_violation_is_a_vector(example: Example) -> None:
    vectors = {vector.id for vector in load_vectors()}
    assert {v.caught_by for v in load(example) if v.caught_by is not None} <= vectors


@of_each_example
def test_nearly_all_violations_that_can_show_are_caught(example: Example) -> None:
    violations = load(example)
    shown = [violation for violation in violations if not violation.cannot_show]
    caught = [violation for violation in shown if violation.caught_by is not None]
    assert len(caught) >= 0.97 * len(shown)
    for violation in violations:
        assert violation.caught_by is None or not violation.cannot_show, violation.name
        assert not violation.cannot_show or violation.cannot_show.endswith("."), violation.name


@of_each_example
def test_what_catches_a_violation_of_the_first_level_names_its_clause(example: Example) -> None:
    """``caughtBy`` is what ``--only CLAUSE`` plays, and its report names the clause as broken."""
    cited = {vector.id: vector.clauses for vector in load_vectors()}
    first = [each for each in load(example) if level_of()[each.clause] == "resume"]
    caught = [violation for violation in first if violation.caught_by is not None]
    for violation in caught:
        assert violation.clause in cited[str(violation.caught_by)], violation.name
    named = [violation for violation in caught if not violation.named]
    assert len(named) >= 0.97 * len(caught)


def test_each_clause_of_the_first_level_is_violated_twice() -> None:
    """By one server or the other; what a server only may do has no violation."""
    clauses = json.loads((ROOT / "spec" / "clauses.json").read_text("utf-8"))
    bound = {
        clause["id"]
        for clause in clauses
        if clause["level"] == "resume"
        and clause["party"] != "client"
        and clause["keyword"] == "MUST"
    }
    made = [violation.clause for example in EXAMPLES.values() for violation in load(example)]
    assert {clause for clause in bound if made.count(clause) < 2} == NOT_VIOLATED


NOT_VIOLATED = {"SEC1", "SEC2", "STA6"}
"""About what nobody sees (SEC1, SEC2), and about servers without this level (STA6)."""


def test_each_liberty_applies_to_the_server_as_it_is() -> None:
    for liberty in liberties():
        assert liberty.edited(), liberty.name


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_sample_of_the_violations_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m tests.conformance.violations --example javascript`` plays them all."""
    caught = [violation for violation in load(JAVASCRIPT) if violation.caught_by is not None]
    asked = argparse.Namespace(
        example="javascript", clause=False, jobs=2, only=[], said=True, why=False, write=False
    )
    assert await play(caught[::SAMPLE], asked) == []
    assert "MISSED" not in capsys.readouterr().out
