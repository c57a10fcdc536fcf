"""From the documents' keywords to clauses, and from clauses to what checks them; and back.

``spec/requirements.json`` has every keyword of the two documents, each with its clauses.
``spec/coverage.json`` has every clause, each with its tests and vectors; a clause that no vector
can show says why (``noVector``). ``awaitingVector`` names the clauses whose vectors are still to be
written: exactly those, so that a vector that comes takes its clause from the list, and one
that goes puts it back.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from scripts.spec_generated import SPEC, VECTORS, clauses, clauses_of, vectors
from tests.support.specification import ROOT, Json, read

CLAUSES = {clause.id: clause for clause in clauses()}
REQUIREMENTS: list[Json] = read(SPEC / "requirements.json")
COVERAGE: Json = read(SPEC / "coverage.json")
ENTRIES: dict[str, Json] = COVERAGE["clauses"]

KEYWORDS = {
    ("MCP Session Elevation", "2025-09-13"): {"MUST": 15, "SHOULD": 3, "MAY": 12, "OPTIONAL": 1},
    ("Data-Layer Sessions for MCP", "2026-02-23"): {"MUST": 16, "SHOULD": 4, "MAY": 4},
}
"""How often each document has each word; a MUST NOT counts as a MUST."""


# --- the documents -----------------------------------------------------------------------------


def test_every_keyword_of_the_documents_is_a_requirement() -> None:
    counted: dict[tuple[str, str], Counter[str]] = {}
    for requirement in REQUIREMENTS:
        document = (requirement["document"], requirement["date"])
        level = requirement["level"].removesuffix(" NOT")
        counted.setdefault(document, Counter())[level] += 1
    assert counted == KEYWORDS


def test_a_requirement_is_identified_by_its_position() -> None:
    for document, _ in KEYWORDS:
        of_it = [r for r in REQUIREMENTS if r["document"] == document]
        assert [r["ordinal"] for r in of_it] == list(range(1, len(of_it) + 1))
        for requirement in of_it:
            assert requirement["id"].rpartition("-")[2] == str(requirement["ordinal"])
            assert requirement["section"] and requirement["says"]
    assert len({r["id"] for r in REQUIREMENTS}) == len(REQUIREMENTS)


AS_STRONG = {
    "MUST": {"MUST", "MUST NOT"},
    "MUST NOT": {"MUST NOT"},
    "SHOULD": {"SHOULD", "MUST"},
    "MAY": {"MAY"},
    "OPTIONAL": {"OPTIONAL"},
}
"""A clause may ask for more than its document, never for less."""


def test_a_requirement_has_clauses_that_are_as_strong() -> None:
    for requirement in REQUIREMENTS:
        assert requirement["clauses"], requirement["id"]
        for clause_id in requirement["clauses"]:
            assert clause_id in CLAUSES, clause_id
        words = {word for clause_id in requirement["clauses"] for word in keywords_of(clause_id)}
        assert words & AS_STRONG[requirement["level"]], requirement["id"]


def keywords_of(clause_id: str) -> set[str]:
    return set(CLAUSES[clause_id].keywords)


def test_a_clause_has_a_source() -> None:
    """A requirement of a document, the core protocol, a document's other words, or us."""
    required = {clause_id for r in REQUIREMENTS for clause_id in r["clauses"]}
    for clause in CLAUSES.values():
        has_source = re.search(r"\n\n\*(Decided here|Core|Document):\* ", clause.text)
        assert has_source or clause.id in required, clause.id


# --- what checks a clause ------------------------------------------------------------------------


def test_the_coverage_names_every_clause_and_no_other() -> None:
    assert list(ENTRIES) == list(CLAUSES), "in the order of spec/clauses.json"
    for clause_id, entry in ENTRIES.items():
        assert entry.keys() <= {"tests", "noTest", "vectors", "noVector"}, clause_id


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")
    )


def test_a_clause_is_checked_or_says_why_not() -> None:
    for clause_id, entry in ENTRIES.items():
        tests: list[str] = entry["tests"]
        for test in tests:
            path, _, name = test.partition("::")
            assert path.startswith("tests/") and (ROOT / path).is_file(), (clause_id, path)
            assert name in functions_of(ROOT / path), (clause_id, test)
        assert len(set(tests)) == len(tests), clause_id
        if "noTest" in entry:
            assert not tests and is_reason(entry["noTest"]), clause_id
        else:
            assert tests or clause_id in PROVED, f"{clause_id} is checked by nothing"


def is_reason(text: Any) -> bool:
    """Whether somebody wrote a sentence."""
    return isinstance(text, str) and len(text) > 10 and text.endswith(".")


# --- vectors -------------------------------------------------------------------------------------


PROVED = {clause_id for vector in vectors() for clause_id in clauses_of(vector)}
"""The clauses that have a vector."""


def test_a_vector_proves_clauses_that_exist() -> None:
    for vector in vectors():
        assert clauses_of(vector), vector["id"]
        for clause_id in clauses_of(vector):
            assert clause_id in CLAUSES, f"{vector['id']}: {clause_id}"


def test_a_vectors_severity_is_that_of_a_clause() -> None:
    for vector in vectors():
        words = {word for clause_id in clauses_of(vector) for word in keywords_of(clause_id)}
        # An OPTIONAL is nothing that fails, and a MUST NOT fails as a MUST does.
        assert vector["keyword"] in {word.removesuffix(" NOT") for word in words}, vector["id"]


def test_every_clause_has_a_vector_or_a_reason_or_awaits_one() -> None:
    reasons = {clause_id for clause_id, entry in ENTRIES.items() if "noVector" in entry}
    for clause_id in sorted(reasons):
        assert is_reason(ENTRIES[clause_id]["noVector"]), clause_id
    assert not reasons & PROVED, "a reason for no vector, and a vector"
    assert {clause_id for clause_id, entry in ENTRIES.items() if "vectors" in entry} == PROVED
    awaiting: list[str] = COVERAGE["awaitingVector"]
    missing = [clause_id for clause_id in CLAUSES if clause_id not in reasons | PROVED]
    # Exactly: `python -m scripts.spec_generated` writes the list, and the change is seen.
    assert awaiting == missing


def test_vectors_are_counted_where_they_are() -> None:
    """While there is no folder, every clause without a reason is on the list; once there is
    one, an empty folder is a mistake and not a success.
    """
    if VECTORS.exists():
        assert vectors(), "conformance/vectors holds no vector"
    else:
        assert COVERAGE["awaitingVector"]
