"""List the MUST clauses that a run has proven.

A clause counts if a broken server that violates it is known to fail (``proven.py``): then passing
the vectors that catch it says something.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.proven import proofs
from mcp_sessions_conformance.runner import Run


@dataclass(frozen=True)
class Musts:
    proven: list[str]
    """Each vector that catches one of its violations passed, wherever it was played, and at least
    one was played."""

    failed: list[str]
    """A step that checks it failed."""

    not_played: list[str]
    """None of the vectors that catch its violations was played, or one failed for another
    clause."""

    @property
    def total(self) -> int:
        return len(self.proven) + len(self.failed) + len(self.not_played)


def musts_of(run: Run) -> Musts:
    catching: dict[str, set[str]] = {}
    for proof in proofs():
        catching.setdefault(proof.clause, set()).add(proof.vector)
    played = {outcome.vector.id for outcome in run.outcomes}
    wrong = {c for o in run.outcomes if o.verdict == "failure" for c in o.clauses}
    broken = {o.vector.id for o in run.outcomes if o.verdict == "failure"}
    left_out = [entry.vector for entry in (*run.not_selected, *run.not_played)]
    about = _clauses([*(o.vector for o in run.outcomes), *left_out])
    found = Musts([], [], [])
    for clause, vectors in catching.items():
        if clause not in about:
            continue
        if clause in wrong:
            found.failed.append(clause)
        elif vectors & played and not vectors & broken:
            found.proven.append(clause)
        else:
            found.not_played.append(clause)
    return found


def _clauses(vectors: Iterable[Vector]) -> set[str]:
    return {clause for vector in vectors for clause in vector.clauses}
