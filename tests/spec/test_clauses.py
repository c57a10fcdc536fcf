"""The clauses of ``spec/``: their form, their index, and the state diagram."""

import re

import pytest

from mcp_sessions.core.states import TRANSITIONS, Change, State
from scripts.spec_checklists import STAGES, WAYS, ids, ways_of
from scripts.spec_generated import GENERATED, LEVEL, SPEC, clauses, levels
from scripts.spec_withdrawn import mapped, withdrawn
from tests.support.specification import ROOT

CLAUSES = clauses()
SOURCES = ("Decided here", "Core", "Document")
CITED = re.compile(r"\b([A-Z]{3})([1-9][0-9]*)\b(?: to ([A-Z]{3})([1-9][0-9]*)\b)?")
OTHERS = {"AES256", "SHA256"}
"""What looks like the id of a clause and is none."""

RETIRED = withdrawn()
"""Ids of clauses that were withdrawn, each with the clause that says it now. None is used again."""


def cited_in(text: str) -> set[str]:
    """The ids that a text cites; ``CUP1 to CUP3`` cites three."""
    ids: set[str] = set()
    for prefix, first, _, last in CITED.findall(text):
        ids.update(f"{prefix}{n}" for n in range(int(first), int(last or first) + 1))
    return ids


def test_there_are_clauses() -> None:
    """Else all that follows would hold of nothing."""
    assert len(CLAUSES) > 200


def test_an_id_names_one_clause() -> None:
    ids = [clause.id for clause in CLAUSES]
    assert len(set(ids)) == len(ids)
    assert not RETIRED.keys() & set(ids)


def test_the_clauses_of_a_section_are_numbered_without_a_gap() -> None:
    """A gap is a clause that was withdrawn: it is in `RETIRED`, so that its id stays used."""
    of_prefix: dict[str, list[int]] = {}
    for clause_id in [*(clause.id for clause in CLAUSES), *RETIRED]:
        of_prefix.setdefault(clause_id[:3], []).append(int(clause_id[3:]))
    for prefix, numbers in of_prefix.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), prefix


def test_a_withdrawn_clause_is_said_by_one_that_is_there() -> None:
    assert RETIRED
    assert set(RETIRED.values()) <= {clause.id for clause in CLAUSES}


def test_a_citation_of_a_withdrawn_clause_becomes_one_of_the_clause_that_says_it() -> None:
    now = {"AAA2": "AAA1", "AAA3": "AAA1", "BBB1": "AAA1"}
    assert mapped("(AAA1, AAA2, AAA3), AAA21 and BBB1", now) == "(AAA1), AAA21 and AAA1"
    assert mapped('["AAA3", "CCC1", "AAA1"]', now) == '["AAA1", "CCC1"]'
    assert mapped("AAA1 to AAA3", now) == "AAA1 to AAA3"


def test_a_prefix_belongs_to_one_section_of_one_file() -> None:
    positions: dict[str, set[tuple[str, str]]] = {}
    for clause in CLAUSES:
        positions.setdefault(clause.id[:3], set()).add((clause.file, clause.section))
    for prefix, found in positions.items():
        assert len(found) == 1, (prefix, found)
        assert {section for _, section in found} == {prefix}


def test_a_clause_says_whom_it_binds_and_how_strongly() -> None:
    for clause in CLAUSES:
        assert clause.party in ("server", "client", "both"), clause.id
        assert clause.keyword in ("MUST", "SHOULD", "MAY"), clause.id
        assert "" not in clause.keywords, f"{clause.id}: a keyword is bold, and on one line"
        other = re.search(r"\b(SHALL|REQUIRED|RECOMMENDED)\b", clause.text)
        assert not other, f"{clause.id}: one word per level"


def test_a_reason_is_never_a_rule() -> None:
    """Keywords stand in the rule; what follows says where it comes from."""
    for clause in CLAUSES:
        reasons = clause.text.removeprefix(clause.rule)
        assert not re.search(r"\b(MUST|SHOULD|MAY|OPTIONAL)\b", reasons), clause.id
        for part in filter(None, reasons.split("\n\n")):
            assert re.match(rf"\*({'|'.join(SOURCES)}):\* \S", part), (clause.id, part)


