from collections import Counter
from collections.abc import Sequence
from typing import Any

from mcp_sessions_conformance.client_runner import ClientRun, DutyOutcome
from mcp_sessions_conformance.loader import Duty, Vector
from mcp_sessions_conformance.proven import Musts, musts_of
from mcp_sessions_conformance.runner import LeftOut, Outcome, Run

BROKEN_OFF = "the run was broken off: this is its beginning"

SHOWN = 30
"""MUST clauses that are named in one line; the JSON report has all."""

WIRE_LINES = 40
"""Lines of one failed vector that are printed; the JSON report has all that were kept."""


def as_text(run: Run) -> str:
    parts = [_finding(outcome) for outcome in run.outcomes if outcome.verdict != "passed"]
    parts.append(_summary(run))
    return "\n\n".join(parts)


def _finding(outcome: Outcome) -> str:
    head, *rest = _found(
        outcome.vector, outcome.way, outcome.verdict, outcome.sentence, outcome.wire
    )
    broken = [f"  broken  {', '.join(outcome.clauses)}"] if outcome.clauses else []
    return "\n".join([head, *broken, *rest])


def _found(
    rule: Vector | Duty, where: str, verdict: str, sentence: str, wire: tuple[str, ...]
) -> list[str]:
    head = "FAILED" if verdict == "failure" else "warning"
    lines = list(wire)
    if len(lines) > WIRE_LINES:
        lines = [*lines[: WIRE_LINES // 2], "        …", *lines[-WIRE_LINES // 2 :]]
    return [
        f"{head}  {rule.id}  ({where})",
        f"  rule    {rule.keyword} {', '.join(rule.clauses)}: {rule.description}",
        f"  effect  {rule.effect}",
        f"  found   {sentence}",
        *(["  wire"] if lines else []),
        *(f"    {line}" for line in lines),
    ]


def _summary(run: Run) -> str:
    lines: list[str] = []
    ways = list(dict.fromkeys(outcome.way for outcome in run.outcomes))
    for way in ways:
        here = [outcome for outcome in run.outcomes if outcome.way == way]
        counts = Counter(outcome.verdict for outcome in here)
        seconds = sum(outcome.seconds for outcome in here)
        lines.append(
            f"{way:<42} {counts['passed']:4d} passed, {counts['failure']:3d} failed, "
            f"{counts['warning']:3d} warnings  {seconds:6.1f} s"
        )
    for reason, count in _reasons(run.not_played):
        lines.append(f"NOT PLAYED:   {count:3d}  {reason}")
    for reason, count in _reasons(run.not_selected):
        lines.append(f"not selected: {count:3d}  {reason}")
    if not run.outcomes and not run.not_played:
        lines.append("nothing was played: no vector was selected")
    if not run.is_complete:
        lines.append(BROKEN_OFF)
    musts = musts_of(run)
    if musts.total:
        lines.append(f"{len(musts.proven)} of {musts.total} MUST clauses proven{_missing(musts)}")
    played = "" if not run.not_played else f", {len(run.not_played)} not played"
    lines.append(
        f"{run.count('passed')} passed, {run.count('failure')} failed, "
        f"{run.count('warning')} warnings{played} in {run.seconds:.1f} s: "
        + ("conformant" if run.is_conformant else "NOT conformant")
    )
    return "\n".join(lines)


def _missing(musts: Musts) -> str:
    parts = [
        f"{what}: {', '.join(clauses)}"
        for what, clauses in (("failed", musts.failed), ("not played", musts.not_played))
        if clauses and len(clauses) <= SHOWN
    ]
    return f" ({'; '.join(parts)})" if parts else ""


def _reasons(left_out: Sequence[LeftOut]) -> list[tuple[str, int]]:
    reasons = Counter(
        (entry.reason if not entry.way else f"{entry.way}: {entry.reason}") for entry in left_out
    )
    return sorted(reasons.items())


def as_json(run: Run) -> dict[str, Any]:
    musts = musts_of(run)
    return {
        "targets": run.targets,
        "conformant": run.is_conformant,
        "complete": run.is_complete,
        "seconds": round(run.seconds, 3),
        "counts": {
            "passed": run.count("passed"),
            "failed": run.count("failure"),
            "warnings": run.count("warning"),
            "notPlayed": len(run.not_played),
            "notSelected": len(run.not_selected),
        },
        "mustClauses": {
            "proven": musts.proven,
            "failed": musts.failed,
            "notPlayed": musts.not_played,
        },
        "outcomes": [
            {
                "vector": outcome.vector.id,
                "suite": outcome.vector.suite,
                "clauses": list(outcome.vector.clauses),
                "broken": list(outcome.clauses),
                "keyword": outcome.vector.keyword,
                "way": outcome.way,
                "verdict": outcome.verdict,
                "found": outcome.sentence,
                "effect": outcome.vector.effect,
                "seconds": round(outcome.seconds, 3),
                "wire": list(outcome.wire),
            }
            for outcome in run.outcomes
        ],
        "notPlayed": [_left_out(entry) for entry in run.not_played],
        "notSelected": [_left_out(entry) for entry in run.not_selected],
    }


def _left_out(entry: LeftOut) -> dict[str, str]:
    return {"vector": entry.vector.id, "way": entry.way, "reason": entry.reason}


def client_as_text(run: ClientRun) -> str:
    parts = [_duty_finding(o) for o in run.outcomes if o.verdict != "passed"]
    if not run.is_complete:
        parts.append(BROKEN_OFF)
    parts.append(
        f"{run.count('passed')} passed, {run.count('failure')} failed, "
        f"{run.count('warning')} warnings in {run.seconds:.1f} s: "
        + ("conformant" if run.is_conformant else "NOT conformant")
    )
    return "\n\n".join(parts)


def _duty_finding(outcome: DutyOutcome) -> str:
    duty = outcome.duty
    return "\n".join(_found(duty, "client", outcome.verdict, outcome.sentence, outcome.wire))


def client_as_json(run: ClientRun) -> dict[str, Any]:
    return {
        "client": run.command,
        "conformant": run.is_conformant,
        "complete": run.is_complete,
        "seconds": round(run.seconds, 3),
        "counts": {
            "passed": run.count("passed"),
            "failed": run.count("failure"),
            "warnings": run.count("warning"),
        },
        "outcomes": [
            {
                "duty": outcome.duty.id,
                "clauses": list(outcome.duty.clauses),
                "keyword": outcome.duty.keyword,
                "verdict": outcome.verdict,
                "found": outcome.sentence,
                "effect": outcome.duty.effect,
                "seconds": round(outcome.seconds, 3),
                "wire": list(outcome.wire),
            }
            for outcome in run.outcomes
        ],
    }
