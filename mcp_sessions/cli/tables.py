"""Print a table that fits the terminal. What is no terminal gets every column, a line each row."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

from mcp_sessions.cli.output import out

_GAP = "  "
_NARROWEST = 9
"""Characters of a column that wraps, at least."""


def print_table(
    rows: Sequence[Sequence[str]], *, wraps: Collection[int], least: Sequence[int] = ()
) -> Sequence[int]:
    """Print rows of cells, and return the columns that had no room.

    Args:
        wraps: Columns whose text may go on in the next line.
        least: Columns to leave out where there is no room, the first one first.
    """
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines, left_out = fitted(rows, room, wraps, least)
    out("\n".join(lines))
    return left_out


def fitted(
    rows: Sequence[Sequence[str]],
    room: int | None,
    wraps: Collection[int],
    least: Sequence[int] = (),
) -> tuple[list[str], Sequence[int]]:
    """Return the lines of a table, and the columns that had no room.

    Args:
        room: Characters of a line. None: there is no end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left_out: list[int] = []
    if room is not None:
        needed = {
            column: min(width, _NARROWEST) if column in wraps else width
            for column, width in enumerate(widths)
        }
        for column in least:
            if _total(needed.values()) <= room:
                break
            left_out.append(column)
            del needed[column]
        # The widest column gives first.
        while _total(widths[each] for each in needed) > room:
            wide = [each for each in needed if widths[each] > needed[each]]
            if not wide:
                break
            widths[max(wide, key=lambda each: widths[each])] -= 1
    kept = [column for column in range(len(widths)) if column not in left_out]
    lines: list[str] = []
    for row in rows:
        cells = [textwrap.wrap(row[each], widths[each] or 1) or [""] for each in kept]
        for number in range(max(map(len, cells))):
            parts = [
                (cell[number] if number < len(cell) else "").ljust(widths[each])
                for each, cell in zip(kept, cells, strict=True)
            ]
            lines.append(_GAP.join(parts).rstrip())
    return lines, left_out


def _total(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + len(_GAP) * (len(found) - 1)
