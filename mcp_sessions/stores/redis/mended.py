"""Mend keys that another program damaged: of another type, unreadable, or gone.

One rule: a call that meets such a key fails once, and the unreadable part counts as lost from then
on (``lua/mend.lua``). So no session is refused for ever, and no session suffers for another:

* A part of a session (its state, its data, a log, its keys) is lost alone, and the session
  continues, as after a failover that lost writes.
* A session without its main record is lost: it is not found.
* The next round of expiry makes a list of sessions again from the sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from redis.exceptions import ResponseError

from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.records import SessionRecord
from mcp_sessions.stores.redis import scripts
from mcp_sessions.stores.redis.commands import AT_ONCE, each_of
from mcp_sessions.stores.redis.lists import IN_FLIGHT
from mcp_sessions.stores.redis.record_codec import UnreadableRecord
from mcp_sessions.stores.redis.redis_belongings import BelongingsInRedis
from mcp_sessions.stores.redis.redis_events import EventsInRedis
from mcp_sessions.stores.redis.redis_sessions import LivesInRedis

logger = logging.getLogger(__name__)

_NO_LIMIT = 2**53

_UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions of Python for an answer that no script of ours gives."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _mending(method: Method, unexpected: tuple[type[Exception], ...] = _UNEXPECTED) -> Method:
    """Return ``method`` so that it counts unreadable values of its session as lost.

    Args:
        unexpected: The exceptions that it raises then, and never for a wrong argument.
    """

    @wraps(method)
    async def call(self: Mended, *args: Any, **named: Any) -> Any:
        try:
            return await method(self, *args, **named)
        except unexpected as failed:
            of = args[0] if args else None
            some = cast("list[Any]", of if isinstance(of, list) else [of])
            ids = [each for each in some if isinstance(each, str)]
            await self.mend_sessions(ids)
            raise StoreRefused(
                f"a value in Redis cannot be read ({type(failed).__name__}): it counts as lost"
            ) from failed

    return cast(Method, call)


class Mended(LivesInRedis, EventsInRedis, BelongingsInRedis):
    """The store, which counts unreadable values as lost."""

    load = _mending(LivesInRedis.load)
    admit = _mending(LivesInRedis.admit)
    end = _mending(LivesInRedis.end)
    evict = _mending(LivesInRedis.evict)
    evict_own = _mending(LivesInRedis.evict_own)
    all_sessions = _mending(LivesInRedis.all_sessions)
    append = _mending(EventsInRedis.append)
    append_change = _mending(EventsInRedis.append_change)
    read = _mending(EventsInRedis.read)
    head = _mending(EventsInRedis.head)
    open_stream = _mending(EventsInRedis.open_stream)
    heads = _mending(EventsInRedis.heads)
    relay = _mending(EventsInRedis.relay)
    attach = _mending(EventsInRedis.attach)
    subscribe = _mending(BelongingsInRedis.subscribe)
    unsubscribe = _mending(BelongingsInRedis.unsubscribe)
    subscribers = _mending(BelongingsInRedis.subscribers)
    change = _mending(BelongingsInRedis.change)
    claim = _mending(BelongingsInRedis.claim)
    load_data = _mending(BelongingsInRedis.load_data)
    touch = _mending(LivesInRedis.touch)
    sleep = _mending(LivesInRedis.sleep)
    carry = _mending(EventsInRedis.carry)
    detach = _mending(EventsInRedis.detach)
    ended_outside = _mending(LivesInRedis.ended_outside)
    ends = _mending(LivesInRedis.ends)
    made = _mending(LivesInRedis.made)
    remember_ends = _mending(LivesInRedis.remember_ends)
    create = _mending(LivesInRedis.create, (UnreadableRecord,))
    change_state = _mending(BelongingsInRedis.change_state, (UnreadableRecord,))

    async def _mend(self, keys: Iterable[str], *, is_read: bool = False) -> None:
        lost = 0
        for key in {self._whole_of(key) for key in keys}:
            try:
                found = await self._mend_one(key)
                if is_read and not found:
                    # Lua reads some texts as JSON that are none.
                    found = await self._mend_one(key, "all JSON")
                lost += found
            except (ResponseError, StoreUnavailable, *_UNEXPECTED):
                # The server refuses writes, is away, or gives this another answer than it can
                # have. The next call that meets it tries again.
                continue
        if lost:
            logger.warning("%d values in Redis could not be read: they count as lost", lost)

    async def mend_sessions(self, session_ids: Iterable[str]) -> None:
        await self._mend([self._key(SessionId(each)) for each in session_ids], is_read=True)

    async def _mend_one(self, key: str, which: str = "") -> int:
        kind = self._kind_of_list(key)
        if kind is None:
            now = repr(await self._clock.now())
            lost = await self._evaluated(scripts.MEND, key, now, which)
            if lost:
                self._forget_known(key)
            return lost
        lost = await self._evaluated(scripts.MEND_LIST, key, kind)
        if lost and key not in (self._ends, self._ends_outside, self._made):
            self._lost_lists.add(key)
        return lost

    async def _evaluated(self, script: scripts.Script, key: str, *args: str) -> int:
        return int(await self._link.call("EVAL", script.text, 1, key, *args))

    def _whole_of(self, key: str) -> str:
        return key if self._kind_of_list(key) else key.partition("}")[0] + "}"

    def _kind_of_list(self, key: str) -> str | None:
        if key in (self._all, self._ends):
            return "zset"
        if key == self._ends_outside:
            return "list"
        if key == self._made:
            return "string"
        if key.startswith(f"{{{self._namespace}}}:of:"):
            return "set"
        return "hash" if key.startswith(f"{self._namespace}:uri:") else None

    def _forget_known(self, key: str) -> None:
        # The cached facts of a session may be the lost ones. Few are mended.
        del key
        self._subscriptions.clear()
        self._peers.clear()

    @_mending
    async def expire(self, *, now: float, held: Any, limit: int) -> Sequence[SessionRecord]:
        await self._look_for_lost_entries()
        if self._lost_lists:
            lost, self._lost_lists = self._lost_lists, set()
            try:
                await self._list_again(lost)
            except StoreUnavailable:
                self._lost_lists |= lost
                raise
        return await super().expire(now=now, held=held, limit=limit)

    async def _look_for_lost_entries(self) -> None:
        there = await self._clock.now()
        if there - self._looked_for_entries < IN_FLIGHT:
            return
        self._looked_for_entries = there
        for member, owned in list(self._entered.items()):
            key = self._key_of(member.partition(".")[0])
            if await self._command("HGET", key, "member") != member.encode():
                # It has ended.
                del self._entered[member]
                continue
            is_listed = await self._command("ZSCORE", self._all, member)
            if is_listed is None or not await self._command("SISMEMBER", owned, member):
                logger.warning("a list of sessions in Redis was lost: it is rebuilt")
                self._lost_lists.add(self._all)
                return

    async def _list_again(self, lost: Iterable[str]) -> None:
        uris = [key for key in lost if key.startswith(f"{self._namespace}:uri:")]
        is_of_all = any(key not in uris for key in lost)
        nodes = await self._link.nodes()
        for node in nodes:
            cursor: bytes | str = "0"
            while True:
                cursor, keys = await node.call(
                    "SCAN", cursor, "MATCH", f"{self._namespace}:{{*}}", "COUNT", AT_ONCE
                )
                if is_of_all:
                    await each_of(self._enter_again(key.decode()) for key in keys)
                for uri in uris:
                    await each_of(self._subscribe_again(uri, key.decode()) for key in keys)
                if cursor == b"0":
                    break

    async def _enter_again(self, key: str) -> None:
        member, expires, ends = await self._command("HMGET", key, "member", "expires", "ends")
        if member is None or expires is None:
            return
        owned = f"{{{self._namespace}}}:of:{member.decode().split('.')[1]}"
        lifetime = 0 if ends == b"inf" else self._list_lifetime
        args = (member, expires, _NO_LIMIT, _NO_LIMIT, lifetime)
        await self._run(scripts.RESERVE, [self._all, owned], *args)

    async def _subscribe_again(self, subscribers: str, key: str) -> None:
        """Add a session to a list of subscribers. The digest of its resource is known, not its
        name.
        """
        for uri, token in _pairs(await self._command("HGETALL", f"{key}:u")):
            if self._subscribers_key(uri.decode("utf-8", "surrogatepass")) == subscribers:
                tag = key.partition("{")[2].rstrip("}")
                await self._run(
                    scripts.NOTE_SUBSCRIBER, [subscribers], tag, token, self._list_lifetime
                )


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
