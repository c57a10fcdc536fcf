from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mcp_sessions.core.life import (
    asleep_by,
    deadline_of,
    has_come,
    idle_deadline,
    idle_time,
    new_life,
    unused_by,
)
from mcp_sessions.core.request_keys import Begun, KeyUse, key_cost
from mcp_sessions.core.states import UNNAMED, Mode
from mcp_sessions.errors import LimitReached, StoreUnavailable
from mcp_sessions.ids import FencingEpoch, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_log_epoch, mint_session_id
from mcp_sessions.stores.limits import check_peer, most_of_one
from mcp_sessions.stores.records import Admitted, CurrentUse, Peer, SessionPage, SessionRecord
from mcp_sessions.stores.redis.commands import AT_ONCE, each_of, known_to_script, readable, tag_of
from mcp_sessions.stores.redis.lists import Lists, is_old, tag_in
from mcp_sessions.stores.redis.record_codec import (
    NOTHING,
    KnownFacts,
    ScriptAnswer,
    decoded,
    encoded,
    fields_of,
    owner_of,
    packed,
    unpacked,
    unreadable,
)
from mcp_sessions.stores.redis.redis_connection import RedisLink, Value

OF_CONVERSATION = b".c"
"""Ends the entry of a conversation's session: its principal may have many of others."""

_USED = re.compile(rb"used_memory:(\d+)")

_MOST_LOOKED_AT = 2_048
"""Sessions that are asked whether they hold something, when room has to be made."""


class Sleepers(Lists):
    """The sessions that sleep, and those that end early to make room."""

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
        listed = await self._command("ZRANGEBYSCORE", self._all, "-inf", repr(latest))
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
        times = await each_of(self._times_of, known)
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
        listed = await self._command("SMEMBERS", self._owned(owner))
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
        times = await each_of(self._times_of, known)
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
            members = await self._command(
                *("ZREVRANGEBYSCORE", self._all, repr(by), "-inf", "LIMIT", passed, AT_ONCE)
            )
            if not members:
                return []
            sizes = await each_of(
                lambda member: self._run("size", [self._key_of(tag_in(member))], repr(by)), members
            )
            for each in sizes:
                size += each if each is not None else 0
                passed += size <= most
        asleep: int = await self._command("ZCOUNT", self._all, "-inf", repr(by))
        heavy = max(0, min(asleep - passed, limit + len(held)))
        oldest = await self._command(
            *("ZRANGEBYSCORE", self._all, "-inf", repr(by), "LIMIT", 0, heavy)
        )
        held_tags = {tag_of(session_id) for session_id in held}
        members = [member for member in oldest if tag_in(member) not in held_tags]
        args = repr(by), repr(by), "", 2, 0
        return await self._evict_some(members, limit, args, now)

    async def _has_at_most(self, most: int) -> bool:
        """Whether all that is in Redis is no more than so many bytes: then no part of it is
        more.
        """
        used = await self._used_memory()
        return used is not None and used <= most

    async def _used_memory(self) -> int | None:
        """Bytes of all that is in Redis; None: unknown. In a cluster only one node would answer."""
        if not isinstance(self._link, RedisLink):
            return None
        found = _USED.search(await self._command("INFO", "memory"))
        return int(found[1]) if found is not None else None

    @readable
    async def sleep(self, *, now: float) -> None:
        by = asleep_by(await self._clock.at(now), self._policy)
        passed = 0
        while members := await self._command(
            *("ZRANGEBYSCORE", self._all, f"({self._slept_by!r}", repr(by)),
            *("LIMIT", passed, AT_ONCE),
        ):
            later = await each_of(lambda member: self._fall_asleep(member, by), members)
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
        later = await self._run("fall_asleep", [key], epoch, repr(by))
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
            done = await each_of(lambda member: self._leave(member, "evict", *args, now=now), some)
            evicted += [each[0] for each in done if each is not None and each[0] is not None]
        return evicted


_DEADLINES = b"expires", b"ends"
"""The names of the two deadlines in a record."""


