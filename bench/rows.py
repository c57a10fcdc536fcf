"""What a bench has to say: rows in one form, for a reader and for ``python -m bench``.

A bench yields its rows as they are measured and hands them to `report`, which prints them, and
writes them to the file that ``MCP_SESSIONS_BENCH_ROWS`` names, one JSON object a line. A part of
a bench that this machine has no program for is a row, too, and says what is absent.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

ROWS = "MCP_SESSIONS_BENCH_ROWS"
"""The environment variable with the file that rows are written to."""


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    measured: float | None = None
    """None: see ``absent``."""

    unit: str = ""
    ratio: float | None = None
    """The ratio to another row of the same run, which a second machine finds as well."""

    basis: str = ""
    """The meaning of the ratio: "times cheaper than the SDK", "times the echo"."""

    most: float | None = None
    """The aim: ``measured`` is no more than this."""

    least_ratio: float | None = None
    """The aim: ``ratio`` is no less than this."""

    includes: str = ""
    """The parts of the figure, where the bench does not say so of all of its rows."""

    absent: str = ""
    """Why there is no figure."""

    @property
    def has_missed(self) -> bool:
        return (
            self.most is not None and self.measured is not None and self.measured > self.most
        ) or (
            self.least_ratio is not None
            and self.ratio is not None
            and self.ratio < self.least_ratio
        )

    @property
    def figure(self) -> str:
        if self.measured is None:
            return f"absent: {self.absent}"
        return with_unit(self.measured, self.unit)

    @property
    def aim(self) -> str:
        aims: list[str] = []
        if self.most is not None:
            aims.append(f"≤ {with_unit(self.most, self.unit)}")
        if self.least_ratio is not None:
            aims.append(f"≥ {short(self.least_ratio)} {self.basis}")
        return ", ".join(aims)

    @property
    def compared(self) -> str:
        if self.ratio is None:
            return ""
        _, _, basis = self.basis.partition(" than ")
        if basis and 0 < self.ratio < 1:
            return f"{1 / self.ratio:.2f} times as much as {basis}"
        return f"{self.ratio:.2f} {self.basis}"


def with_unit(number: float, unit: str) -> str:
    text = short(number)
    return f"{text} {unit.removesuffix('s') if text == '1' and len(unit) > 2 else unit}".rstrip()


def short(number: float) -> str:
    """The number with three digits, without decimals that mean nothing."""
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def report(rows: Iterable[Row]) -> None:
    """Print rows as they come, and write them where that is wanted.

    Raises:
        SystemExit: With status 1, after all of them: one has missed its aim.
    """
    path, missed = os.environ.get(ROWS), False
    for row in rows:
        missed = missed or row.has_missed
        parts = (f"  {row.name:<52} {row.figure:>14}", row.compared, row.aim)
        print(
            "   ".join(part for part in parts if part) + ("   MISSED" if row.has_missed else ""),
            flush=True,
        )
        if path is not None:
            with open(path, "a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    sys.exit(1 if missed else 0)


def growth(name: str, points: Mapping[int, float], most: float = 1.25) -> Row:
    """How a cost grows with its number: the power of it that fits best, 1 for linear.

    Args:
        points: Number → what all of them cost together.
    """
    logs = [(math.log(n), math.log(max(cost, 1e-9))) for n, cost in points.items()]
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    slope = sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)
    ends = f"{min(points):,} to {max(points):,}"
    return Row(
        name=f"{name}: growth",
        measured=slope,
        unit="(power of N)",
        most=most,
        includes=f"fitted over {', '.join(short(n) for n in points)}" if len(points) > 2 else ends,
    )
