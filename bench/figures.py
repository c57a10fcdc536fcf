"""``docs/figures.md``, made from ``docs/figures.json``, which one run of all benches wrote.

python -m bench.figures
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.benches import BENCHES
from bench.rows import Row

DOCS = Path(__file__).parents[1] / "docs"
JSON = DOCS / "figures.json"
PAGE = DOCS / "figures.md"

TIMES = ("s", "ms")
"""Units of time on the clock, in which everything else is that a machine does."""

OPENING = """# Figures

After this page you know what the layer costs. One run of all benches made it,
`python -m bench --page`: Python {python} on {system}, {cores} cores that others used as well.

You will find the first table on another machine, too. It has ratios of two figures of one run, of
CPU and of memory. All other figures are microseconds, bytes and percent of that one machine. Each
section says what is in its figures, and which command measures them. A missed aim is marked. Use
`--only NAME` to run one bench, or `--quick` to run all of them in a few minutes.
"""


def page(results: dict[str, Any]) -> str:
    parts = [OPENING.format(**results), *_ratios(results), *_sections(results)]
    return "\n".join(parts).rstrip() + "\n"


def _ratios(results: dict[str, Any]) -> Iterator[str]:
    yield "## Ratios\n"
    yield "| bench | | |"
    yield "|---|---|---|"
    for bench in results["benches"]:
        for row in map(_row, bench["rows"]):
            if row.ratio is not None and row.unit not in TIMES:
                yield f"| `{bench['name']}` | {row.name} | {row.compared} |"
    yield ""


def _sections(results: dict[str, Any]) -> Iterator[str]:
    known = {bench.name: bench for bench in BENCHES}
    for bench in results["benches"]:
        title, prose = (part.replace("``", "`") for part in known[bench["name"]].docstring())
        yield f"## {title.rstrip('.')}\n"
        yield f"`{bench['command']}`, {bench['seconds']} s\n"
        if prose:
            yield prose + "\n"
        if bench["failed"]:
            yield f"**Failed**: {bench['failed']}\n"
        rows = [_row(row) for row in bench["rows"]]
        if rows:
            yield "| | ratio | figure | aim | what is in it |"
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