class LivesInRedis(Sleepers):
    @readable
    async def create(
        self,
        mode: Mode,
        principal: Principal,
        *,
        peer: Peer | None,
        now: float,
        session_id: SessionId | None = None,
    ) -> SessionRecord:
        policy = self._policy
        check_peer(peer, policy)
        known = await self.load(session_id, now=now) if session_id is not None else None
        if known is not None:
            return known
        now = await self._clock.at(now)
        session_id = session_id or mint_session_id()
        life = new_life(mode, now=now, policy=policy)
        owned = self._owned(owner_of(principal))
        member = f"{tag_of(session_id)}.{owned[-16:]}.{int(await self._clock.now()):x}"
        if mode in UNNAMED:
            member += OF_CONVERSATION.decode()
        of_one = most_of_one(mode, policy) or 2**53
        # An entry first, then the session: a process that dies in between leaves an entry that
        # nobody has, which is given up when its deadline has passed.
        for attempt in range(2):
            reached = await self._run(
                "reserve",
                [self._all, owned],
                member,
                repr(life.expires_at),
                policy.max_sessions,
                of_one,
                0 if life.ends_at == math.inf else self._list_lifetime,
            )
            if not reached:
                break
            if attempt or not await self._heal(self._all if reached == b"max_sessions" else owned):
                limit = reached.decode()
                most = policy.max_sessions if limit == "max_sessions" else of_one
                raise LimitReached(limit, most)
        fields = fields_of(session_id, mode, principal, peer, life)
        flat = [part for pair in fields.items() for part in pair]
        epoch = mint_log_epoch()
        answer = await self._on(session_id, "create", repr(now), epoch, member, *flat)
        (made, left), is_new = answer
        if left is not None:
            await self._release(left)
        record = self._record(made)
        record.is_new = is_new == 1
        return record

    @readable
    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        now = await self._clock.at(now)
        known = self._sessions.of(session_id)
        found = await self._on(session_id, "load", repr(now), *known_to_script(known))
        return self._record(found, known) if found is not None else None

    @readable
    async def admit(
        self,
        session_id: SessionId,
        principal: Principal,
        *,
        mode: Mode,
        now: float,
        held: bool = False,
        fencing_epoch: FencingEpoch | None = None,
        key: KeyUse | None = None,
        current: CurrentUse | None = None,
    ) -> Admitted | None:
        now = await self._clock.at(now)
        known = self._sessions.of(session_id)
        keys = [self._key(session_id)]
        epoch = fencing_epoch if fencing_epoch is not None else ""
        args: list[Value] = [owner_of(principal), repr(now)]
        args += mode.value, idle_deadline(now=now, idle_timeout=self._idle_times[mode])
        args += deadline_of(*_DEADLINES, held=held), epoch, *known_to_script(known)
        within = NOTHING
        # In a cluster they are two nodes', mostly.
        if current is not None and isinstance(self._link, RedisLink):
            within, mode, key = self._sessions.of(current.session_id), Mode.PROTOCOL, current.key
            keys.append(self._key(current.session_id))
            args += mode.value, idle_deadline(now=now, idle_timeout=self._idle_times[mode])
            args += deadline_of(*_DEADLINES, held=current.held), "", *known_to_script(within)
        if key is not None:
            args += self._of_key(key)
        answer = await self._run("admit", keys, *args)
        if answer is None:
            return None
        if answer[0] != b"with current":
            return await self._admitted(answer, known, key)
        _, outer, inner = answer
        admitted = None
        if inner is not None and inner[0] == b"admitted":
            admitted = await self._admitted(inner, within, key)
        record = self._record(outer[1], known)
        if outer[2] is not None:
            await self._wake(record, outer[2])
        return Admitted(record, current=admitted)

    def _deadlines(self, now: float) -> list[Value]:
        each = self._idle_times.items()
        deadlines = ((mode.value, idle_deadline(now=now, idle_timeout=idle)) for mode, idle in each)
        return [part for deadline in deadlines for part in deadline]

    def _of_key(self, key: KeyUse) -> tuple[Value, ...]:
        return (
            encoded(key.key),
            key_cost(key.key),
            key.digest,
            key.runner,
            packed(sorted(key.scopes)),
            self._policy.request_key_bytes,
            repr(self._policy.request_key_lifetime),
            key.run,
            key.instead_of,
        )

    async def _admitted(
        self, answer: ScriptAnswer, known: KnownFacts, key: KeyUse | None
    ) -> Admitted:
        record = self._record(answer[1], known)
        if answer[0] == b"displaced":
            return Admitted(record, displaced=True)
        if len(answer) > 2 and answer[2] is not None:
            await self._wake(record, answer[2])
        if len(answer) <= 3:
            return Admitted(record)
        begun = Begun(answer[3].decode())
        if begun in (Begun.FULL, Begun.OTHER_CONTENT):
            return Admitted(record, begun)
        _, _, _, _, runner, scopes, outcome, run = answer
        if key is not None and not key.scopes.issuperset(unpacked(scopes)):
            return Admitted(record, Begun.FEWER_SCOPES)
        return Admitted(record, begun, outcome, runner.decode(), (run or b"").decode())

    async def _wake(self, record: SessionRecord, member: bytes) -> None:
        """Move the entry of a session that slept: :meth:`sleep` found it there before."""
        await self._command("ZADD", self._all, "XX", repr(record.life.expires_at), member)

    @readable
    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        now = await self._clock.at(now)
        args = repr(now), *self._deadlines(now)
        await each_of(lambda each: self._on(each, "touch", *args), session_ids)

    @readable
    async def end(self, session_id: SessionId) -> SessionRecord | None:
        member, found, tokens = await self._on(session_id, "end")
        if found is None:
            return None
        await self._forget(session_id, member, tokens)
        return self._record(found)

    @readable
    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        now = await self._clock.at(now)
        held_tags = {tag_of(session_id) for session_id in held}
        deadlines = self._deadlines(now)
        expired: list[SessionRecord] = []
        skipped = 0
        while len(expired) < limit:
            wanted = min(limit - len(expired), AT_ONCE)
            try:
                members = await self._command(
                    "ZRANGEBYSCORE", self._all, "-inf", repr(now), "LIMIT", skipped, wanted
                )
                if not members:
                    break
                done = await each_of(
                    lambda member: self._expire(member, held_tags, now, deadlines), members
                )
            except StoreUnavailable:
                if not expired:
                    raise
                # Those have ended, and nobody is notified of them a second time.
                break
            for outcome in done:
                # One whose record cannot be used stays due, and the others have their turn.
                record, is_left = outcome if outcome is not None else (None, True)
                skipped += is_left
                if record is not None:
                    expired.append(record)
        return expired

    @readable
    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        if principal is None:
            members = await self._command("ZRANGE", self._all, 0, -1)
        else:
            members = await self._command("SMEMBERS", self._owned(owner_of(principal)))
        there = await self._clock.now()
        records = await each_of(lambda member: self._listed(member, there), members)
        return [record for record in records if record is not None]

    @readable
    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        # A scan, as the order of the list changes with each use.
        cursor, found = await self._command("ZSCAN", self._all, after or "0", "COUNT", limit)
        there = await self._clock.now()
        records = await each_of(lambda member: self._listed(member, there), found[::2])
        following = decoded(cursor)
        return SessionPage(
            [each for each in records if each is not None], following if following != "0" else None
        )

    async def _listed(self, member: bytes, there: float) -> SessionRecord | None:
        key = self._key_of(tag_in(member))
        found = await self._run("load", [key], "", *known_to_script(NOTHING))
        if found is None:
            if is_old(member, there):
                await self._release_gone(member, there)
            return None
        return self._record(found)

    async def _expire(
        self, member: bytes, held: Collection[str], now: float, deadlines: Sequence[Value]
    ) -> tuple[SessionRecord | None, bool]:
        counts = deadline_of(*_DEADLINES, held=tag_in(member) in held)
        return await self._leave(member, "expire", repr(now), counts, *deadlines, now=now)
