"""Writes the parts of ``spec/`` that are generated: the state diagram from the code's table,
an index of the clauses for programs, which clauses still await a vector, how each MUST is
proven, the checklists, and a conversation as it goes over the wire.

``python -m scripts.spec_generated`` writes them; ``tests/spec/`` checks that they are current.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_sessions.core.states import BEGINS, TRANSITIONS, Change, State
from mcp_sessions_conformance.loader import load_duties
from mcp_sessions_conformance.proven import proofs
from scripts import spec_checklists, spec_walkthrough

SPEC = Path(__file__).parents[1] / "spec"
VECTORS = Path(__file__).parents[1] / "conformance" / "vectors"

BLOCK = re.compile(r"^(?=#{1,4} )", re.MULTILINE)
SECTION = re.compile(r"^## .* \(([A-Z]{3})\)$")
HEADING = re.compile(r"^#### ([A-Z]{3}[1-9][0-9]*): (.+)$")
KEYWORD = re.compile(
    r"\*\*(MUST NOT|MUST|SHOULD NOT|SHOULD|MAY|OPTIONAL)\*\*|\b(MUST|SHOULD|MAY|OPTIONAL)\b"
)
PARTY = re.compile(r"^\*(Server|Client|Both):\* ")
LEVEL = re.compile(r"^\| `([a-z]+)` \| .* \| ([^|]+) \|$", re.MULTILINE)
"""A row of ``levels.md``: a name, and clauses."""

STRENGTH = ("MUST", "SHOULD", "MAY")


@dataclass(frozen=True, slots=True)
class Clause:
    id: str
    title: str
    file: str
    section: str
    """The prefix that the section's heading names."""

    text: str
    """The paragraphs under its heading."""

    @property
    def party(self) -> str:
        """The party that it binds: ``server``, ``client`` or ``both``.

        Raises:
            ValueError: It does not say.
        """
        match = PARTY.match(self.text)
        if match is None:
            raise ValueError(f"{self.id} does not begin with whom it binds")
        return match[1].lower()

    @property
    def rule(self) -> str:
        return re.split(r"\n\n(?=\*(?:Decided here|Core|Document):\*)", self.text)[0]

    @property
    def keywords(self) -> list[str]:
        """The keywords of its rule, in order; one that is not bold has an empty name."""
        return [match[1] or "" for match in KEYWORD.finditer(self.rule)]

    @property
    def keyword(self) -> str:
        """``MUST``, ``SHOULD`` or ``MAY``: the strongest of its keywords.

        Raises:
            ValueError: It has none.
        """
        found = {keyword.removesuffix(" NOT") for keyword in self.keywords}
        found = {"MAY" if keyword == "OPTIONAL" else keyword for keyword in found}
        for keyword in STRENGTH:
            if keyword in found:
                return keyword
        raise ValueError(f"{self.id} has no keyword")

    @property
    def is_decided_here(self) -> bool:
        return "\n\n*Decided here:* " in self.text


def clauses(spec: Path = SPEC) -> list[Clause]:
    found: list[Clause] = []
    for path in sorted(spec.glob("*.md")):
        section = ""
        for block in BLOCK.split(path.read_text(encoding="utf-8")):
            heading, _, body = block.partition("\n")
            clause, named = HEADING.match(heading), SECTION.match(heading)
            if clause is not None:
                found.append(Clause(clause[1], clause[2], path.name, section, body.strip()))
            elif not heading.startswith("###"):
                section = named[1] if named is not None else ""
    return found


def levels(spec: Path = SPEC) -> dict[str, str]:
    """Clause → its level or option, in the order of ``levels.md``."""
    rows = LEVEL.findall((spec / "levels.md").read_text(encoding="utf-8"))
    return {clause: name for name, listed in rows for clause in spec_checklists.ids(listed)}


