"""The optional vectors about conversations: ours passes, and each has caught a broken server."""

from collections.abc import Generator
from dataclasses import replace

import pytest

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.faults import conversations, handles
from mcp_sessions_conformance.loader import load_optional_vectors
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.runner import play_one, why_not
from mcp_sessions_conformance.targets import Credentials, UrlWay
from scripts.spec_generated import clauses
from tests.conformance.conftest import QUICK, behind_fault_proxy, served, way

WAYS = ("http/handshake", "http/modern", "websocket/handshake", "websocket/modern")
CAUGHT_BY = (*conversations.CAUGHT_BY, *handles.CAUGHT_BY)
VECTORS = {vector.id: vector for vector in load_optional_vectors("conversations")}


@pytest.fixture(scope="module")
def bound_url() -> Generator[str]:
    """The endpoint of the good server, which binds conversations."""
    with served(CONFORMANCE_CONVERSATIONS="1") as url:
        yield url


@pytest.fixture(scope="module")
def anonymous_url() -> Generator[str]:
    unowned = {f"CONFORMANCE_{name}TOKEN": "" for name in ("", "OTHER_", "WEAK_")}
    with served(CONFORMANCE_CONVERSATIONS="1", **unowned) as url:
        yield url


def test_they_are_what_the_schema_asks_for() -> None:
    checked = load_optional_vectors("conversations", checked=True)
    assert {vector.id: vector for vector in checked} == VECTORS and VECTORS


def test_they_prove_clauses_that_there_are_as_strongly() -> None:
    known = {clause.id: clause for clause in clauses()}
    for vector in VECTORS.values():
        levels = {known[clause].keyword for clause in vector.clauses}
        assert vector.keyword in levels, vector.id


@pytest.mark.parametrize("name", WAYS)
async def test_our_server_passes_them(name: str, bound_url: str) -> None:
    here = way(name, bound_url, Limits(wait=15.0))
    await check_all(here, 3)


@pytest.mark.parametrize("name", WAYS)
async def test_our_server_passes_those_about_nobody(name: str, anonymous_url: str) -> None:
    here = replace(way(name, anonymous_url, Limits(wait=15.0)), credentials=Credentials())
    await check_all(here, 5)


async def check_all(here: UrlWay, most_left_out: int) -> None:
    """All that are for this way pass; what is not says why."""
    left_out = [why_not(v, here, None) for v in VECTORS.values()]
    assert len(list(filter(None, left_out))) <= most_left_out
    for vector, why in zip(VECTORS.values(), left_out, strict=True):
        if why is not None:
            assert why.startswith("it "), vector.id
            continue
        outcome = await play_one(vector, here, None, here.limits)
        assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


def test_each_has_a_fault_that_it_catches() -> None:
    assert {vector for _, vector in CAUGHT_BY} == VECTORS.keys()
    assert len({fault.name for fault, _ in CAUGHT_BY}) == len(CAUGHT_BY)


@pytest.mark.parametrize(
    ("broken", "vector_id"), CAUGHT_BY, ids=[fault.name for fault, _ in CAUGHT_BY]
)
async def test_a_broken_server_is_caught(
    broken: Fault, vector_id: str, bound_url: str, anonymous_url: str
) -> None:
    vector = VECTORS[vector_id]
    async with behind_fault_proxy(anonymous_url if vector.when.anonymous else bound_url) as (
        app,
        url,
    ):
        here = way(WAYS[0], url, QUICK)
        if vector.when.anonymous:
            here = replace(here, credentials=Credentials())
        app.use(broken)
        outcome = await play_one(vector, here, None, QUICK)
    assert outcome.verdict == vector.severity, f"{vector.id} survives {broken.name}"
    assert "runner.py" not in outcome.sentence and "play.py" not in outcome.sentence


SAMPLE = ("aborts",)
"""The part of the next that the fast run tries; each is all vectors once."""

NARROW = ("believes-strangers", "aborts", "goes-on", "wants-a-header", "serves-the-dead")


@pytest.mark.parametrize(
    ("broken", "vector_id"),
    [
        pytest.param(
            *each, id=each[0].name, marks=[pytest.mark.full] * (each[0].name not in SAMPLE)
        )
        for each in CAUGHT_BY
        if each[0].name in NARROW
    ],
)
async def test_what_is_wrong_in_one_thing_is_caught_by_nothing_else(
    broken: Fault, vector_id: str, bound_url: str
) -> None:
    async with behind_fault_proxy(bound_url) as (app, url):
        here = way(WAYS[0], url, Limits(wait=15.0))
        app.use(broken)
        for vector in VECTORS.values():
            if vector.id != vector_id and why_not(vector, here, None) is None:
                outcome = await play_one(vector, here, None, here.limits)
                assert outcome.verdict == "passed", f"{broken.name}: {outcome.sentence}"


async def test_a_server_that_binds_none_fails_them(server_url: str) -> None:
    here = way("http/modern", server_url, QUICK)
    outcome = await play_one(VECTORS["a-conversation-is-one-session"], here, None, QUICK)
    assert outcome.verdict == "failure"
