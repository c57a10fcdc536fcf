"""``docs/figures.md`` and its parts, made from ``docs/figures.json``, which one run wrote.

python -m bench.figures
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.benches import BENCHES, Bench
from bench.rows import Row

DOCS = Path(__file__).parents[1] / "docs"
JSON = DOCS / "figures.json"
PAGE = "figures.md"
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "calls": (
        "Figures of calls",
        ("calls", "duplex", "lone", "stores", "conversations", "tasks", "children"),
    ),
    "events": ("Figures of events", ("core", "fanout", "attached", "resume", "closing", "recover")),
    "sessions": (
        "Figures of many sessions",
        ("finished", "collections", "expired", "idle", "many", "noisy", "dashboard", "acp"),
    ),
    "processes": ("Figures of several processes", ("workers", "replicas", "outage")),
}
"""Page of ``figures/`` → its title, and the benches on it."""
RATIOS = "ratios"
"""The page of all ratios."""

TIMES = ("s", "ms")
"""Units of time on the clock, in which everything else is that a machine does."""

OPENING = """# Figures

After this page you know what the layer costs, and you can measure it on your own machine. One run
of the benches made these pages, `python -m bench --page`. It used Python {python} on {system}, with
{cores} cores, on which other programs ran as well.
"""

WORDS = """## How to read the tables

* **ours** is a server with the layer. **SDK** is the same server without the layer.
* **floor** is a program that only reads a request and writes a fixed answer. Nothing costs less.
* **2025 era** is MCP up to 2025-11-25, in which a client begins with `initialize`. **2026 era** is
  MCP from 2026-07-28, which has no such request.
* **CPU** is the time for which a process used a core, in the program and in the system.
* **p99** is the time within which 99 of 100 calls were answered.
* **figure** is a value of this one machine, with its unit.
* **ratio** compares a row with another row of the same section. Ratios are much the same on another
  machine. A ratio between 0.9 and 1.1 shows no difference.
* **growth** is the power of the number N with which a cost grows. With power 1, twice as many cost
  twice as much. With power 2, they cost four times as much.
* **aim** is the most that the figure may be. A missed aim is marked.

Two sections can measure the same call and show figures that differ by 20 %. The benches ran one
after the other, and other programs used the machine meanwhile. Some benches show the median of
their rounds. Others show the round with the least CPU, which other programs disturbed least. So
compare only rows of one section.

