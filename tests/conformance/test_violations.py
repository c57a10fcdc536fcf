"""Each violation of the example server can be played; see `tests.conformance.violations`."""

import json

from mcp_sessions_conformance.loader import load_vectors
from tests.conformance.violations import liberties, load
from tests.interop.environments import ROOT


def test_each_violation_is_of_a_clause_and_applies_to_the_server_as_it_is() -> None:
    clauses = json.loads((ROOT / "spec" / "clauses.json").read_text("utf-8"))
    known = {clause["id"] for clause in clauses}
    violations = load()

    assert len({violation.name for violation in violations}) == len(violations)
    for violation in violations:
        assert violation.clause in known, violation.name
        assert violation.edited(), violation.name


def test_what_catches_a_violation_is_a_vector() -> None:
    vectors = {vector.id for vector in load_vectors()}
    assert {v.caught_by for v in load() if v.caught_by is not None} <= vectors


def test_nineteen_of_twenty_violations_that_can_show_are_caught() -> None:
    violations = load()
    shown = [violation for violation in violations if not violation.cannot_show]
    caught = [violation for violation in shown if violation.caught_by is not None]
    assert len(caught) >= 0.95 * len(shown)
    for violation in violations:
        assert violation.caught_by is None or not violation.cannot_show, violation.name
        assert not violation.cannot_show or violation.cannot_show.endswith("."), violation.name


def test_each_liberty_applies_to_the_server_as_it_is() -> None:
    for liberty in liberties():
        assert liberty.edited(), liberty.name
