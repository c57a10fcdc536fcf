"""Keep a keyed request's progress reports for a sender that repeats it while it runs (KEY21)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.core.messages import encode

MOST = 256
"""Reports of one request that are kept, the newest."""

MOST_BYTES = 65_536
"""The most bytes of all of them together, as JSON."""

_Params = Mapping[str, Any]


@dataclass(slots=True, eq=False, repr=False)
class Reports:
    _kept: deque[tuple[_Params, int]] = field(default_factory=deque[tuple[_Params, int]])
    _bytes: int = 0
    _total: int = 0
    """How many there were."""

    _repeating: object = None
    """The repetition that is under way; None: there is none."""

    _repeated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no repetition is under way any more; a new one for each time."""

    def add(self, params: _Params) -> bool:
        """Keep a report without its token. False: the sender that repeats earlier reports sends
        this one too.
        """
        size = len(encode(params))
        self._kept.append((params, size))
        self._bytes += size
        self._total += 1
        while self._kept and (len(self._kept) > MOST or self._bytes > MOST_BYTES):
            self._bytes -= self._kept.popleft()[1]
        return self._repeating is None

    async def repeated(self) -> None:
        """Wait until the sender that repeats earlier reports has all of them. So the handler ends,
        and the answer comes, after its last report.
        """
        if self._repeating is not None:
            await self._repeated.wait()

    async def repeat(self, send: Callable[[_Params], Awaitable[None]]) -> None:
        if self._repeating is None:
            self._repeated = asyncio.Event()
        me = self._repeating = object()
        sent = 0
        try:
            while self._repeating is me:
                sent = max(sent, self._total - len(self._kept))
                if sent == self._total:
                    return
                params, _ = self._kept[sent - self._total]
                sent += 1
                await send(params)
        finally:
            if self._repeating is me:
                self._repeating = None
                self._repeated.set()
