"""The sessions in Redis that sleep, and those that end early to make room."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mcp_sessions.core.life import asleep_by, has_come, idle_time, unused_by
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_log_epoch
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.redis import scripts
from mcp_sessions.stores.redis.commands import AT_ONCE, each_of, readable, tag_of
from mcp_sessions.stores.redis.lists import Lists, tag_in
from mcp_sessions.stores.redis.record_codec import of_kind, owner_of, unreadable
from mcp_sessions.stores.redis.redis_connection import RedisLink, Value

OF_CONVERSATION = b".c"
"""Ends the entry of a conversation's session: its principal may have many of others."""

_USED = re.compile(rb"used_memory:(\d+)")

_MOST_LOOKED_AT = 2_048
"""Sessions that are asked whether they hold something, when room has to be made."""


class Sleepers(Lists):
    def __init__(self, link: RedisLink, namespace: str, clock: Callable[[], float]) -> None:
        super().__init__(link, namespace, clock)
        self._looked_at = 0
        """The number of sessions that :meth:`evict` looked at in vain. It continues after them."""

        self._slept_by = -math.inf
        """The latest entry that :meth:`sleep` looked at."""

    @readable
    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        now = await self._clock.at(now)
        owner, asleep = owner_of(ANONYMOUS), asleep_by(now, self._policy)
        idle = idle_time(Mode.TRANSPORT, self._policy)
        latest = unused_by(Mode.TRANSPORT, now, unused_for, self._policy)
        of = f".{self._owned(owner)[-16:]}.".encode()
        held_tags = {tag_of(session_id) for session_id in held}
        listed = await self._entries("ZRANGEBYSCORE", self._all, "-inf", repr(latest))
        sleeping: int = await self._command("ZCOUNT", self._all, "-inf", repr(asleep))
        known = [
            member
            for rank, member in enumerate(listed)
            if (of in member or rank < sleeping)
            and not member.endswith(OF_CONVERSATION)
            and tag_in(member) not in held_tags
        ]
        # Those that were looked at in vain have their turn again after all others.
        start = self._looked_at if self._looked_at < len(known) else 0
        known = known[start : start + _MOST_LOOKED_AT]
        times = await each_of(self._times_of(member) for member in known)
        order: list[tuple[bool, bool, float, bytes]] = []
        for member, found in zip(known, times, strict=True):
            if found is not None:
                expires, created = found
                used_at = expires - idle
                was_used = used_at - created > unused_for
                order.append((not has_come(expires, asleep), was_used, used_at, member))
        args = repr(latest), repr(asleep), owner, 0, int(opened)
        members = [member for *_, member in sorted(order)]
        evicted = await self._evict_some(members, limit, args, now)
        self._looked_at = start if evicted else start + len(known)
        return evicted

    @readable
    async def evict_own(
        self,
        principal: Principal,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
    ) -> Sequence[SessionRecord]:
        now = await self._clock.at(now)
        owner, held_tags = owner_of(principal), {tag_of(session_id) for session_id in held}
        asleep = asleep_by(now, self._policy)
        latest = unused_by(Mode.CONVERSATION, now, unused_for, self._policy)
        listed = await self._entries("SMEMBERS", self._owned(owner))
        if not listed:
            return []
        ranks: list[Any] = await self._command("ZMSCORE", self._all, *listed)
        order = sorted(
            (float(rank), member)
            for rank, member in zip(ranks, listed, strict=True)
            if rank is not None
            and has_come(float(rank), latest if member.endswith(OF_CONVERSATION) else asleep)
            and tag_in(member) not in held_tags
        )
        # An entry is no later than the deadline, which requests have moved since.
        known = [member for _, member in order[:_MOST_LOOKED_AT]]
        times = await each_of(self._times_of(member) for member in known)
        due = [
            (found[0], member)
            for found, member in zip(times, known, strict=True)
            if found is not None
        ]
        if not due:
            return []
        # So that those which are in use are not looked at again, before others.
        await self._command(
            "ZADD", self._all, "XX", *(each for at, member in due for each in (repr(at), member))
        )
        members = [member for at, member in sorted(due) if has_come(at, max(asleep, latest))]
        args = repr(latest), repr(asleep), owner, 1, 0
        return await self._evict_some(members, limit, args, now)

    @readable
    async def evict_heavy(
        self, *, now: float, most: int, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        now = await self._clock.at(now)
        by = asleep_by(now, self._policy)
        if by == -math.inf or await self._has_at_most(most):
            return []
        size, passed = 0, 0
        while size <= most:
            members = await self._entries(
                *("ZREVRANGEBYSCORE", self._all, repr(by), "-inf", "LIMIT", passed, AT_ONCE)
            )
            if not members:
                return []
            sizes = await each_of(
                self._run(scripts.SIZE, [self._key_of(tag_in(member))], repr(by))
                for member in members
            )
            for each in sizes:
                size += of_kind(int, each) if each is not None else 0
                passed += size <= most
        asleep = of_kind(int, await self._command("ZCOUNT", self._all, "-inf", repr(by)))
        heavy = max(0, min(asleep - passed, limit + len(held)))
        oldest = await self._entries(
            *("ZRANGEBYSCORE", self._all, "-inf", repr(by), "LIMIT", 0, heavy)
        )
        held_tags = {tag_of(session_id) for session_id in held}
        members = [member for member in oldest if tag_in(member) not in held_tags]
        args = repr(by), repr(by), "", 2, 0
        return await self._evict_some(members, limit, args, now)

    async def _has_at_most(self, most: int) -> bool:
        """Whether all that is in Redis is no more than so many bytes: then no part of it is more.
        In a cluster only one node would answer.
        """
        if not isinstance(self._link, RedisLink):
            return False
        found = _USED.search(of_kind(bytes, await self._command("INFO", "memory")))
        return found is not None and int(found[1]) <= most

    @readable
    async def sleep(self, *, now: float) -> None:
        by = asleep_by(await self._clock.at(now), self._policy)
        passed = 0
        while members := await self._entries(
            *("ZRANGEBYSCORE", self._all, f"({self._slept_by!r}", repr(by)),
            *("LIMIT", passed, AT_ONCE),
        ):
            later = await each_of(self._fall_asleep(member, by) for member in members)
            passed += later.count(None)
        self._slept_by = by

    async def _times_of(self, member: bytes) -> tuple[float, float] | None:
        key = self._key_of(tag_in(member))
        expires, created = await self._command("HMGET", key, "expires", "created")
        if expires is None or created is None:
            return None
        try:
            return float(expires), float(created)
        except ValueError as failed:
            raise unreadable(failed) from failed

    async def _fall_asleep(self, member: bytes, by: float) -> bytes | None:
        """Return the deadline of a session that does not sleep yet. It is looked at again then."""
        key, epoch = self._key_of(tag_in(member)), mint_log_epoch()
        later = await self._run(scripts.FALL_ASLEEP, [key], epoch, repr(by))
        if later is not None:
            await self._command("ZADD", self._all, "XX", later, member)
        return later

    async def _evict_some(
        self, members: Sequence[bytes], limit: int, args: Sequence[Value], now: float
    ) -> list[SessionRecord]:
        waiting = deque(members)
        evicted: list[SessionRecord] = []
        while waiting and len(evicted) < limit:
            most = min(len(waiting), limit - len(evicted))
            some = [waiting.popleft() for _ in range(most)]
            done = await each_of(
                self._leave(member, scripts.EVICT, *args, now=now) for member in some
            )
            evicted += [each[0] for each in done if each is not None and each[0] is not None]
        return evicted
