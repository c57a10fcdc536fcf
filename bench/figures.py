"""``docs/figures.md``, made from ``docs/figures.json``, which one run of all benches wrote.

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
PAGE = DOCS / "figures.md"

TIMES = ("s", "ms")
"""Units of time on the clock, in which everything else is that a machine does."""

OPENING = """# Figures

After this page you know what the layer costs, and you can measure it on your own machine. One run
of the benches made the page, `python -m bench --page`. It used Python {python} on {system}, with
{cores} cores, on which other programs ran as well.
"""

WORDS = """## How to read the tables

* **ours** is a server with the layer. **SDK** is the same server without the layer.
* **floor** is a program that only reads a request and writes a fixed answer. Nothing costs less.
* **handshake era** (or *2025 era*) is MCP up to 2025-11-25, in which a client begins with
  `initialize`. **modern era** (or *2026 era*) is MCP from 2026-07-28, which has no handshake. See
  the [glossary](glossary.md).
* **ratio** compares a row with another row of the same run. You will find much the same ratios on
  another machine.
* **figure** is a value of this one machine, with its unit.
* **aim** is the most that the figure may be. A missed aim is marked.
* **p99** is the time within which 99 of 100 calls were answered.
* **CPU** is the time for which a process used a core, in the program and in the system.

Each section names its command. Use `python -m bench --only NAME` to run one bench, and
`python -m bench --quick` to run all of them in a few minutes.
"""

BRIEFLY = (
    (
        "calls",
        "ours, handshake era, in a session",
        "A call in a session costs {ratio:.1f} times less server CPU than the same call with the "
        "SDK alone, for clients up to 2025-11-25.",
    ),
    (
        "calls",
        "ours, modern era, in a session",
        "For clients of 2026-07-28 it costs {ratio:.1f} times less.",
    ),
    (
        "stores",
        "redis, 2025 era, without a key",
        "With Redis as the store, a call costs {ratio:.1f} times the CPU of a call with the memory "
        "store.",
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
"""Bench, row, and its sentence for a reader who has ten seconds."""


def page(results: dict[str, Any]) -> str:
    parts = [
        OPENING.format(**results),
        *_briefly(results),
        *_missed(results),
        WORDS,
        *_sections(results),
        *_ratios(results),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _briefly(results: dict[str, Any]) -> Iterator[str]:
    rows = {
        (bench["name"], row["name"]): row for bench in results["benches"] for row in bench["rows"]
    }
    found = [(rows[bench, name], said) for bench, name, said in BRIEFLY if (bench, name) in rows]
    lines = [f"* {said.format(**row)}" for row, said in found if not row["absent"]]
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
    yield "## All ratios\n"
    yield "| bench | row | ratio |"
    yield "|---|---|---|"
    for bench in results["benches"]:
        for row in map(_row, bench["rows"]):
            if row.ratio is not None and row.unit not in TIMES:
                yield f"| `{bench['name']}` | {row.name} | {row.compared} |"
    yield ""


def _sections(results: dict[str, Any]) -> Iterator[str]:
    known = {bench.name: bench for bench in BENCHES}
    for bench in results["benches"]:
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
    PAGE.write_text(page(json.loads(JSON.read_text())))
