"""The optional vectors about conversations: ours passes, and each has caught a broken server."""

from collections.abc import Generator

import pytest

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.faults import conversations, handles
from mcp_sessions_conformance.loader import load_optional_vectors
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.runner import play_one, why_not
from scripts.spec_generated import clauses
from tests.conformance.conftest import QUICK, behind_fault_proxy, served, way

pytestmark = pytest.mark.anyio

WAYS = ("http/handshake", "http/modern", "websocket/handshake", "websocket/modern")
CAUGHT_BY = (*conversations.CAUGHT_BY, *handles.CAUGHT_BY)
VECTORS = {vector.id: vector for vector in load_optional_vectors()}


@pytest.fixture(scope="module")
def bound_url() -> Generator[str]:
    """The endpoint of the good server, which binds conversations."""
    with served(CONFORMANCE_CONVERSATIONS="1") as url:
        yield url


def test_they_are_what_the_schema_asks_for() -> None:
    checked = load_optional_vectors(checked=True)
    assert {vector.id: vector for vector in checked} == VECTORS and VECTORS


def test_they_prove_clauses_that_there_are_as_strongly() -> None:
    known = {clause.id: clause for clause in clauses()}
    for vector in VECTORS.values():
        levels = {known[clause].level for clause in vector.clauses}
        assert vector.keyword in levels, vector.id


@pytest.mark.parametrize("name", WAYS)
async def test_our_server_passes_them(name: str, bound_url: str) -> None:
    here = way(name, bound_url, Limits(wait=15.0))
    played = [v for v in VECTORS.values() if why_not(v, here, None) is None]
    assert len(played) >= len(VECTORS) - 1
    for vector in played:
        outcome = await play_one(vector, here, None, here.limits)
        assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


def test_each_has_a_fault_that_it_catches() -> None:
    assert {vector for _, vector in CAUGHT_BY} == VECTORS.keys()
    assert len({fault.name for fault, _ in CAUGHT_BY}) == len(CAUGHT_BY)


@pytest.mark.parametrize(
    ("broken", "vector_id"), CAUGHT_BY, ids=[fault.name for fault, _ in CAUGHT_BY]
)
async def test_a_broken_server_is_caught(broken: Fault, vector_id: str, bound_url: str) -> None:
    vector = VECTORS[vector_id]
    async with behind_fault_proxy(bound_url) as (app, url):
        here = way(WAYS[0], url, QUICK)
        app.use(broken)
        outcome = await play_one(vector, here, None, QUICK)
    assert outcome.verdict == vector.severity, f"{vector.id} survives {broken.name}"
    assert "runner.py" not in outcome.sentence and "play.py" not in outcome.sentence


async def test_a_server_that_binds_none_fails_them(server_url: str) -> None:
    here = way("http/modern", server_url, QUICK)
    outcome = await play_one(VECTORS["a-conversation-is-one-session"], here, None, QUICK)
    assert outcome.verdict == "failure"
