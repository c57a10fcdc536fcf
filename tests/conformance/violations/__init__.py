"""Single violations of the specification in the example server: what the vectors are to catch.

``violations.json`` is a list of::

    {"name": "ses8", "clause": "SES8", "says": "any principal may use a session",
     "edits": [{"file": "registry.ts", "old": "…", "new": "…"}],   # of examples/typescript/server
     "caughtBy": "a-foreign-session-is-not-found",                 # null: by no vector yet
     "environment": {…}, "way": "stdio", "remark": "…",            # where there is need
     "cannotShow": "…"}                                            # why no client can see it
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tests.interop.environments import ROOT

PROJECT = ROOT / "examples" / "typescript"
SOURCES = PROJECT / "server"


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

    def edited(self) -> dict[str, str]:
        """The text of each file that it changes.

        Raises:
            ValueError: What it replaces does not stand there once.
        """
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file) or (SOURCES / edit.file).read_text("utf-8")
            if text.count(edit.old) != 1:
                raise ValueError(f"{self.name}: {text.count(edit.old)} times in {edit.file}")
            texts[edit.file] = text.replace(edit.old, edit.new)
        return texts


LIST = Path(__file__).parent / "violations.json"
LIBERTIES = Path(__file__).parent / "liberties.json"


def rewrite(found: dict[str, str | None]) -> None:
    """Write down what caught each of these; null: nothing."""
    entries = json.loads(LIST.read_text("utf-8"))
    for entry in entries:
        if entry["name"] in found:
            entry["caughtBy"] = found[entry["name"]]
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    LIST.write_text(f"[\n{lines}\n]\n", "utf-8")


def liberties() -> list[Violation]:
    """Servers that do otherwise where the specification leaves it free: they are conformant."""
    entries = json.loads(LIBERTIES.read_text("utf-8"))
    return [
        Violation(
            entry["name"], "", entry["says"], tuple(Edit(**edit) for edit in entry["edits"]), None
        )
        for entry in entries
    ]


def load() -> list[Violation]:
    entries = json.loads(LIST.read_text("utf-8"))
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
        )
        for entry in entries
    ]
