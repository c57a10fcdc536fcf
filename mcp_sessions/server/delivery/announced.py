"""Who waits for which server-wide change: whoever announced it, and nobody else.

What is announced is noted in a context variable, so that it is found where the application
announces it: in a handler, in a task that a handler started, in a worker thread that called
back, in a listener of the server's own bus that runs inside of any of these. A bus that calls
its listeners from somewhere else tells nobody who published: nobody waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from mcp_sessions.errors import StoreUnavailable

Outcome = StoreUnavailable | None
"""Of a change: why it is not stored for everyone yet; None: it is."""


class Announced:
    """What one request announced, itself or by what it started."""

    __slots__ = ("_is_open", "_outer", "_waiting")

    def __init__(self, outer: Announced | None = None) -> None:
        """Take what it is a part of.

        Args:
            outer: Waits for the same, too.
        """
        self._outer = outer
        self._waiting: tuple[int, asyncio.Future[Outcome]] | None = None
        self._is_open = True

    def add(self, number: int, told: asyncio.Future[Outcome]) -> None:
        """A change was announced, or is told together with one that was.

        Args:
            number: Its place among all. They are told in order: the last one is waited for.
        """
        if self._is_open and (self._waiting is None or self._waiting[0] < number):
            self._waiting = number, told
        if self._outer is not None:
            self._outer.add(number, told)

    async def settled(self) -> Outcome:
        """Wait until all that was announced so far is stored, or the store failed. What a
        task that outlives the request announces later is waited for by nobody.
        """
        waiting, self._waiting, self._is_open = self._waiting, None, False
        if waiting is None:
            return None
        return await asyncio.shield(waiting[1])


_ANNOUNCED: ContextVar[Announced | None] = ContextVar("mcp_sessions_announced", default=None)


def enter_request() -> Announced:
    """What this task announces from now on, and what it starts."""
    announced = Announced()
    _ANNOUNCED.set(announced)
    return announced


@contextmanager
def noting() -> Generator[Announced]:
    """What is announced inside, whoever else notes it."""
    announced = Announced(_ANNOUNCED.get())
    token = _ANNOUNCED.set(announced)
    try:
        yield announced
    finally:
        _ANNOUNCED.reset(token)


def note(number: int, told: asyncio.Future[Outcome]) -> None:
    """A change is announced here; see :meth:`Announced.add`."""
    announced = _ANNOUNCED.get()
    if announced is not None:
        announced.add(number, told)
