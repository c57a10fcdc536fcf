"""Slow down the refusals of bad credentials, so that they leave the processor to good ones.

Rules, owned by ``tests/authentication/test_pace.py``:

1. At once :data:`RATE` refusals are answered without a wait, and then :data:`RATE` a second.
2. No refusal waits longer than :data:`LONGEST_WAIT`. A client that floods the server holds a
   connection for each answer that it waits for, and connections have a bound.
3. A good credential never waits.
4. The log says it at most once a minute.
5. An address without a refusal in the last second is not delayed by others: as many again pass in a
   second.
6. The server that has the connection knows that an answer waits. It may close the connection, and
   the wait ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Hashable
from typing import Final

from mcp_sessions.core.recent import Recent
from mcp_sessions.seldom import OnceAMinute

logger = logging.getLogger(__name__)

RATE: Final = 200
"""Refusals a second."""

LONGEST_WAIT: Final = 5.0
"""Seconds."""

DELAYS: Final = "mcp_sessions.delays"
"""Name of a :data:`Delays` in the ``state`` of a request."""

Delays = Callable[[asyncio.Future[None] | None], None]
"""Takes the wait of an answer, to end it when the connection is lost. None: nothing waits any more.
"""

_ADDRESSES: Final = 10_000
"""Addresses of refusals that are kept, at most."""


class Pace:
    def __init__(self) -> None:
        self._next_at = self._next_spared_at = -math.inf
        self._waited = OnceAMinute()
        self._refused_at = Recent[Hashable, float](_ADDRESSES)
        """Address → when it was refused last."""

    async def wait(self, delays: Delays | None = None, address: Hashable = None) -> None:
        """Return when the refusal may be answered, or its connection is lost.

        Args:
            address: Of the client; None: it is not known.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        # A second without refusals lets that many pass at once.
        at = max(self._next_at, now - 1)
        if address is not None:
            was_quiet = now - self._refused_at.get(address, -math.inf) >= 1
            self._refused_at.keep(address, now)
            spared_at = max(self._next_spared_at, now - 1)
            if at > now >= spared_at and was_quiet:
                self._next_spared_at = spared_at + 1 / RATE
                return
        self._next_at = min(at + 1 / RATE, now + LONGEST_WAIT)
        if at > now:
            if waited := self._waited.due(now):
                logger.warning(
                    "more than %d credentials were refused in a second: refusals are delayed, "
                    "%d so far",
                    RATE,
                    waited,
                )
            if delays is None:
                await asyncio.sleep(at - now)
            else:
                await _delayed(loop, at, delays)


async def _delayed(loop: asyncio.AbstractEventLoop, at: float, delays: Delays) -> None:
    wait = loop.create_future()
    timer = loop.call_at(at, _end, wait)
    delays(wait)
    try:
        await wait
    finally:
        timer.cancel()
        delays(None)


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
