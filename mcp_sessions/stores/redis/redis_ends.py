"""How sessions ended, and when the store was made: in Redis, next to the lists of sessions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from mcp_sessions.core.ends import (
    MOST_ENDS,
    REMEMBERED_FOR,
    EndReason,
    SessionEnd,
    StoreMade,
)
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.ids import DIGEST_LENGTH
from mcp_sessions.security import mint_process
from mcp_sessions.stores.ends_contract import EndedOutside
from mcp_sessions.stores.redis import scripts
from mcp_sessions.stores.redis.commands import Commands, readable
from mcp_sessions.stores.redis.redis_connection import RedisLink, Value

_MADE = re.compile(rb"([0-9A-Za-z_-]{1,64}) ([0-9]+(?:\.[0-9]+)?)")

_AT_ONCE = 1_000
"""Ends that one call hands out."""


class EndsInRedis(Commands):
    def __init__(self, link: RedisLink, namespace: str, clock: Callable[[], float]) -> None:
        super().__init__(link, namespace, clock)
        self._ends = f"{{{namespace}}}:ends"
        self._ends_outside = f"{{{namespace}}}:ends-outside"
        self._made = f"{{{namespace}}}:made"

    @readable
    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        now = await self._clock.at(now)
        args: list[Value] = [MOST_ENDS, repr(now - REMEMBERED_FOR), int(REMEMBERED_FOR * 1000)]
        args.append(int(outside))
        for end in ends:
            args += repr(end.at), encode(end.to_json())
        keys = [self._ends, self._ends_outside]
        new: list[int] = await self._run(scripts.REMEMBER_ENDS, keys, *args)
        return [ends[number] for number in new]

    @readable
    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        kept: list[bytes] | None = await self._command("LPOP", self._ends_outside, _AT_ONCE)
        found = _read(kept or ())
        if any(end.reason is EndReason.LOST for end in found):
            # Another process may have ended one of them, and not have removed its entry yet.
            ended = {
                end.session for end in await self.ends(now=now) if end.reason is not EndReason.LOST
            }
            wrong = [e for e in found if e.reason is EndReason.LOST and e.session in ended]
            if wrong:
                await self._command("ZREM", self._ends, *(encode(end.to_json()) for end in wrong))
                found = [end for end in found if end not in wrong]
        return [EndedOutside(end) for end in found]

    @readable
    async def ends(self, *, now: float) -> Sequence[SessionEnd]:
        after = await self._clock.at(now) - REMEMBERED_FOR
        kept: list[bytes] = await self._command("ZRANGEBYSCORE", self._ends, f"({after!r}", "+inf")
        return _read(kept)

    @readable
    async def made(self, *, now: float | None) -> StoreMade | None:
        found = await self._command("GET", self._made)
        if now is None or _made(found) is not None:
            if now is not None:
                await self._command("PEXPIRE", self._made, self._list_lifetime)
            return _made(found)
        # Not sooner: a store that is full takes no writes, and can be asked all the same.
        own = StoreMade(mint_process(), await self._clock.at(now), is_new=True)
        text, lifetime = f"{own.name} {own.at!r}", self._list_lifetime
        # A value of another program does not count.
        how = "NX" if found is None else "XX"
        found = await self._command("SET", self._made, text, how, "GET", "PX", lifetime)
        return _made(found) or own

    async def _note_lost(self, tag: str, at: float) -> None:
        end = SessionEnd(tag[:DIGEST_LENGTH], EndReason.LOST, at)
        await self.remember_ends([end], now=at, outside=True)


def _read(kept: Iterable[bytes]) -> list[SessionEnd]:
    found: list[SessionEnd] = []
    for each in kept:
        try:
            end = SessionEnd.from_json(decode(each))
        except ValueError:
            # Another program's.
            continue
        if end is not None:
            found.append(end)
    return found


def _made(kept: bytes | None) -> StoreMade | None:
    known = _MADE.fullmatch(kept) if kept is not None else None
    return StoreMade(known[1].decode(), float(known[2])) if known is not None else None
