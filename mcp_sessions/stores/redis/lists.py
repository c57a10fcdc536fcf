"""Keep the lists over all sessions in Redis, which lie in other slots of a cluster.

A separate script writes them, before or after the session's own script. If this process dies
between the two, the lists have too much, and never too little. Reading finds the surplus.

How sessions ended, and when the store was made, is kept next to these lists.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from mcp_sessions.core.ends import (
    MOST_ENDS,
    REMEMBERED_FOR,
    EndReason,
    SessionEnd,
    StoreMade,
)
from mcp_sessions.core.life import has_come
from mcp_sessions.core.messages import decode, encode
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import DIGEST_LENGTH, SessionId
from mcp_sessions.security import mint_process
from mcp_sessions.stores.ends_contract import EndedOutside
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.redis.commands import MARGIN, Commands, all_of, readable, tag_of
from mcp_sessions.stores.redis.record_codec import decoded, tokens_of
from mcp_sessions.stores.redis.redis_connection import RedisLink, Value

_AT_ONCE = 1_000
"""Ends that one call hands out."""


class EndsInRedis(Commands):
    def __init__(self, link: RedisLink, namespace: str, clock: Callable[[], float]) -> None:
        super().__init__(link, namespace, clock)
        self._ends = f"{{{namespace}}}:ends"
        self._ends_outside = f"{{{namespace}}}:ends-outside"
        self._made = f"{{{namespace}}}:made"
        self._sealed_by = f"{{{namespace}}}:sealed-by"

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
        new: list[int] = await self._run("remember_ends", keys, *args)
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
        own = None
        if now is not None and found is not None:
            await self._command("PEXPIRE", self._made, self._list_lifetime)
        elif now is not None:
            # Not sooner: a store that is full takes no writes, and can be asked all the same.
            own = StoreMade(mint_process(), await self._clock.at(now), is_new=True)
            found = await self._command(
                *("SET", self._made, f"{own.name} {own.at!r}"),
                *("NX", "GET", "PX", self._list_lifetime),
            )
        if found is None:
            return own
        name, at = found.split(b" ")
        return StoreMade(name.decode(), float(at))

    @readable
    async def sealing_keys(self, *, add: str | None = None) -> frozenset[str]:
        if add is not None:
            await self._command("SADD", self._sealed_by, add)
        found: list[bytes] = await self._command("SMEMBERS", self._sealed_by)
        return frozenset(decoded(each) for each in found)

    async def _note_lost(self, tag: str, at: float) -> None:
        end = SessionEnd(tag[:DIGEST_LENGTH], EndReason.LOST, at)
        await self.remember_ends([end], now=at, outside=True)


def _read(kept: Iterable[bytes]) -> list[SessionEnd]:
    ends = (SessionEnd.from_json(decode(each)) for each in kept)
    return [end for end in ends if end is not None]


logger = logging.getLogger(__name__)

IN_FLIGHT = 60
"""Seconds after which a step that another process had begun is taken for one that died with
it."""

PAGE = 256
"""Sessions that one step of a scan looks at."""


class Lists(EndsInRedis):
    def __init__(self, link: RedisLink, namespace: str, clock: Callable[[], float]) -> None:
        super().__init__(link, namespace, clock)
        self._healed: dict[str, float] = {}
        """When each list was last looked through, by the server's clock."""

    async def _leave(
        self, member: bytes, script: str, *args: Value, now: float
    ) -> tuple[SessionRecord | None, bool]:
        """Run a script that may end a session, and remove the session from every list then.

        Returns:
            The record, if the session has ended; and whether its entry remains.
        """
        tag = tag_in(member)
        outcome, *rest = await self._run(script, [self._key_of(tag)], *args)
        if outcome == b"kept":
            return None, True
        if outcome == b"later":
            # XX: whoever ended it meanwhile has taken it out.
            await self._command("ZADD", self._all, "XX", rest[0], member)
            return None, has_come(float(rest[0]), now)
        if outcome == b"gone":
            # Its time to live ran out while no server was there, or it is being made.
            is_left = not is_old(member, await self._clock.now())
            if not is_left:
                await self._release_gone(member, now)
            return None, is_left
        try:
            record = self._record(rest[0])
        except StoreRefused as failed:
            # A newer version's, or not ours. It is over all the same.
            logger.error("an expired session could not be read: %s", failed)
            record = None
        session_id = record.session_id if record is not None else None
        is_left = not await self._forget(session_id, member, rest[1], tag=tag)
        return record, is_left

    async def _forget(
        self,
        session_id: SessionId | None,
        member: bytes | None,
        tokens: Sequence[bytes],
        *,
        tag: str | None = None,
    ) -> bool:
        """Remove a session that ended from every list. Return whether all of it was done.

        The next reader of a list finds the rest. That is no error: the session has ended, and the
        caller has to continue.

        Args:
            session_id: None: it is not known, but its ``tag`` is.
        """
        if session_id is not None:
            self._sessions.forget(session_id)
        tag = tag if tag is not None else tag_of(session_id or "")
        try:
            if member is not None:
                await self._release(member)
            await self._drop_subscribers(tag, tokens_of(tokens))
        except StoreUnavailable as failed:
            logger.warning("an ended session is still in a list: %s", failed)
            return False
        return True

    async def _ids(self, members: Sequence[bytes]) -> list[SessionId]:
        """Of those of the sessions that are there."""
        ids = await self._on_each("ids", [self._key_of(tag_in(member)) for member in members])
        return [SessionId(decoded(name)) for name in ids if name is not None]

    @readable
    async def _release(self, member: bytes) -> bytes | None:
        owned = f"{{{self._namespace}}}:of:{member.decode().split('.')[1]}"
        return await self._run("release", [self._all, owned], member)

    async def _release_gone(self, member: bytes, now: float) -> None:
        """Remove an entry without a record of its session. A record is kept after its entry is due,
        for half of the margin at least: before that it can only have been lost.
        """
        deadline = await self._release(member)
        if deadline is not None and not has_come(float(deadline) + MARGIN / 2, now):
            await self._note_lost(tag_in(member), now)

    @readable
    async def _heal(self, entries: str) -> bool:
        """Remove the entries of sessions that are gone. Return whether there were any. It asks for
        every session, so it waits until other entries can be old.
        """
        there = await self._clock.now()
        if there - self._healed.get(entries, -math.inf) < IN_FLIGHT:
            return False
        if len(self._healed) >= PAGE:
            self._healed.clear()
        self._healed[entries] = there
        members = await self._command(
            *(("ZRANGE", entries, 0, -1) if entries == self._all else ("SMEMBERS", entries))
        )
        old = [member for member in members if is_old(member, there)]
        found = await all_of(
            self._command("EXISTS", self._key_of(tag_in(member))) for member in old
        )
        gone = [member for member, is_there in zip(old, found, strict=True) if not is_there]
        await all_of(self._release_gone(member, there) for member in gone)
        return bool(gone)

    async def _note_subscribers(
        self, tag: str, token: str, uris: Iterable[str], lifetime: int
    ) -> None:
        await all_of(
            self._run("note_subscriber", [self._subscribers_key(uri)], tag, token, lifetime)
            for uri in uris
        )

    async def _drop_subscribers(self, tag: str, tokens: Mapping[bytes, bytes]) -> None:
        await all_of(
            self._run("drop_subscriber", [self._subscribers_key(decoded(uri))], tag, token)
            for uri, token in tokens.items()
        )

    async def _token(self, session_id: SessionId) -> str:
        """Name one act of subscribing, so that undoing an older one does not undo it."""
        return f"{int(await self._clock.now()):x}.{secrets.token_hex(6)} {session_id}"

    async def _tidy_subscriber(self, uri: str, session_id: SessionId) -> None:
        """Remove a session that is no subscriber from a resource's list: it unsubscribed, or a
        process died between the two steps of subscribing.
        """
        key, tag = self._subscribers_key(uri), tag_of(session_id)
        token = await self._command("HGET", key, tag)
        there = await self._clock.now()
        if token is not None and int(token.partition(b".")[0], 16) < there - IN_FLIGHT:
            await self._run("drop_subscriber", [key], tag, token)


def tag_in(member: bytes) -> str:
    """The session's tag in its entry: that, its owner's, and when it was made."""
    return member.decode().split(".")[0]


def is_old(member: bytes, now: float) -> bool:
    """Whether the process that added a member had time enough to finish."""
    return int(member.decode().split(".")[2], 16) < now - IN_FLIGHT
