"""Single violations of the specification in the example servers: what the vectors are to catch.

``violations.json`` has those of ``examples/typescript/server``, and ``javascript.json`` those of
``examples/javascript``. Each is a list of::

    {"name": "ses8", "clause": "SES8", "says": "any principal may use a session",
     "edits": [{"file": "registry.ts", "old": "…", "new": "…"}],
     "caughtBy": "a-foreign-session-is-not-found",                 # null: by no vector yet
     "environment": {…}, "way": "stdio", "remark": "…",            # where there is need
     "named": ["ERR1"],                                            # the report blames these instead
     "cannotShow": "…"}                                            # why no client can see it
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tests.interop.environments import ROOT

PROJECT = ROOT / "examples" / "typescript"


@dataclass(frozen=True)
class Example:
    """A server that violations are put into."""

    sources: Path
    table: Path
    program: str
    """The file that is started, as it is named once it can run."""
    level: str
    """The level that it keeps."""


TYPESCRIPT = Example(
    PROJECT / "server", Path(__file__).parent / "violations.json", "main.js", "full"
)
JAVASCRIPT = Example(
    ROOT / "examples" / "javascript",
    Path(__file__).parent / "javascript.json",
    "server.mjs",
    "resume",
)
EXAMPLES = {"typescript": TYPESCRIPT, "javascript": JAVASCRIPT}


@dataclass(frozen=True)
class Edit:
    """``old`` stands once in a file, and becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Violation:
    """One clause is broken, and nothing else."""

    name: str
    clause: str
    says: str
    edits: tuple[Edit, ...]
    caught_by: str | None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    way: str | None = None
    remark: str = ""
    cannot_show: str = ""
    """Why no client can see it in a run; empty: it can."""
    named: tuple[str, ...] = ()
    """The clauses that the report blames, if it does not blame this one."""
    example: Example = TYPESCRIPT

    def edited(self) -> dict[str, str]:
        """The text of each file that it changes.

        Raises:
            ValueError: What it replaces does not stand there once.
        """
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file) or (self.example.sources / edit.file).read_text("utf-8")
            if text.count(edit.old) != 1:
                raise ValueError(f"{self.name}: {text.count(edit.old)} times in {edit.file}")
            texts[edit.file] = text.replace(edit.old, edit.new)
        return texts


LIBERTIES = Path(__file__).parent / "liberties.json"


@dataclass(frozen=True)
class Catch:
    """A vector that failed, and the clauses that the report blames."""

    vector: str
    blames: tuple[str, ...]
    why: str


def rewrite(example: Example, found: dict[str, Catch | None]) -> None:
    """Write down what caught each of these; null: nothing."""
    entries = json.loads(example.table.read_text("utf-8"))
    for entry in entries:
        if entry["name"] in found:
            catch = found[entry["name"]]
            entry["caughtBy"] = catch.vector if catch else None
            entry.pop("named", None)
            if catch is not None and entry["clause"] not in catch.blames:
                entry["named"] = list(catch.blames)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    example.table.write_text(f"[\n{lines}\n]\n", "utf-8")


def liberties() -> list[Violation]:
    """Servers that do otherwise where the specification leaves it free: they are conformant."""
    entries = json.loads(LIBERTIES.read_text("utf-8"))
    return [
        Violation(
            entry["name"], "", entry["says"], tuple(Edit(**edit) for edit in entry["edits"]), None
        )
        for entry in entries
    ]


def load(example: Example = TYPESCRIPT) -> list[Violation]:
    entries = json.loads(example.table.read_text("utf-8"))
    return [
        Violation(
            entry["name"],
            entry["clause"],
            entry["says"],
            tuple(Edit(**edit) for edit in entry["edits"]),
            entry["caughtBy"],
            entry.get("environment", {}),
            entry.get("way"),
            entry.get("remark", ""),
            entry.get("cannotShow", ""),
            tuple(entry.get("named", ())),
            example,
        )
        for entry in entries
    ]