Each section names its command. Use `python -m bench --only NAME` to run one bench, and
`python -m bench --quick` to run all of them in a few minutes.
"""

READ_FIRST = """Read first [how to read the tables](../figures.md#how-to-read-the-tables).
"""

BRIEFLY = (
    (
        "calls",
        "ours, 2025 era, in a session",
        "A call of the 2025 era takes {less:.0f} % less server CPU in a session than with the SDK "
        "alone: {measured:.0f} µs instead of {other:.0f} µs.",
    ),
    (
        "calls",
        "ours, 2026 era, in a session",
        "A call of the 2026 era takes {less:.0f} % less: {measured:.0f} µs instead of "
        "{other:.0f} µs.",
    ),
    (
        "stores",
        "redis, ",
        "With Redis as the store, a call takes {least:.2f} to {most:.2f} times the CPU of a call "
        "with the memory store. It depends on the era and on request keys.",
    ),
    (
        "core",
        "idle session",
        "An idle session that a client started takes {measured:.1f} KiB of memory.",
    ),
    (
        "children",
        "mcp-proxy",
        "In front of a command, mcp-proxy takes {ratio:.1f} times the CPU of the layer for a call.",
    ),
)
"""Bench, beginning of its rows, and the sentence for a reader who has ten seconds."""


def pages(results: dict[str, Any]) -> dict[str, str]:
    """Each file below ``docs/`` → its text."""
    first = [OPENING.format(**results), *_briefly(results), *_contents(), WORDS, *_missed(results)]
    made = {PAGE: first, f"figures/{RATIOS}.md": [*_ratios(results)]}
    for name, (title, benches) in PARTS.items():
        there = [bench for bench in results["benches"] if bench["name"] in benches]
        made[f"figures/{name}.md"] = [f"# {title}\n", READ_FIRST, *_sections(there)]
    return {name: "\n".join(parts).rstrip() + "\n" for name, parts in made.items()}


def write(results: dict[str, Any]) -> None:
    for name, text in pages(results).items():
        (DOCS / name).write_text(text)


def _contents() -> Iterator[str]:
    titles = {**{name: title for name, (title, _) in PARTS.items()}, RATIOS: "All ratios"}
    yield "## The tables\n"
    yield from (f"* [{title}](figures/{name}.md)" for name, title in titles.items())
    yield "\n```{toctree}\n:hidden:\n"
    yield from (
        f"{title.removeprefix('Figures of ').capitalize()} <figures/{name}>"
        for name, title in titles.items()
    )
    yield "```\n"


def _briefly(results: dict[str, Any]) -> Iterator[str]:
    benches = {bench["name"]: bench["rows"] for bench in results["benches"]}
    lines: list[str] = []
    for bench, beginning, said in BRIEFLY:
        rows = [
            row
            for row in benches.get(bench, ())
            if row["name"].startswith(beginning) and row["ratio"] is not None
        ]
        if rows:
            ratio, ratios = rows[0]["ratio"], [row["ratio"] for row in rows]
            values = {
                **rows[0],
                "less": 100 * (1 - 1 / ratio),
                "other": ratio * rows[0]["measured"],
                "least": min(ratios),
                "most": max(ratios),
            }
            lines.append(f"* {said.format(**values)}")
    if lines:
        yield "## In short\n"
        yield "\n".join(lines) + "\n"


def _missed(results: dict[str, Any]) -> Iterator[str]:
    """The aims that the run missed, and the benches that it did not have."""
    titles = {bench.name: _title(bench) for bench in BENCHES}
    found = [
        (titles[bench["name"]], row)
        for bench in results["benches"]
        for row in map(_row, bench["rows"])
    ]
    missed = [(title, row) for title, row in found if row.has_missed]
    yield "## Missed aims\n"
    yield f"The run missed {len(missed)} of {sum(bool(row.aim) for _, row in found)} aims.\n"
    if missed:
        yield "| section | row | figure | aim |"
        yield "|---|---|---|---|"
        yield from (f"| {title} | {row.name} | {row.figure} | {row.aim} |" for title, row in missed)
        yield ""
    measured = {bench["name"] for bench in results["benches"]}
    absent = [f"`{bench.name}`" for bench in BENCHES if bench.name not in measured]
    if absent:
        yield f"These benches were not in the run: {', '.join(absent)}.\n"


def _title(bench: Bench) -> str:
    return bench.docstring()[0].replace("``", "`").rstrip(".")


def _ratios(results: dict[str, Any]) -> Iterator[str]:
    yield "# All ratios\n"
    yield READ_FIRST
    yield "| bench | row | ratio |"
    yield "|---|---|---|"
    for bench in results["benches"]:
        for row in map(_row, bench["rows"]):
            if row.ratio is not None and row.unit not in TIMES:
                yield f"| `{bench['name']}` | {row.name} | {row.compared} |"
    yield ""


def _sections(benches: list[dict[str, Any]]) -> Iterator[str]:
    known = {bench.name: bench for bench in BENCHES}
    for bench in benches:
        prose = known[bench["name"]].docstring()[1].replace("``", "`")
        yield f"## {_title(known[bench['name']])}\n"
        yield f"`{bench['command']}`, {bench['seconds']} s\n"
        if prose:
            yield prose + "\n"
        if bench["failed"]:
            yield f"**Failed**: {bench['failed']}\n"
        rows = [_row(row) for row in bench["rows"]]
        if rows:
            yield "| | ratio | figure | aim | remark |"
            yield "|---|---|---|---|---|"
        for row in rows:
            missed = " (missed)" if row.has_missed else ""
            cells = (row.name, row.compared, row.figure, row.aim + missed, row.includes)
            yield f"| {' | '.join(cells)} |"
        yield ""


def _row(row: dict[str, Any]) -> Row:
    return Row(**row)


if __name__ == "__main__":
    write(json.loads(JSON.read_text()))