def index(spec: Path = SPEC) -> str:
    of_level = levels(spec)
    entries = [
        {
            "id": clause.id,
            "title": clause.title,
            "keyword": clause.keyword,
            "level": of_level[clause.id],
            "party": clause.party,
            "decidedHere": clause.is_decided_here,
            "file": clause.file,
        }
        for clause in clauses(spec)
    ]
    lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries)
    return f"[\n{lines}\n]\n"


_HAPPENS = {
    Change.ATTACH: "a connection that can be pushed to starts or resumes it, listens for it, or "
    "names it while it is attached nowhere (ATT2, RES3, HTM16, ATT3)",
    Change.DISPLACE: "a connection that cannot be pushed to resumes it (RES12, HTM6), or its "
    "connection lost its place (HTL9)",
    Change.DETACH: "its connection ended or detached it (ATT9, HTL7)",
    Change.END: "`session/end`, `sessions/delete`, or the server's decision (END1, DEL3, SES17)",
    Change.EXPIRE: "its idle time or its lifetime has passed (SES13, SES15)",
}

_MEANS = {
    State.DETACHED: "alive, without a connection: its events wait in the window (EVT10)",
    State.ATTACHED: "alive, and one connection gets its events (RES3)",
    State.ENDED: "ended on purpose, for ever (SES18)",
    State.EXPIRED: "ended by time, for ever (SES18)",
}


