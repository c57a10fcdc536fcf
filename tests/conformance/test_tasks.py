"""The optional vectors about tasks: ours passes, and each has caught a broken server."""

import pytest

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.faults.tasks import CAUGHT_BY
from mcp_sessions_conformance.loader import load_optional_vectors
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.runner import play_one, why_not
from scripts.spec_generated import clauses
from tests.conformance.conftest import QUICK, behind_fault_proxy, way

WAYS = ("http/modern", "websocket/modern")
VECTORS = {vector.id: vector for vector in load_optional_vectors("tasks")}


def test_they_are_what_the_schema_asks_for() -> None:
    checked = load_optional_vectors("tasks", checked=True)
    assert {vector.id: vector for vector in checked} == VECTORS and VECTORS


def test_they_prove_clauses_that_there_are_as_strongly() -> None:
    known = {clause.id: clause for clause in clauses()}
    for vector in VECTORS.values():
        text = known[vector.clauses[0]].text
        assert f"**{vector.keyword}" in text, vector.id


@pytest.mark.parametrize("name", WAYS)
async def test_our_server_passes_them(name: str, server_url: str) -> None:
    here = way(name, server_url, Limits(wait=15.0))
    for vector in VECTORS.values():
        assert why_not(vector, here, None) is None, vector.id
        outcome = await play_one(vector, here, None, here.limits)
        assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


def test_each_has_a_fault_that_it_catches() -> None:
    assert {vector for _, vector in CAUGHT_BY} == VECTORS.keys()
    assert len({fault.name for fault, _ in CAUGHT_BY}) == len(CAUGHT_BY)


@pytest.mark.parametrize(
    ("broken", "vector_id"), CAUGHT_BY, ids=[fault.name for fault, _ in CAUGHT_BY]
)
async def test_a_broken_server_is_caught(broken: Fault, vector_id: str, server_url: str) -> None:
    vector = VECTORS[vector_id]
    async with behind_fault_proxy(server_url) as (app, url):
        app.use(broken)
        outcome = await play_one(vector, way(WAYS[0], url, QUICK), None, QUICK)
    assert outcome.verdict == vector.severity, f"{vector.id} survives {broken.name}"
    assert "runner.py" not in outcome.sentence and "play.py" not in outcome.sentence
