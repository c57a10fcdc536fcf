"""An event loop whose clock jumps: time passes only when nothing else can happen.

A test that waits 10 seconds for a timeout is done at once, and always in the same order. A
test that waits for what never comes fails at once, at its own `fail_after`.

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend() -> Backend:
        return VIRTUAL

Rules:

1. Nothing in such a test may wait for the network or for a thread: the clock would not
   wait for them. Tools and resources are async functions; clients are `tests.support.raw`.
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

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        if not ready and timeout is None:
            # No timer at all: only another thread can wake the loop.
            return super().select(1.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds that have passed, or were skipped."""
        return self._jumping.now


def _new_loop() -> asyncio.AbstractEventLoop:
    return VirtualTimeLoop()


_FACTORY: Callable[[], asyncio.AbstractEventLoop] = _new_loop

VIRTUAL: Backend = ("asyncio", {"loop_factory": _FACTORY})
"""For the fixture ``anyio_backend``."""


async def cycles(count: int = 20) -> None:
    """Let every task run that can, ``count`` times over, without time passing.

    For "nothing happens": what would happen, would happen within these cycles.
    """
    for _ in range(count):
        await asyncio.sleep(0)
