"""A step says which clause it checks, and a failure is reported under that clause."""

import pytest

from mcp_sessions_conformance.blame import blamed, checked, choices, missing
from mcp_sessions_conformance.faults import FAULTS
from mcp_sessions_conformance.loader import Vector, load_optional_vectors, load_vectors
from mcp_sessions_conformance.proven import musts_of
from mcp_sessions_conformance.report import as_json, as_text
from mcp_sessions_conformance.runner import Outcome, Run, Selection, play_one
from mcp_sessions_conformance.values import Json
from scripts.spec_generated import clauses
from tests.conformance.conftest import QUICK, behind_fault_proxy, way

EVERY = [*load_vectors(), *load_optional_vectors("conversations", "tasks")]
SESSION = "io.modelcontextprotocol/session"


@pytest.mark.parametrize("vector", EVERY, ids=lambda vector: vector.id)
def test_a_vector_cites_every_clause_that_its_steps_check(vector: Vector) -> None:
    assert missing(vector.steps, vector.clauses) == []


def test_what_a_step_checks_is_a_clause() -> None:
    known = {clause.id for clause in clauses()}
    found = {c for v in EVERY for step in v.steps for choice in choices(step) for c in choice}
    assert len(found) > 20
    assert found <= known


def test_only_with_a_clause_plays_all_that_checks_it() -> None:
    checking = {v.id for v in EVERY if any("TKO5" in checked(s, v.clauses) for s in v.steps)}
    played = {v.id for v in EVERY if Selection(only=frozenset({"TKO5"})).admits(v)}
    assert len(checking) > 5
    assert checking <= played
    # Also where it is not what the vector is about.
    assert "a-lost-position-detaches" in played


@pytest.mark.parametrize(
    ("step", "clause"),
    [
        ({"step": "send", "method": "tools/call", "error": {"code": -31010}}, "TKO5"),
        ({"step": "wait", "method": "tools/call", "error": {"code": -31044}}, "GAT2"),
        ({"step": "expect", "error": {"code": -32600, "data": {"reason": "key_reused"}}}, "KEY8"),
        ({"step": "frame", "refusal": {"error": {"code": -32700}}}, "WSS14"),
        ({"step": "http", "verb": "GET", "status": 421}, "SEC9"),
        ({"step": "http", "verb": "POST", "json": {"error": {"code": -32020}}}, "HTM11"),
        ({"step": "send", "method": "session/resume", "result": {"replayed": 2}}, "CUP3"),
        ({"step": "send", "method": "session/resume", "result": {"reason": "ahead"}}, "CUP8"),
        ({"step": "send", "method": "session/resume", "result": {"reason": "no_stream"}}, "RES12"),
        ({"step": "send", "method": "x", "result": {"_meta": {SESSION: {}}}}, "ASC12"),
        ({"step": "stream", "primed": True}, "HTL12"),
        ({"step": "ended", "code": 1009}, "WSS15"),
        ({"step": "collect", "clause": "ATT6", "events": []}, "ATT6"),
    ],
)
def test_an_expectation_says_its_clause(step: Json, clause: str) -> None:
    assert checked(step, [clause, "SES1"]) == [clause]
    # Another error is about the error alone; anything else is about what the vector is about, too.
    assert blamed(step, [step], ["SES1", clause], is_other_error=True) == [clause]
    expected = [clause] if "clause" in step else [clause, "SES1"]
    assert blamed(step, [step], ["SES1", clause]) == expected


def test_other_steps_check_what_the_vector_is_about() -> None:
    looks: Json = {"step": "silence", "on": "a"}
    other: Json = {"step": "send", "method": "tools/call", "error": {"code": -31010}}
    assert blamed(looks, [other, looks], ["TKO1", "TKO5"]) == ["TKO1"]
    # What a resume promised, the events after it keep.
    resume: Json = {"step": "send", "method": "session/resume", "result": {"replayed": 2}}
    assert blamed(looks, [resume, looks], ["EVT10", "CUP3"]) == ["CUP3", "EVT10"]
    # The close code of a shutdown is that of two clauses.
    closed: Json = {"step": "ended", "on": "a", "code": 1012}
    assert blamed(closed, [closed], ["WSS17", "WSS15"]) == ["WSS15", "WSS17"]
    # It is about what its only expectation says.
    assert blamed(looks, [other, looks], ["TKO5"]) == ["TKO5"]


def test_a_step_that_leads_to_others_breaks_the_clause_of_its_method() -> None:
    start: Json = {"step": "send", "method": "session/start", "params": {}, "capture": {}}
    looks: Json = {"step": "silence", "on": "a"}
    assert blamed(start, [start, looks], ["TKO1"]) == ["STA3"]


def test_a_server_beside_that_does_not_start_breaks_no_clause() -> None:
    beside: Json = {"step": "beside", "on": "a", "kind": "draining", "to": "url"}
    assert blamed(beside, [beside, {"step": "ended", "code": 1012}], ["WSS17", "WSS15"]) == []


def test_what_a_vector_did_not_come_to_is_not_proven(vectors: list[Vector]) -> None:
    """It failed at its first step: nothing is known of the clause that it is about."""
    known = {vector.id: vector for vector in vectors}
    begun = Outcome(known["start-attaches"], "here", "failure", "no", clauses=("STA3",))
    musts = musts_of(Run([], [begun]))
    assert (musts.proven, musts.failed, musts.not_played) == ([], [], ["ATT2"])


async def test_a_failure_is_reported_under_the_clause_that_is_broken(
    server_url: str, vectors: list[Vector]
) -> None:
    """The vector is about HTL9 and TKO3, too."""
    vector = next(v for v in vectors if v.id == "a-lost-position-detaches")
    assert {"HTL9", "TKO3", "TKO5"} <= set(vector.clauses)
    async with behind_fault_proxy(server_url) as (app, url):
        app.use(FAULTS["displaced-is-another-code"])
        outcome = await play_one(vector, way("http/handshake", url, QUICK), None, QUICK)
    run = Run([], [outcome])
    assert outcome.clauses == ("TKO5",)
    assert "broken  TKO5\n" in as_text(run)
    assert as_json(run)["outcomes"][0]["broken"] == ["TKO5"]
    assert musts_of(run).failed == ["TKO5"]