def states() -> str:
    """``states.md``: the table of ``mcp_sessions/core/states.py``, drawn and written out."""
    drawn = [f"    [*] --> {BEGINS.value}"]
    drawn += [
        f"    {before.value} --> {after.value}: {change.value}"
        for (before, change), after in TRANSITIONS.items()
    ]
    live = {state for state, _ in TRANSITIONS}
    drawn += [f"    {state.value} --> [*]" for state in State if state not in live]
    rows = [
        "| " + " | ".join([f"`{state.value}`", *(_cell(state, change) for change in Change)]) + " |"
        for state in State
    ]
    parts = [
        "# The life of a session",
        "Generated by `scripts/spec_generated.py` from the table in `mcp_sessions/core/states.py`,"
        " which the code\nruns on: do not edit. Clause SES18 makes it part of this specification.",
        "\n".join(["```mermaid", "stateDiagram-v2", *drawn, "```"]),
        "\n".join(
            ["| state | means |", "|---|---|"]
            + [f"| `{state.value}` | {_MEANS[state]} |" for state in State]
        ),
        "\n".join(
            ["| change | happens when |", "|---|---|"]
            + [f"| `{change.value}` | {_HAPPENS[change]} |" for change in Change]
        ),
        "This table shows the state after each change. A dash means that the change cannot happen.",
        "\n".join(
            [
                "| | " + " | ".join(f"`{change.value}`" for change in Change) + " |",
                "|---" * (len(Change) + 1) + "|",
                *rows,
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(state: State, change: Change) -> str:
    after = TRANSITIONS.get((state, change))
    return "—" if after is None else f"`{after.value}`"


def vectors(directory: Path = VECTORS) -> list[dict[str, Any]]:
    """Everything in ``conformance/vectors`` that cites clauses: conversations with a server,
    and duties of a client. Empty while there is no such folder.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob("*.json")):
        if path.name != "vector.schema.json":
            body = json.loads(path.read_text(encoding="utf-8"))
            found += body.get("vectors", []) + body.get("duties", [])
    return found


def clauses_of(vector: dict[str, Any]) -> list[str]:
    named = vector.get("clauses", vector.get("clause"))
    return [named] if isinstance(named, str) else list(named or ())


def coverage() -> str:
    """``coverage.json`` with what its authors wrote (``tests``, ``noTest``, ``noVector``), in the
    order of the clauses, and with what can be counted: the vectors of each clause, and in
    ``awaitingVector`` every clause that has neither a vector nor a reason for having none.
    """
    entries: dict[str, dict[str, Any]] = json.loads((SPEC / "coverage.json").read_text())["clauses"]
    proving: dict[str, list[str]] = {}
    for vector in vectors():
        for clause_id in clauses_of(vector):
            proving.setdefault(clause_id, []).append(vector["id"])
    ordered = {clause.id: entries.get(clause.id, {"tests": []}) for clause in clauses()}
    awaiting: list[str] = []
    for clause_id, entry in ordered.items():
        entry.pop("vectors", None)
        if clause_id in proving:
            entry["vectors"] = proving[clause_id]
            # A vector has come: there is no reason left for having none.
            entry.pop("noVector", None)
        elif "noVector" not in entry:
            awaiting.append(clause_id)
    lines = ",\n".join(
        f"    {json.dumps(clause_id)}: {json.dumps(entry, ensure_ascii=False)}"
        for clause_id, entry in ordered.items()
    )
    return f'{{\n  "awaitingVector": {json.dumps(awaiting)},\n  "clauses": {{\n{lines}\n  }}\n}}\n'


def proof() -> str:
    """``proof.md``: for each MUST what shows a violation of it, and why some have no vector."""
    entries: dict[str, dict[str, Any]] = json.loads(coverage())["clauses"]
    lines: dict[str, dict[str, list[str]]] = {}
    for line in proofs():
        caught = lines.setdefault(line.clause, {}).setdefault(line.fault, [])
        if f"`{line.vector}`" not in caught:
            caught.append(f"`{line.vector}`")
    duties = {clause for vector in load_duties() for clause in vector.clauses}
    shown: list[str] = []
    hidden: dict[str, list[str]] = {}
    weaker: dict[str, list[str]] = {}
    for clause in clauses():
        entry = entries[clause.id]
        if clause.keyword != "MUST":
            if "noVector" in entry:
                weaker.setdefault(entry["noVector"], []).append(clause.id)
            continue
        if clause.id in lines:
            cells = [f"`{fault}`: {', '.join(by)}" for fault, by in lines[clause.id].items()]
            shown.append(f"| {clause.id} | {'; '.join(cells)} |")
        elif "noVector" in entry:
            hidden.setdefault(entry["noVector"], []).append(clause.id)
        elif clause.id in duties:
            names = ", ".join(f"`{name}`" for name in entry["vectors"])
            shown.append(f"| {clause.id} | a client: {names} |")
    return (
        "\n\n".join(
            [
                "# Which vectors prove a clause",
                "Generated by `scripts/spec_generated.py`: do not edit.",
                "## Every MUST that a vector proves",
                "*Fault: vectors* names a server or a client that violates this clause and as"
                " little else as possible, and the\nvectors that catch it. The tests of"
                " `conformance/` play every line.",
                "\n".join(["| clause | fault: vectors |", "|---|---|", *shown]),
                "## Every MUST that has no vector, and why",
                _reasons(hidden),
                "## Every SHOULD and MAY that has no vector, and why",
                _reasons(weaker),
            ]
        )
        + "\n"
    )


def _reasons(clauses_of_reason: dict[str, list[str]]) -> str:
    rows = [f"| {' '.join(ids)} | {reason} |" for reason, ids in clauses_of_reason.items()]
    return "\n".join(["| clauses | why none |", "|---|---|", *rows])


def checklists() -> str:
    """``checklists.md``: the clauses in the order in which a request meets them."""
    shown = {clause.id: (clause.keyword, clause.title) for clause in clauses()}
    return spec_checklists.page(levels(), shown, {proof.clause for proof in proofs()})


GENERATED = {
    "states.md": states,
    "clauses.json": index,
    "coverage.json": coverage,
    "proof.md": proof,
    "checklists.md": checklists,
    "walkthrough.md": spec_walkthrough.walkthrough,
}
"""File of ``spec/`` → what it should hold."""


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m scripts.spec_generated", description=__doc__
    ).parse_args()
    for name, make in GENERATED.items():
        (SPEC / name).write_text(make(), encoding="utf-8")
        print(f"spec/{name}")


if __name__ == "__main__":
    main()
