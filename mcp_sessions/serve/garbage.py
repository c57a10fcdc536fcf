"""The collector of cyclic garbage, in a process that is ours.

A full collection looks at everything that lives, and nobody is served meanwhile: with a hundred
thousand sessions for half a second, and as many times as their number grows by a quarter. The
objects of a session are in no cycle: they are freed when nothing refers to them. So many objects
are set aside, where the collector does not look.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

MANY = 25_000
"""Objects that a full collection looks at in some milliseconds."""


@contextmanager
def setting_aside() -> Generator[None]:
    """Collect nothing while modules load, and exempt them from garbage collection.

    They are many objects and no garbage. To look at them again and again takes a third of the time
    of a start.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def set_aside_everything() -> None:
    gc.collect()
    gc.freeze()


FEW = 300
"""New objects that cost little to look at ten times a second."""


class Collections:
    def __init__(self, many: int = MANY) -> None:
        self._many = many
        self._seen = 0
        self._replaced = 0
        """New objects that became older here, since it was looked how many there are."""

    def look(self) -> None:
        """Set aside the objects that have stayed, if there are many. Cheap if nothing was
        collected.
        """
        # The collector begins when more was made than went. It does not if each new object
        # replaces one that was set aside. Then all stay new: ten for each of thousands of streams
        # that got an event. To count them costs as much as there are.
        new = len(gc.get_objects(generation=0))
        if new >= FEW:
            gc.collect(0)
            self._replaced += new
        _, younger, oldest = gc.get_stats()
        seen = younger["collections"] + oldest["collections"]
        if seen != self._seen or self._replaced >= self._many:
            self._seen = seen
            self._replaced = 0
            set_aside_if_many(self._many)


def set_aside_if_many(many: int) -> bool:
    """Set aside the objects that have stayed, if there are many. Return whether there were.

    A short-lived object that is set aside and becomes part of a cycle is never freed. That is rare:
    it concerns the requests of one moment, once for some thousand new sessions.
    """
    if len(gc.get_objects()) < many:
        return False
    gc.collect()
    is_much = len(gc.get_objects(generation=2)) >= many
    if is_much:
        gc.freeze()
    return is_much
