"""An event loop whose clock jumps: time passes only when nothing else can happen.

A test that waits 10 seconds for a timeout is done at once, and always in the same order. A
test that waits for what never comes fails at once, at its own `fail_after`.

    @pytest.fixture
    def anyio_backend() -> Backend:
        return VIRTUAL

Rules:

1. Nothing in such a test may wait for the network or for a thread: the clock would not
   wait for them. Tools and resources are async functions; clients are `tests.support.raw`.
   (A store with a thread says what it waits for, in `outside_work`: then time stands still; one
   in Redis does by `tests.support.redis_wire`.)
2. The clock of the loop is not the clock of the layer, which each test passes in.
"""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

Backend = tuple[str, dict[str, Any]]


class _JumpingSelector(selectors.DefaultSelector):  # pyright: ignore[reportGeneralTypeIssues]
    """Skips what the real one would have waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self.outside_work: set[object] = set()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; if nothing is, the time of the next timer has come."""
        ready = super().select(0)
        if not ready and self.outside_work and timeout != 0:
            # Bounded, so that a thread that died is not waited for in silence.
            return super().select(10.0)
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        if not ready and timeout is None:
            # No timer at all: only another thread can wake the loop.
            return super().select(1.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @property
    def outside_work(self) -> set[object]:
        """What threads, or servers, are running on, for tasks that wait for it."""
        return self._jumping.outside_work

    def time(self) -> float:
        """Seconds that have passed, or were skipped."""
        return self._jumping.now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """End the threads of ``to_thread``. They do that in real time, so the clock stands still
        for them; from 3.12 on the runner gives them a time that it would jump over.
        """
        waiting = object()
        self.outside_work.add(waiting)
        try:
            await super().shutdown_default_executor()
        finally:
            self.outside_work.discard(waiting)


def _new_loop() -> asyncio.AbstractEventLoop:
    return VirtualTimeLoop()


_FACTORY: Callable[[], asyncio.AbstractEventLoop] = _new_loop

VIRTUAL: Backend = ("asyncio", {"loop_factory": _FACTORY})
"""For the fixture ``anyio_backend``."""


async def cycles(count: int = 20) -> None:
    """Let every task run that can, ``count`` times over, without time passing.

    For "nothing happens": what would happen, would happen within these cycles. A cycle waits
    for what threads are running on.
    """
    loop = asyncio.get_running_loop()
    outside_work = loop.outside_work if isinstance(loop, VirtualTimeLoop) else ()
    for _ in range(count):
        await asyncio.sleep(0)
        while outside_work:  # noqa: ASYNC110
            await asyncio.sleep(0)