@pytest.mark.parametrize("path", sorted(SPEC.glob("*.md")), ids=lambda path: path.name)
def test_a_clause_that_is_cited_exists(path: object) -> None:
    known = {clause.id for clause in CLAUSES}
    prefixes = {clause_id[:3] for clause_id in known}
    text = re.sub(r"^#### .*$", "", (SPEC / str(path)).read_text(), flags=re.MULTILINE)
    cited = {clause_id for clause_id in cited_in(text) if clause_id[:3] in prefixes}
    assert cited <= known, sorted(cited - known)


def test_citations_are_recognised() -> None:
    assert cited_in("see CUP1 to CUP3, (SES1) and RES10.") == {
        *("CUP1", "CUP2", "CUP3", "SES1", "RES10")
    }


def test_clients_find_all_that_binds_them_in_one_list() -> None:
    """``client.md`` names each clause of another file that binds a client."""
    opening = (SPEC / "client.md").read_text().split("```")[0]
    listed = cited_in(opening)
    bound = {clause.id for clause in CLAUSES if clause.party == "client" and clause.id[:3] != "CLI"}
    both = {clause.id for clause in CLAUSES if clause.party == "both"}
    assert bound <= listed, sorted(bound - listed)
    assert listed <= bound | both | {"RES12", "SLS4"}, sorted(listed - bound - both)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_current(name: str) -> None:
    """``python -m scripts.spec_generated`` writes them."""
    assert (SPEC / name).read_text(encoding="utf-8") == GENERATED[name]()


def test_every_clause_has_one_level() -> None:
    rows = LEVEL.findall((SPEC / "levels.md").read_text())
    listed = [clause for _, row in rows for clause in ids(row)]
    assert sorted(listed) == sorted(clause.id for clause in CLAUSES)
    assert [name for name, _ in rows] == [
        *("resume", "calls", "data", "full"),
        *("conversations", "routing", "stateless"),
    ]


def test_every_clause_of_a_server_is_in_a_checklist() -> None:
    listed = [c for _, stage in STAGES for c in ids(stage)]
    assert len(set(listed)) == len(listed)
    bound = {clause.id for clause in CLAUSES if clause.party != "client"}
    others = {clause.id for clause in CLAUSES if clause.party == "both" and clause.keyword == "MAY"}
    assert bound - others <= set(listed), sorted(bound - others - set(listed))
    assert set(listed) <= bound, sorted(set(listed) - bound)


def test_the_first_level_is_small_for_one_transport_of_one_era() -> None:
    """Who begins reads this many clauses."""
    of_level = levels()
    for way, most in {"h": 135, "m": 120, "w": 135, "p": 125}.items():
        first = [
            clause.id
            for clause in CLAUSES
            if of_level[clause.id] == "resume"
            and clause.keyword == "MUST"
            and clause.party != "client"
            and way in ways_of(clause.id)
        ]
        assert len(first) <= most, (WAYS[way], len(first))


@pytest.mark.parametrize(
    ("prefix", "ways"), [("HTL", "h"), ("HTM", "mwp"), ("WSS", "wp"), ("STD", "p"), ("HTP", "hmwp")]
)
def test_a_clause_of_a_transport_is_about_that_one(prefix: str, ways: str) -> None:
    """Some of ``listen`` hold on every connection of the modern era, some frames are lines, too."""
    found = {w for c in CLAUSES if c.id.startswith(prefix) for w in ways_of(c.id)}
    assert found == set(ways)


def test_the_diagram_has_every_transition_of_the_code_and_no_other() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): (\w+)$", (SPEC / "states.md").read_text(), re.M)
    assert {(State(before), Change(change)): State(after) for before, after, change in drawn} == (
        dict(TRANSITIONS)
    )
    assert len(drawn) == len(TRANSITIONS)


def test_links_between_the_files_lead_somewhere() -> None:
    for path in [
        *SPEC.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
    ]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_no_diagram_breaks_off_at_a_semicolon() -> None:
    """Mermaid ends a statement there; a diagram with one is shown as an error."""
    diagrams = [
        diagram
        for path in SPEC.glob("*.md")
        for diagram in re.findall(r"```mermaid\n(.*?)```", path.read_text(), re.DOTALL)
    ]
    assert len(diagrams) > 10
    assert [diagram for diagram in diagrams if ";" in diagram] == []
