"""Write what a command prints to standard output.

The text goes out at once. So a failure shows here, and not when Python ends.
"""

from __future__ import annotations

import os

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
