"""Read what the system knows of running processes. Only Linux says it, in ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def children_of(pid: int) -> list[int]:
    """Return the children of a process: those of each of its threads."""
    found: list[int] = []
    with suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def memory_of(pid: int) -> int | None:
    """Return the bytes that a process and its descendants take. A page that several processes
    share counts as a part for each. None: the system does not say.
    """
    sizes = [size for each in _tree(pid) if (size := _size(each)) is not None]
    return sum(sizes) if sizes else None


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from _tree(child)


def _size(pid: int) -> int | None:
    with suppress(*_GONE), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None
