"""Write what a command prints to standard output.

The text goes out at once. So a failure shows here, and not when Python ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

READER_LEFT = 141
"""Exit status that shells give to a program that SIGPIPE ended. Python ignores that signal."""


class OutputFailed(Exception):
    """Standard output took no more. ``reader_left``: its reader left, as ``head`` does."""

    def __init__(self, failed: OSError) -> None:
        reason = (failed.strerror or str(failed)).lower()
        super().__init__(f"standard output cannot be written: {reason}")
        self.reader_left = isinstance(failed, BrokenPipeError)


def out(text: str, end: str = "\n") -> None:
    """Print a text.

    Raises:
        OutputFailed: It cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as failed:
        raise OutputFailed(failed) from failed


def flush() -> None:
    """Write what other code printed.

    Raises:
        OutputFailed: It cannot be written.
    """
    out("", end="")


def give_up_output() -> None:
    """Drop what could not be written. Python tries once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


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
