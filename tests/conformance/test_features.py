"""A feature that a server says it leaves out is not tested."""

from typing import Any

import pytest

from mcp_sessions_conformance.fault import Case, Fault
from mcp_sessions_conformance.faults.shared_faults import DESCRIBE, Edit, in_results
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.report import as_text
from mcp_sessions_conformance.runner import Run, Selection, run
from mcp_sessions_conformance.targets import parse_target
from mcp_sessions_conformance.values import EXTENSION, Json
from tests.conformance.conftest import CREDENTIALS, behind_fault_proxy

KEYED = "a-known-key-never-runs-again"
SETTINGS = frozenset(
    {"settings-are-advertised-in-initialize", "settings-are-advertised-in-discover"}
)
ONLY = Selection(
    only=SETTINGS | {"start-answers-with-an-id", KEYED, "the-bounds-of-keys-are-advertised"}
)
"""What looks at the settings. The proxy changes no method: others would find that it lies."""


def _settings(result: Json) -> dict[str, Any]:
    return result["capabilities"]["extensions"][EXTENSION]


def _without_keys(result: Json, case: Case) -> None:
    del _settings(result)["requestKeys"]
    _settings(result)["features"].remove("requestKey")


def _without_start(result: Json, case: Case) -> None:
    del _settings(result)["window"]
    _settings(result)["features"] = ["create", "delete", "state"]


def _without_a_word(result: Json, case: Case) -> None:
    del _settings(result)["features"]


def _garbled(result: Json, case: Case) -> None:
    _settings(result)["features"] = ["start", 5, {}]


def _none(result: Json, case: Case) -> None:
    _settings(result)["features"] = []


async def played(change: Edit, server_url: str, vectors: list[Vector]) -> Run:
    """The outcome of a server that advertises something else, over HTTP in both eras."""
    fault = Fault(
        "advertises-other", "advertises other features", to_client=in_results(DESCRIBE, change)
    )
    async with behind_fault_proxy(server_url) as (proxy, url):
        proxy.use(fault)
        return await run([parse_target(url)], vectors, selection=ONLY, credentials=CREDENTIALS)


def left_out(done: Run) -> dict[str, str]:
    """The vectors that were not selected for want of a feature, and the reasons."""
    said = "the server does not advertise"
    return {e.vector.id: e.reason for e in done.not_selected if e.reason.startswith(said)}


async def test_a_server_without_request_keys_is_conformant(
    server_url: str, vectors: list[Vector]
) -> None:
    """CAP3. The report says what it lacks."""
    done = await played(_without_keys, server_url, vectors)
    assert done.is_conformant, as_text(done)
    assert set(left_out(done)) == {KEYED, "the-bounds-of-keys-are-advertised"}
    assert "http/modern: the server does not advertise requestKey" in as_text(done)


async def test_a_server_without_session_start_is_asked_for_what_it_has(
    server_url: str, vectors: list[Vector]
) -> None:
    """SLS1. A server without a store has no window either."""
    done = await played(_without_start, server_url, vectors)
    assert done.is_conformant, as_text(done)
    assert left_out(done)[KEYED] == "the server does not advertise requestKey, start"
    assert {o.vector.id for o in done.outcomes} == SETTINGS


@pytest.mark.parametrize("change", [_garbled, _none])
async def test_what_is_no_list_of_features_leaves_nothing_out(
    change: Edit, server_url: str, vectors: list[Vector]
) -> None:
    assert left_out(await played(change, server_url, vectors)) == {}


async def test_who_says_nothing_of_features_is_asked_for_everything(
    server_url: str, vectors: list[Vector]
) -> None:
    """CAP3. To say nothing is no way to pass."""
    done = await played(_without_a_word, server_url, vectors)
    assert left_out(done) == {}
    assert not done.is_conformant
    assert {o.vector.id for o in done.outcomes if o.verdict == "failure"} == SETTINGS
