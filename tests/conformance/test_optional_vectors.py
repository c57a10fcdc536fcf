"""The optional vectors: ours passes, and each has caught a broken server."""

from collections.abc import Generator
from dataclasses import replace

import pytest

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.faults import conversations, handles, tasks
from mcp_sessions_conformance.loader import load_optional_vectors
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.runner import play_one, why_not
from mcp_sessions_conformance.targets import Credentials, UrlWay
from scripts.spec_generated import clauses
from tests.conformance.conftest import QUICK, behind_fault_proxy, served, way

WAYS = ("http/handshake", "http/modern", "websocket/handshake", "websocket/modern")
CAUGHT_BY = {
    "conversations": (*conversations.CAUGHT_BY, *handles.CAUGHT_BY),
    "tasks": tasks.CAUGHT_BY,
}
VECTORS = {
    about: {vector.id: vector for vector in load_optional_vectors(about)} for about in CAUGHT_BY
}
CASES = [
    pytest.param(about, *each, id=each[0].name)
    for about, all_of in CAUGHT_BY.items()
    for each in all_of
]
each_kind = pytest.mark.parametrize("about", CAUGHT_BY)


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


@each_kind
def test_they_are_what_the_schema_asks_for(about: str) -> None:
    checked = load_optional_vectors(about, checked=True)
    assert {vector.id: vector for vector in checked} == VECTORS[about] and VECTORS[about]


@each_kind
def test_they_prove_clauses_that_there_are_as_strongly(about: str) -> None:
    known = {clause.id: clause for clause in clauses()}
    for vector in VECTORS[about].values():
        said = [known[clause] for clause in vector.clauses]
        if about == "tasks":
            assert f"**{vector.keyword}" in said[0].text, vector.id
        else:
            assert vector.keyword in {clause.keyword for clause in said}, vector.id


@pytest.mark.parametrize("name", WAYS)
async def test_our_server_passes_them(name: str, bound_url: str) -> None:
    here = way(name, bound_url, Limits(wait=15.0))
    await check_all(here, "conversations", 3)


@pytest.mark.parametrize("name", WAYS)
async def test_our_server_passes_those_about_nobody(name: str, anonymous_url: str) -> None:
    here = replace(way(name, anonymous_url, Limits(wait=15.0)), credentials=Credentials())
    await check_all(here, "conversations", 5)


@pytest.mark.parametrize("name", [name for name in WAYS if name.endswith("modern")])
async def test_our_server_passes_those_about_tasks(name: str, server_url: str) -> None:
    await check_all(way(name, server_url, Limits(wait=15.0)), "tasks", 0)


async def check_all(here: UrlWay, about: str, most_left_out: int) -> None:
    """All that are for this way pass; what is not says why."""
    left_out = [why_not(v, here, None) for v in VECTORS[about].values()]
    assert len(list(filter(None, left_out))) <= most_left_out
    for vector, why in zip(VECTORS[about].values(), left_out, strict=True):
        if why is not None:
            assert why.startswith("it "), vector.id
            continue
        outcome = await play_one(vector, here, None, here.limits)
        assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


@each_kind
def test_each_has_a_fault_that_it_catches(about: str) -> None:
    assert {vector for _, vector in CAUGHT_BY[about]} == VECTORS[about].keys()
    assert len({fault.name for fault, _ in CAUGHT_BY[about]}) == len(CAUGHT_BY[about])


@pytest.mark.parametrize(("about", "broken", "vector_id"), CASES)
async def test_a_broken_server_is_caught(
    about: str, broken: Fault, vector_id: str, request: pytest.FixtureRequest
) -> None:
    vector = VECTORS[about][vector_id]
    server = {"tasks": "server_url"}.get(about, "bound_url")
    upstream = request.getfixturevalue("anonymous_url" if vector.when.anonymous else server)
    async with behind_fault_proxy(upstream) as (app, url):
        here = way("http/modern" if about == "tasks" else WAYS[0], url, QUICK)
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
        for each in CAUGHT_BY["conversations"]
        if each[0].name in NARROW
    ],
)
async def test_what_is_wrong_in_one_thing_is_caught_by_nothing_else(
    broken: Fault, vector_id: str, bound_url: str
) -> None:
    async with behind_fault_proxy(bound_url) as (app, url):
        here = way(WAYS[0], url, Limits(wait=15.0))
        app.use(broken)
        for vector in VECTORS["conversations"].values():
            if vector.id != vector_id and why_not(vector, here, None) is None:
                outcome = await play_one(vector, here, None, here.limits)
                assert outcome.verdict == "passed", f"{broken.name}: {outcome.sentence}"


async def test_a_server_that_binds_none_fails_them(server_url: str) -> None:
    here = way("http/modern", server_url, QUICK)
    outcome = await play_one(
        VECTORS["conversations"]["a-conversation-is-one-session"], here, None, QUICK
    )
    assert outcome.verdict == "failure"
