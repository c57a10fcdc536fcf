"""Servers next to the tested one, and those of one era: what there is not is asked of nobody."""

import asyncio

import pytest

from mcp_sessions_conformance import runner
from mcp_sessions_conformance.fault import Case, Fault, Late
from mcp_sessions_conformance.faults.shared_faults import answer, refuse, said, tool
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.report import as_text
from mcp_sessions_conformance.runner import Outcome, Run, Selection, run
from mcp_sessions_conformance.targets import parse_target
from mcp_sessions_conformance.values import Json
from tests.conformance.conftest import CREDENTIALS, behind_fault_proxy

STATELESS = "the-token-is-the-state"
DRAINING = "a-draining-server-refuses-new-requests"


def _knows_no_such_tool(case: Case) -> list[Json | Late] | None:
    if tool(case.message) != "beside":
        return None
    case.answers.append(refuse(case.message, -32602, "Unknown tool"))
    return []


def _has_one_kind(case: Case) -> list[Json | Late] | None:
    if tool(case.asked) != "beside" or case.asked is None:
        return None
    return None if case.asked["params"]["arguments"] else [answer(case.message, said("draining"))]


async def played(fault: Fault, server_url: str, vectors: list[Vector]) -> Run:
    """The outcome of two vectors about servers next to this one, over HTTP in the modern era."""
    only = Selection(eras=frozenset({"modern"}), only=frozenset({STATELESS, DRAINING}))
    async with behind_fault_proxy(server_url) as (proxy, url):
        proxy.use(fault)
        return await run([parse_target(url)], vectors, selection=only, credentials=CREDENTIALS)


async def test_a_server_without_other_servers_is_not_asked_for_them(
    server_url: str, vectors: list[Vector]
) -> None:
    fault = Fault("alone", "has no such tool", to_server=_knows_no_such_tool)
    done = await played(fault, server_url, vectors)
    assert not done.outcomes and not done.not_played
    reasons = {entry.vector.id: entry.reason for entry in done.not_selected}
    assert reasons == {
        STATELESS: "the server starts no other one that is stateless",
        DRAINING: "the server starts no other one that is draining",
    }
    assert "the server starts no other one that is draining" in as_text(done)


async def test_of_the_kinds_those_that_there_are_are_played(
    server_url: str, vectors: list[Vector]
) -> None:
    fault = Fault("one-kind", "starts no server without a store", to_client=_has_one_kind)
    done = await played(fault, server_url, vectors)
    assert [(o.vector.id, o.verdict) for o in done.outcomes] == [(DRAINING, "passed")]
    assert [entry.vector.id for entry in done.not_selected] == [STATELESS]
    assert done.is_conformant


async def test_a_server_of_one_era_is_not_asked_for_the_other(
    server_url: str, vectors: list[Vector]
) -> None:
    """HTP1: to it, the other era is a version that it does not support."""
    both = {vector.id for vector in vectors if vector.when.both_eras}
    assert "one-endpoint-both-eras" in both
    only = Selection(eras=frozenset({"handshake"}), only=frozenset(both))
    done = await run([parse_target(server_url)], vectors, selection=only, credentials=CREDENTIALS)
    assert not done.outcomes
    reasons = {entry.vector.id: entry.reason for entry in done.not_selected}
    assert reasons == dict.fromkeys(both, "it speaks both eras, and one was asked for")


async def test_a_vector_with_a_server_of_its_own_is_played_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, server_url: str, vectors: list[Vector]
) -> None:
    """It mostly waits, and no other vector reaches its server."""
    expired, plain = "what-is-too-old-is-expired", "start-answers-with-an-id"
    has_begun = asyncio.Event()

    async def play(vector: Vector, *_: object) -> Outcome:
        if vector.id == plain:
            has_begun.set()
        async with asyncio.timeout(10):
            await has_begun.wait()
        return Outcome(vector, "here", "passed")

    monkeypatch.setattr(runner, "play_one", play)
    # The one that waits is the first.
    chosen = sorted((v for v in vectors if v.id in (expired, plain)), key=lambda v: v.id == plain)
    assert [vector.id for vector in chosen] == [expired, plain]
    only = Selection(eras=frozenset({"handshake"}))
    done = await run([parse_target(server_url)], chosen, selection=only, credentials=CREDENTIALS)
    assert {outcome.vector.id for outcome in done.outcomes} == {expired, plain}
    assert done.is_conformant
