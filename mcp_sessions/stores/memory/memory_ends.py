from __future__ import annotations

from collections.abc import Sequence

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, SessionEnd, StoreMade
from mcp_sessions.security import mint_process
from mcp_sessions.stores.ends_contract import EndedOutside
from mcp_sessions.stores.memory.tables import Tables


class EndsInMemory(Tables):
    def __init__(self) -> None:
        super().__init__()
        # Oldest first, as a dict for its keys.
        self._ends: dict[SessionEnd, None] = {}
        # Those that no server wrote to its log yet.
        self._outside: list[SessionEnd] = []
        self._made: StoreMade | None = None

    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        new = [end for end in ends if end not in self._ends]
        self._ends.update(dict.fromkeys(new))
        if outside:
            self._outside = [*self._outside, *new][-MOST_ENDS:]
        self._drop_old(now)
        return new

    def _drop_old(self, now: float) -> None:
        while self._ends:
            oldest = next(iter(self._ends))
            if len(self._ends) <= MOST_ENDS and oldest.at > now - REMEMBERED_FOR:
                return
            del self._ends[oldest]

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        outside, self._outside = self._outside, []
        return [EndedOutside(end) for end in outside]

    async def ends(self, *, now: float) -> Sequence[SessionEnd]:
        self._drop_old(now)
        return list(self._ends)

    async def made(self, *, now: float | None) -> StoreMade | None:
        if self._made is None and now is not None:
            self._made = StoreMade(mint_process(), now)
            return StoreMade(self._made.name, now, is_new=True)
        return self._made
