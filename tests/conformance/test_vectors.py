"""The vectors themselves: well-formed, explained, and selected where they belong."""

import json
import re
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from mcp_sessions_conformance.broken_clients import CLIENT_CAUGHT_BY, CLIENT_FAULTS
from mcp_sessions_conformance.client_scenarios import SCENARIOS
from mcp_sessions_conformance.loader import (
    LEVELS,
    BadVectors,
    Vector,
    load_duties,
    load_vectors,
    vectors_directory,
)
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.runner import Selection, why_not
from mcp_sessions_conformance.targets import Credentials, Pipe, PipeWay, Target, UrlWay

REFERENCE = re.compile(r"\$\{(\w+)\}")
GIVEN = {
    "unique",
    "token",
    "other_token",
    "weak_token",
    "attempt",
    "a_connection",
    "b_connection",
    "port",
}
"""Names that the runner gives."""


def test_the_vectors_are_what_the_schema_asks_for(vectors: list[Vector]) -> None:
    """A folder that is named is checked; what comes along was, here."""
    assert load_vectors(vectors_directory()) == vectors
    assert load_duties(vectors_directory()) == load_duties()


def test_the_schema_is_a_schema() -> None:
    schema = json.loads((vectors_directory() / "vector.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)


def test_a_level_has_the_vectors_of_those_before_it_and_no_other(vectors: list[Vector]) -> None:
    known = {vector.id: vector for vector in vectors}
    assert known["nothing-missed-is-a-success"].level == "resume"
    assert known["the-bounds-of-keys-are-advertised"].level == "calls"
    assert known["create-answers-in-strings"].level == "data"
    chosen: set[str] = set()
    for count, level in enumerate(LEVELS, start=1):
        selection = Selection(levels=frozenset(LEVELS[:count]))
        more = {vector.id for vector in vectors if selection.admits(vector)} - chosen
        assert {known[vector].level for vector in more} == {level}
        chosen |= more
    assert {known[vector].level for vector in known.keys() - chosen} == {"stateless"}


def test_a_vector_of_the_first_level_needs_no_method_of_another(vectors: list[Vector]) -> None:
    """A server of level *resume* advertises these features only, and gets the whole level."""
    known = {vector.id: vector for vector in vectors}
    first = [vector for vector in vectors if vector.level == "resume"]
    assert len(first) > 200
    assert {feature for vector in first for feature in vector.features} == {
        "start",
        "resume",
        "end",
    }
    # Their clauses are of the first level.
    assert known["create-attaches"].level == "data"
    assert known["an-end-answers-a-keyed-request"].level == "calls"


def captured(step: dict[str, Any]) -> set[str]:
    names = {*step.get("capture", {}), step.get("to", ""), step.get("capture_place", "")}
    sse = step.get("capture_sse", {})
    return names | ({sse} if isinstance(sse, str) else set(cast("dict[str, int]", sse)))


def test_every_name_is_captured_before_it_is_used(vectors: list[Vector]) -> None:
    for vector in vectors:
        known = set(GIVEN)
        for step in vector.steps:
            used = set(REFERENCE.findall(json.dumps(step)))
            assert used <= known, f"{vector.id}: {used - known}"
            known |= captured(step)


def test_every_connection_is_opened_before_it_is_used(vectors: list[Vector]) -> None:
    for vector in vectors:
        opened: set[str] = set()
        for step in vector.steps:
            if step["step"] == "open":
                opened.add(step["on"])
            assert step.get("on") is None or step["on"] in opened, vector.id


def test_descriptions_say_what_is_so(vectors: list[Vector]) -> None:
    """Not what is tested, or what should be."""
    for rule in [*vectors, *load_duties()]:
        for text in (rule.description, rule.effect):
            assert not re.search(r"\b(should|test|verif|check that)", text, re.I), rule.id
            assert text.endswith("."), rule.id


def test_every_duty_has_a_script_and_a_fault() -> None:
    ids = {duty.id for duty in load_duties()}
    assert ids == SCENARIOS.keys() == CLIENT_CAUGHT_BY.keys()
    assert set(CLIENT_CAUGHT_BY.values()) == CLIENT_FAULTS.keys()


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    schema = (vectors_directory() / "vector.schema.json").read_text()
    (tmp_path / "vector.schema.json").write_text(schema)
    good = json.loads((vectors_directory() / "stdio.json").read_text())
    changes: tuple[dict[str, Any], ...]
    changes = ({"suite": None}, {"vectors": []}, {"more": 1})
    for change in changes:
        (tmp_path / "bad.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(BadVectors, match=r"bad\.json"):
            load_vectors(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadVectors, match="no JSON"):
        load_vectors(tmp_path)
    for name in ("bad", "again"):
        (tmp_path / f"{name}.json").write_text(json.dumps(good))
    with pytest.raises(BadVectors, match="two vectors"):
        load_vectors(tmp_path)


def test_what_does_not_apply_is_not_selected_and_says_why(vectors: list[Vector]) -> None:
    known = {vector.id: vector for vector in vectors}
    limits, no_client = Limits(), Credentials()
    http = UrlWay(Target("http", "http://h/mcp"), "handshake", limits, no_client)
    socket = UrlWay(Target("websocket", "ws://h/mcp"), "modern", limits, Credentials("a", "b"))
    pipe = PipeWay(Pipe(Target("stdio", "x"), limits), "handshake")

    def reason(vector_id: str, here: UrlWay | PipeWay, other: UrlWay | None = None) -> str | None:
        return why_not(known[vector_id], here, other)

    assert reason("start-answers-with-an-id", http) is None
    assert reason("messages-are-text-frames", http) == "it is about websocket"
    assert reason("events-wait-for-a-listen", http) == "it is about the modern era"
    assert reason("a-foreign-session-is-not-found", http) == (
        "it needs the credentials of two principals"
    )
    assert reason("a-foreign-session-is-not-found", socket) is None
    assert "a pipe is one" in str(reason("drop-then-resume", pipe))
    assert reason("and-moves-back", http) == ""
    assert reason("and-moves-back", http, socket) is None
    assert reason("start-answers-with-an-id", http, socket) == ""


def test_severity_follows_the_keyword(vectors: list[Vector]) -> None:
    for vector in vectors:
        assert vector.severity == ("failure" if vector.keyword == "MUST" else "warning")
    assert {vector.severity for vector in vectors} == {"failure", "warning"}
