"""Every MUST that shows is proven: a server that breaks it, and as little else as can be, fails."""

import pytest

from mcp_sessions_conformance.faults import FAULTS
from mcp_sessions_conformance.loader import Vector, level_of
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.proven import Proof, musts_of, proofs
from mcp_sessions_conformance.runner import LeftOut, Outcome, Run, play_one, why_not
from mcp_sessions_conformance.targets import UrlWay
from scripts.spec_generated import clauses
from tests.conformance.conftest import QUICK, behind_fault_proxy, way
from tests.conformance.test_broken_servers import TABLE, WAYS

PROOFS = proofs()
SAMPLE = 23
"""Every so many are played in the fast run."""


def test_every_must_of_a_server_that_has_a_vector_is_proven(vectors: list[Vector]) -> None:
    known = {clause.id: clause for clause in clauses()}
    shown = {clause for vector in vectors for clause in vector.clauses}
    wanted = {c for c in shown if known[c].keyword == "MUST" and known[c].party != "client"}
    assert {proof.clause for proof in PROOFS} == wanted


def test_a_clause_of_the_first_level_is_proven_by_a_vector_of_that_level(
    vectors: list[Vector],
) -> None:
    """A run of ``--level resume`` says of each whether it holds."""
    first = {vector.id for vector in vectors if vector.level == "resume"}
    proven = {proof.clause for proof in PROOFS if proof.vector in first}
    wanted = {proof.clause for proof in PROOFS if level_of()[proof.clause] == "resume"}
    assert len(wanted) > 100
    assert wanted <= proven


def test_a_proof_is_by_a_vector_that_is_about_its_clause(vectors: list[Vector]) -> None:
    known = {vector.id: vector for vector in vectors}
    for proof in PROOFS:
        assert proof.clause in known[proof.vector].clauses, proof
        assert known[proof.vector].severity == "failure", proof
    assert len(set(PROOFS)) == len(PROOFS)


def test_every_fault_is_caught_by_something() -> None:
    assert {p.fault for p in PROOFS} | {fault for fault, _ in TABLE.values()} == FAULTS.keys()


async def check_proofs(chosen: list[Proof], upstream: str, vectors: list[Vector]) -> None:
    known = {vector.id: vector for vector in vectors}
    async with behind_fault_proxy(upstream) as (app, url):
        for proof in chosen:
            vector = known[proof.vector]
            if vector.when.transports == ("stdio",):
                # ``test_faults_of_a_pipe_are_caught`` plays it.
                continue
            ways = [way(name, url, QUICK) for name in WAYS if not name.startswith("stdio")]
            if proof.way is not None:
                ways = [way(proof.way, url, QUICK)]
            here = next(each for each in ways if why_not(vector, each, None) in (None, ""))
            other = way("http/handshake", url, QUICK) if vector.crosses else None
            app.use(FAULTS[proof.fault])
            outcome = await play_one(vector, here, other, QUICK)
            assert outcome.verdict == "failure", f"{proof} survives"
            assert proof.clause in outcome.clauses, f"{proof}: the report blames {outcome.clauses}"


async def test_a_sample_of_the_proofs_holds(server_url: str, vectors: list[Vector]) -> None:
    await check_proofs(PROOFS[::SAMPLE], server_url, vectors)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_every_proof_holds(server_url: str, vectors: list[Vector]) -> None:
    # What the table of the vectors plays anyway is played there.
    lines = {(vector, *fault) for vector, fault in TABLE.items()}
    more = [p for p in PROOFS if (p.vector, p.fault, p.way) not in lines]
    await check_proofs(more, server_url, vectors)


def test_a_run_says_which_musts_it_has_proven(vectors: list[Vector]) -> None:
    known = {vector.id: vector for vector in vectors}
    run = Run([])
    run.outcomes.append(Outcome(known["rule-1-the-named-session"], "here", "passed"))
    run.outcomes.append(Outcome(known["start-attaches"], "here", "failure", clauses=("ATT2",)))
    run.not_selected.append(LeftOut(known["a-binary-frame-closes-1003"], "here", "elsewhere"))
    musts = musts_of(run)
    assert (musts.proven, musts.failed) == (["ASC1"], ["ATT2"])
    assert (musts.not_played, musts.total) == (["WSS3", "WSS15"], 4)


async def test_a_vector_about_two_clauses_proves_the_one_that_it_catches(
    server_url: str, vectors: list[Vector]
) -> None:
    """A clause that is named by a vector which catches none of its violations stays open."""
    catching = {proof.vector for proof in PROOFS if proof.clause == "SEC7"}
    about = next(v for v in vectors if "SEC7" in v.clauses and v.id not in catching)
    here: UrlWay = way("http/handshake", server_url, Limits(wait=15.0))
    run = Run([], [await play_one(about, here, None, here.limits)])
    assert "SEC7" in musts_of(run).not_played
