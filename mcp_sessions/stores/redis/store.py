"""Sessions in Redis (7 or later) or Valkey, shared by every process that names the same one.

Each method is one Lua script (``lua/``) on the session's own keys. What belongs to no single
session (how many there are, whose they are, when they are due, who subscribed to what) lies in
other slots of a cluster and is written by a script of its own, before or after, in the order in
which the death of this process leaves too much there and never too little. What is too much is
found when it is read.

Keys, where ``NS`` is the namespace, ``T`` a digest of the session id and ``U`` one of a URI::

    NS:{T}            hash: the session, and the counters of its logs
    NS:{T}:e:STREAM   stream: events        NS:{T}:k:STREAM  hash: coalescing keys
    NS:{T}:u          hash: subscriptions   NS:{T}:s  hash: state    NS:{T}:d  string: data
    NS:{T}:c          hash: carried         NS:{T}:q  NS:{T}:qf  NS:{T}:qa   request keys
    NS:{T}:r          sorted set: response streams that hold events, by the oldest's time
    {NS}:all          sorted set: every session, by deadline
    {NS}:of:P         set: those of the principal with digest P
    NS:uri:{U}        hash: subscribers
    NS:alive:PROCESS  a process that lives (``pubsub.py``)

All of them have a time to live, but for a conversation's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.exceptions import NoScriptError, ResponseError

from mcp_sessions import metrics
from mcp_sessions.core import log
from mcp_sessions.core.lifetime import end_of_life, idle_deadline
from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import Begun, key_cost
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError, LimitReached, Refusal, StoreUnavailable
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    LogEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
    parse_position,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_log_epoch, mint_session_id
from mcp_sessions.stores.contract import StateConflict
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.limits import check_data, check_peer, check_subscriptions, text_size
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    Attached,
    Audience,
    CurrentSession,
    Data,
    KeyUse,
    Peer,
    Relayed,
    ServerChange,
    SessionRecord,
    Told,
)
from mcp_sessions.stores.redis import scripts
from mcp_sessions.stores.redis.clock import SharedClock
from mcp_sessions.stores.redis.cluster import ClusterLink
from mcp_sessions.stores.redis.codec import (
    NOTHING,
    Answer,
    Known,
    Peers,
    Subscriptions,
    decoded,
    encoded,
    event_of,
    events_of,
    fields_of,
    owner_of,
    packed,
    record_of,
    stored_attachment,
    tag_of,
    tokens_of,
    unpacked,
)
from mcp_sessions.stores.redis.connection import (
    TIMEOUT,
    Link,
    MakeConnection,
    Value,
    check_url,
    connections_to,
    unavailable,
    url_of_node,
)
from mcp_sessions.stores.redis.pubsub import RedisExchange
from mcp_sessions.stores.redis.scripts import Script

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "mcp-sessions"
OLDEST_VERSION = 7
MARGIN = 900
"""Seconds that a key lives on after its session's deadline; ``lua/session.lua`` has it too."""

IN_FLIGHT = 60
"""Seconds after which a step that another process had begun is taken for one that died with
it."""

_BATCH = 200

_MOST_LOOKED_AT = 2_048
"""Sessions that are asked whether they hold something, when room has to be made."""

_PAGE = 256
"""Sessions that one step of a scan looks at."""

_NAMESPACE = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)


class RedisStore:
    """A :class:`~mcp_sessions.stores.contract.SessionStore` of Lua scripts."""

    name = "redis"
    survives_process = True
    remembers = True

    def __init__(
        self,
        url: str,
        *,
        namespace: str | None = None,
        timeout: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take what it works with; nothing is connected yet.

        Args:
            url: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://`` or ``unix://``; its
                query may hold ``namespace``, ``timeout`` and the options of redis-py.
            namespace: The beginning of every key, for stores that share one Redis; 1 to 64 of
                ``A-Z a-z 0-9 _ . : -``. None: ``mcp-sessions``.
            timeout: Seconds that an answer may take; None: 3.
            clock: What ``now`` is read from by who calls the store, seconds since 1970; it is
                compared to the server's.

        Raises:
            ConfigurationError: The URL, the namespace or the timeout cannot be used.
        """
        check_url(url)
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        named, seconds = options.pop("namespace", NAMESPACE), options.pop("timeout", TIMEOUT)
        namespace = namespace if namespace is not None else named
        if _NAMESPACE.fullmatch(namespace) is None:
            raise ConfigurationError("a namespace has 1 to 64 of A-Z a-z 0-9 _ . : -")
        try:
            timeout = timeout if timeout is not None else float(seconds)
        except ValueError:
            timeout = 0
        if not 0 < timeout < math.inf:
            raise ConfigurationError("a store's timeout is a positive number of seconds")
        self._url = urlunsplit(parts._replace(query=urlencode(options)))
        make = connections_to(self._url)
        self._namespace = namespace
        self._policy = SessionPolicy()
        self._link: Link | ClusterLink = Link(make, timeout)
        self._subscriptions = Subscriptions()
        self._peers = Peers()
        self._clock = SharedClock(self._time, clock)
        self._all = f"{{{namespace}}}:all"
        self._looked_at = 0
        """Where :meth:`evict` goes on: how many it looked at in vain."""

        self._healed: dict[str, float] = {}
        """When each list was last looked through, by the server's clock."""

        self.exchange: Exchange | None = RedisExchange(make, self._link, namespace, self._key)

    async def open(self, policy: SessionPolicy) -> None:
        """Connect, and serve within the limits of ``policy``.

        Raises:
            ConfigurationError: It is too old.
        """
        self._policy = policy
        answer = await self._command("INFO")
        about = dict(
            line.split(":", 1)
            for line in answer.decode("utf-8", "replace").split("\r\n")
            if ":" in line
        )
        version = about.get("redis_version", "0")
        if int(version.partition(".")[0]) < OLDEST_VERSION:
            raise ConfigurationError(
                f"the server is Redis {version}; sessions need Redis {OLDEST_VERSION} or later, or "
                "Valkey"
            )
        if about.get("redis_mode") == "cluster" and isinstance(self._link, Link):
            await self._use_cluster(self._link)
        await self._clock.now()
        policy_name = about.get("maxmemory_policy", "noeviction")
        if policy_name != "noeviction":
            logger.warning(
                "this Redis may evict sessions that are alive (maxmemory-policy %s); set it to "
                "noeviction", policy_name,
            )  # fmt: skip
        if "master_replid" not in about:
            logger.warning("this Redis does not tell its replication id: lost writes go unnoticed")

    async def _use_cluster(self, seed: Link) -> None:
        def make_for(host: str, port: int) -> MakeConnection:
            return connections_to(url_of_node(self._url, host, port))

        cluster = self._link = ClusterLink(seed, make_for)
        await cluster.learn()
        if isinstance(self.exchange, RedisExchange):
            self.exchange.use(cluster.make, cluster)

    async def close(self) -> None:
        """Let go of the connections. The sessions stay."""
        if isinstance(self.exchange, RedisExchange):
            await self.exchange.close()
        await self._link.close()

    async def create(
        self, mode: Mode, principal: Principal, *, peer: Peer | None, now: float
    ) -> SessionRecord:
        policy = self._policy
        check_peer(peer, policy)
        now = await self._clock.at(now)
        session_id = mint_session_id()
        ends_at = end_of_life(mode, now=now, max_lifetime=policy.max_lifetime)
        deadline = idle_deadline(now=now, idle_timeout=policy.idle_timeout, ends_at=ends_at)
        owned = self._owned(owner_of(principal))
        member = f"{tag_of(session_id)}.{owned[-16:]}.{int(await self._clock.now()):x}"
        # A place first, then the session: a process that dies in between leaves a place that
        # nobody has, which is given up when its deadline has passed.
        for attempt in range(2):
            reached = await self._run(
                scripts.RESERVE,
                [self._all, owned],
                member,
                repr(deadline),
                policy.max_sessions,
                policy.max_sessions_per_principal or 2**53,
                0 if ends_at == math.inf else self._list_lifetime,
            )
            if not reached:
                break
            if attempt or not await self._heal(self._all if reached == b"max_sessions" else owned):
                raise LimitReached(reached.decode())
        fields = fields_of(session_id, mode, principal, peer, ends_at)
        fields |= {"created": repr(now), "expires": repr(deadline), "member": member}
        flat = [part for pair in fields.items() for part in pair]
        made = await self._on(
            session_id, scripts.CREATE, repr(now), policy.idle_timeout, mint_log_epoch(), *flat
        )
        return self._record(made)

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        now = await self._clock.at(now)
        known = self._known(session_id)
        found = await self._on(session_id, scripts.LOAD, repr(now), *_told(known))
        return self._record(found, known) if found is not None else None

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
    ) -> Admitted | None:
        now = await self._clock.at(now)
        policy = self._policy
        known = self._known(session_id)
        change, knows_peer = _told(known)
        of_key: tuple[Value, ...] = ("",) * 9
        if key is not None:
            of_key = (
                encoded(key.key),
                key_cost(key.key),
                key.digest,
                key.runner,
                packed(sorted(key.scopes)),
                policy.request_key_bytes,
                repr(policy.request_key_lifetime),
                key.run,
                key.instead_of,
            )
        answer = await self._on(
            session_id,
            scripts.ADMIT,
            owner_of(principal),
            mode.value,
            repr(now),
            policy.idle_timeout,
            int(held),
            fencing_epoch if fencing_epoch is not None else "",
            change,
            *of_key,
            knows_peer,
        )
        if answer is None:
            return None
        record = self._record(answer[1], known)
        if answer[0] == b"displaced":
            return Admitted(record, displaced=True)
        if len(answer) == 2:
            return Admitted(record)
        begun = Begun(answer[2].decode())
        if begun in (Begun.FULL, Begun.OTHER_CONTENT):
            return Admitted(record, begun)
        _, _, _, runner, scopes, outcome, run = answer
        if key is not None and not key.scopes.issuperset(unpacked(scopes)):
            return Admitted(record, Begun.FEWER_SCOPES)
        return Admitted(record, begun, outcome, runner.decode(), (run or b"").decode())

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        now = await self._clock.at(now)
        idle = self._policy.idle_timeout
        await _each_of(self._on(each, scripts.TOUCH, repr(now), idle) for each in session_ids)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        member, found, tokens = await self._on(session_id, scripts.END)
        if found is None:
            return None
        await self._forget(session_id, member, tokens)
        return self._record(found)

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        now = await self._clock.at(now)
        held_tags = {tag_of(session_id) for session_id in held}
        expired: list[SessionRecord] = []
        skipped = 0
        while len(expired) < limit:
            wanted = min(limit - len(expired), _BATCH)
            try:
                members: list[bytes] = await self._command(
                    "ZRANGEBYSCORE", self._all, "-inf", repr(now), "LIMIT", skipped, wanted
                )
                if not members:
                    break
                done = await _each_of(self._expire(member, held_tags, now) for member in members)
            except StoreUnavailable:
                if not expired:
                    raise
                # Those are over, and nobody is told of them a second time.
                break
            for outcome in done:
                # One whose record cannot be used stays due, and the others have their turn.
                record, is_left = outcome if outcome is not None else (None, True)
                skipped += is_left
                if record is not None:
                    expired.append(record)
        return expired

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
        idle, owner = self._policy.idle_timeout, owner_of(ANONYMOUS)
        before, of = now - unused_for, f".{self._owned(owner)[-16:]}.".encode()
        held_tags = {tag_of(session_id) for session_id in held}
        listed: list[bytes] = await self._command(
            "ZRANGEBYSCORE", self._all, "-inf", repr(before + idle)
        )
        known = [member for member in listed if of in member and _tag(member) not in held_tags]
        # Those that were looked at in vain have their turn again after all others.
        start = self._looked_at if self._looked_at < len(known) else 0
        known = known[start : start + _MOST_LOOKED_AT]
        times: list[list[bytes | None]] = await _all_of(
            self._command("HMGET", self._key_of(_tag(member)), "expires", "created")
            for member in known
        )
        order: list[tuple[bool, float, bytes]] = []
        for member, (expires, created) in zip(known, times, strict=True):
            if expires is not None and created is not None:
                used_at = float(expires) - idle
                order.append((used_at - float(created) > unused_for, used_at, member))
        waiting = deque(member for *_, member in sorted(order))
        evicted: list[SessionRecord] = []
        while waiting and len(evicted) < limit:
            most = min(len(waiting), limit - len(evicted))
            members = [waiting.popleft() for _ in range(most)]
            done = await _each_of(
                self._leave(member, scripts.EVICT, owner, repr(before), idle, int(opened), now=now)
                for member in members
            )
            evicted += [each[0] for each in done if each is not None and each[0] is not None]
        self._looked_at = start if evicted else start + len(known)
        return evicted

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        now = await self._clock.at(now)
        optional = (
            draft.after,
            encoded(draft.key) if draft.key is not None else None,
            draft.origin,
        )
        answer = await self._on(
            session_id,
            scripts.APPEND,
            stream,
            repr(now),
            mint_log_epoch(),
            *self._window,
            draft.before,
            *(value if value is not None else b"" for value in optional),
            "".join("0" if value is None else "1" for value in optional),
        )
        if answer is None:
            return None
        epoch, number, payload, connection, fence, replaced = answer
        event = event_of(
            LogEpoch(epoch.decode()), int(number), payload, now, draft.key, draft.origin
        )
        return Appended(event, stored_attachment(connection, fence), bool(replaced))

    async def renew(self, session_id: SessionId) -> None:
        await self._on(session_id, scripts.RENEW, mint_log_epoch())

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """See :meth:`SessionStore.audience`. A scan finds who is there all the time; its place
        means something to the server only that gave it.
        """
        place = after if after is not None else "0"
        if change.uri is not None:
            key = self._subscribers_key(change.uri)
            following, flat = await self._command("HSCAN", key, place, "COUNT", _PAGE)
            # Of a token: who, after when.
            found = [token.decode().partition(" ")[2] for token in flat[1::2]]
        else:
            following, flat = await self._command("ZSCAN", self._all, place, "COUNT", _PAGE)
            ids = await self._on_each(
                scripts.IDS, [self._key_of(_tag(member)) for member in flat[::2]]
            )
            found = [name.decode() for name in ids if name is not None]
        return Audience(
            [SessionId(name) for name in found], following.decode() if following != b"0" else None
        )

    async def tell(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[Told]:
        key = change.event.key
        answers = await self._on_each(
            scripts.TELL,
            [self._key(session_id) for session_id in session_ids],
            repr(now),
            mint_log_epoch(),
            *self._window,
            change.id,
            repr(change.at) if again else "",
            encoded(change.uri or ""),
            change.listed or "",
            *change.event.parts,
            change.bare.before,
            encoded(key) if key is not None else b"",
            int(key is not None),
        )
        told: list[Told] = []
        for session_id, answer in zip(session_ids, answers, strict=True):
            if answer == b"full":
                logger.error("a session's event log has issued its last id")
            elif answer not in (b"gone", b"not entitled"):
                told.append(_told_of(session_id, change, now, answer))
            elif change.uri is not None:
                await self._tidy_subscriber(change.uri, session_id)
        return told

    async def _tidy_subscriber(self, uri: str, session_id: SessionId) -> None:
        """A session in the list of a resource's subscribers is none: it unsubscribed, or a
        process died between the two steps of subscribing.
        """
        key, tag = self._subscribers_key(uri), tag_of(session_id)
        token = await self._command("HGET", key, tag)
        there = await self._clock.now()
        if token is not None and int(token.partition(b".")[0], 16) < there - IN_FLIGHT:
            await self._run(scripts.DROP_SUBSCRIBER, [key], tag, token)

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        now = await self._clock.at(now)
        answer = await self._on(
            session_id,
            scripts.READ,
            stream,
            repr(now),
            mint_log_epoch(),
            *self._window,
            *_place(after),
            limit if limit is not None else "",
            log.PAGE_BYTES,
        )
        if answer[0] is not None:
            return (), Refusal(answer[0].decode())
        return events_of(LogEpoch(answer[1].decode()), answer[2]), None

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        return await self._head(session_id, stream, make=False)

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        return await self._head(session_id, stream, make=True)

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        await self._on(session_id, scripts.DROP_STREAM, stream)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        epoch = fencing_epoch if fencing_epoch is not None else ""
        await self._on(session_id, scripts.DROP_ORIGIN, stream, origin, mint_log_epoch(), epoch)

    async def carry(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        after: Position,
    ) -> bool:
        place = (after.log_epoch, after.number, mint_log_epoch())
        return bool(await self._on(connection, scripts.CARRY, origin, fencing_epoch, *place))

    async def relay(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        event: LoggedEvent,
        *,
        now: float,
        skips: bool = False,
    ) -> Relayed:
        now = await self._clock.at(now)
        key = event.key[1] if event.key is not None else None
        answer = await self._on(
            connection,
            scripts.RELAY,
            origin,
            fencing_epoch,
            event.event_id.partition("-")[0],
            event.number,
            int(skips),
            repr(now),
            mint_log_epoch(),
            *self._window,
            event.payload,
            encoded(key) if key is not None else b"",
            int(key is not None),
        )
        if answer is None:
            return Relayed()
        epoch, number = LogEpoch(answer[1].decode()), int(answer[2])
        if answer[0] == b"missing":
            return Relayed(missing_after=Position(epoch, number))
        return Relayed(event_of(epoch, number, event.payload, now, key, origin))

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: str | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:
        now = await self._clock.at(now)
        answer = await self._on(
            session_id,
            scripts.ATTACH,
            connection_id or "",
            int(connection_id is not None),
            int(only_if_free),
            repr(now),
            mint_log_epoch(),
            *self._window,
            *_place(position),
        )
        if answer is None:
            return None
        fence, epoch, number, previous, previous_fence, reason, entries, maker, waits = answer
        log_epoch = LogEpoch(epoch.decode())
        return Attached(
            FencingEpoch(int(fence)),
            Position(log_epoch, int(number)).event_id(),
            stored_attachment(previous, previous_fence),
            events_of(log_epoch, entries),
            Refusal(reason.decode()) if reason is not None else None,
            frozenset(unpacked(maker)[0]),
            SessionEventId(decoded(waits)) if waits is not None else None,
        )

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        return bool(await self._on(session_id, scripts.DETACH, fencing_epoch))

    async def set_current(self, session_id: SessionId, current: CurrentSession | None) -> None:
        value = packed([current.session_id, current.fencing_epoch]) if current is not None else None
        await self._set(session_id, "current", value)

    async def mark_stream_opened(self, session_id: SessionId) -> bool:
        return await self._set(session_id, "opened", b"1")

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        if text_size(uri) > self._policy.max_uri_bytes:
            if await self._command("EXISTS", self._key(session_id)):
                raise LimitReached("max_uri_bytes")
            return False
        # The list of subscribers first: a process that dies in between leaves one there who is
        # none, and whom the next reader finds out. The other way round a subscription that
        # the session has would never be served.
        tag, token = tag_of(session_id), await self._token(session_id)
        key = self._subscribers_key(uri)
        await self._run(scripts.NOTE_SUBSCRIBER, [key], tag, token, self._list_lifetime)
        most, most_bytes = self._policy.max_subscriptions, self._policy.max_subscription_bytes
        outcome, *before = await self._on(
            session_id, scripts.SUBSCRIBE, encoded(uri), token, most, most_bytes
        )
        if before:
            self._subscriptions.changed(session_id, before[0], token.encode(), with_one=uri)
        if outcome == b"for ever":
            await self._run(scripts.NOTE_SUBSCRIBER, [key], tag, token, 0)
        elif outcome != b"subscribed":
            await self._run(scripts.DROP_SUBSCRIBER, [key], tag, token)
        if outcome in (b"max_subscriptions", b"max_subscription_bytes"):
            raise LimitReached(outcome.decode())
        return outcome != b"gone"

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        change = await self._token(session_id)
        answer = await self._on(session_id, scripts.UNSUBSCRIBE, encoded(uri), change)
        if answer[0]:
            self._subscriptions.changed(session_id, answer[2], change.encode(), without=uri)
        if answer[0] and answer[1] is not None:
            await self._drop_subscribers(tag_of(session_id), {encoded(uri): answer[1]})
        return bool(answer[0])

    async def subscribers(self, uri: str) -> Sequence[SessionId]:
        key = self._subscribers_key(uri)
        tokens = tokens_of(await self._command("HGETALL", key))
        asked = encoded(uri)
        found = await _all_of(
            self._command("HGET", f"{self._key_of(tag.decode())}:u", asked) for tag in tokens
        )
        there = await self._clock.now()
        subscribed: list[SessionId] = []
        for (tag, token), own in zip(tokens.items(), found, strict=True):
            made, _, session_id = token.decode().partition(" ")
            if own is not None:
                subscribed.append(SessionId(session_id))
            elif int(made.partition(".")[0], 16) < there - IN_FLIGHT:
                await self._run(scripts.DROP_SUBSCRIBER, [key], tag, token)
        return subscribed

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        if principal is None:
            members = await self._command("ZRANGE", self._all, 0, -1)
        else:
            members = await self._command("SMEMBERS", self._owned(owner_of(principal)))
        records = await _all_of(
            self._run(scripts.LOAD, [self._key_of(_tag(member))], "", *_told(NOTHING))
            for member in members
        )
        there = await self._clock.now()
        for member, record in zip(members, records, strict=True):
            if record is None and _is_old(member, there):
                await self._release(member)
        return [self._record(record) for record in records if record is not None]

    async def set_filter(
        self, session_id: SessionId, uris: frozenset[str], lists: frozenset[str]
    ) -> bool:
        try:
            check_subscriptions(uris, self._policy)
        except LimitReached:
            if await self._command("EXISTS", self._key(session_id)):
                raise
            return False
        tag, token = tag_of(session_id), await self._token(session_id)
        wanted = {encoded(uri): encoded(token) for uri in uris}
        await self._note_subscribers(tag, token, uris, self._list_lifetime)
        answer = await self._on(
            session_id, scripts.SET_FILTER, packed(sorted(lists)), token, *wanted
        )
        if answer is None:
            await self._drop_subscribers(tag, wanted)
            return False
        if answer[0] == b"for ever":
            await self._note_subscribers(tag, token, uris, 0)
        before = tokens_of(answer[1])
        gone = {uri: token for uri, token in before.items() if uri not in wanted}
        await self._drop_subscribers(tag, gone)
        return True

    async def set_waits_from(self, session_id: SessionId, event_id: SessionEventId | None) -> None:
        await self._set(session_id, "waits", encoded(event_id) if event_id is not None else None)

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        flat = [part for key, value in changed.items() for part in (encoded(key), packed(value))]
        gone = [encoded(key) for key in removed]
        known = self._known(session_id)
        found = await self._on(
            session_id,
            scripts.CHANGE_STATE,
            *_told(known),
            self._policy.max_state_bytes,
            expected_version if expected_version is not None else "",
            len(gone),
            *gone,
            *flat,
        )
        if found == b"max_state_bytes":
            raise LimitReached("max_state_bytes")
        if found is not None and found[0] == b"newer":
            raise StateConflict(self._record(found[1], known))
        return self._record(found, known) if found is not None else None

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        now = await self._clock.at(now)
        policy = self._policy
        return bool(
            await self._on(
                session_id,
                scripts.FINISH,
                encoded(key),
                int(outcome is not None),
                outcome or b"",
                repr(now),
                policy.request_key_bytes,
                repr(policy.request_key_lifetime),
            )
        )

    async def load_data(self, session_id: SessionId) -> Data | None:
        answer = await self._on(session_id, scripts.LOAD_DATA)
        if answer is None:
            return None
        version, value = answer
        return Data(unpacked(value) if value is not None else {}, int(version or 0))

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        # Random, not counted: after a loss no version names another value than before.
        version, text = secrets.randbits(53) | 1, packed(dict(value))
        try:
            check_data(len(text), self._policy)
        except LimitReached:
            known = await self.load_data(session_id)
            if known is not None and known.version == expected_version:
                raise
            return False
        answer = await self._on(session_id, scripts.REPLACE_DATA, expected_version, version, text)
        return bool(answer)

    # --- one session ---------------------------------------------------------------------

    @property
    def _window(self) -> tuple[Value, ...]:
        policy = self._policy
        return policy.max_events, policy.max_bytes, repr(policy.max_age)

    def _record(self, answer: Answer, known: Known = NOTHING) -> SessionRecord:
        return record_of(answer, self._subscriptions, self._peers, known)

    def _known(self, session_id: SessionId) -> Known:
        return Known(*self._subscriptions.known(session_id), self._peers.known(session_id))

    async def _head(
        self, session_id: SessionId, stream: StreamName, *, make: bool
    ) -> Position | None:
        answer = await self._on(session_id, scripts.HEAD, stream, mint_log_epoch(), int(make))
        if answer is None:
            return None
        return Position(LogEpoch(answer[0].decode()), int(answer[1]))

    async def _set(self, session_id: SessionId, field: str, value: bytes | None) -> bool:
        given = int(value is not None)
        return bool(await self._on(session_id, scripts.SET, field, value or b"", given))

    async def _token(self, session_id: SessionId) -> str:
        """Names one act of subscribing, so that undoing an older one does not undo it."""
        return f"{int(await self._clock.now()):x}.{secrets.token_hex(6)} {session_id}"

    # --- what belongs to no single session -----------------------------------------------

    @property
    def _list_lifetime(self) -> int:
        """Milliseconds that a list is kept after a session was put into it."""
        return math.ceil((self._policy.max_lifetime + MARGIN) * 1000)

    async def _expire(
        self, member: bytes, held: Collection[str], now: float
    ) -> tuple[SessionRecord | None, bool]:
        """The record, if the session is over; whether its place is due still."""
        is_held = int(_tag(member) in held)
        return await self._leave(
            member, scripts.EXPIRE, repr(now), self._policy.idle_timeout, is_held, now=now
        )

    async def _leave(
        self, member: bytes, script: Script, *args: Value, now: float
    ) -> tuple[SessionRecord | None, bool]:
        """Run what may end a session, and take it out of every list then; see :meth:`_expire`."""
        tag = _tag(member)
        outcome, *rest = await self._run(script, [self._key_of(tag)], *args)
        if outcome == b"kept":
            return None, True
        if outcome == b"later":
            # XX: whoever ended it meanwhile has taken it out.
            await self._command("ZADD", self._all, "XX", rest[0], member)
            return None, float(rest[0]) <= now
        if outcome == b"gone":
            # Its time to live ran out while no server was there, or it is being made.
            is_left = not _is_old(member, await self._clock.now())
            if not is_left:
                await self._release(member)
            return None, is_left
        try:
            record = self._record(rest[0])
        except (ValueError, TypeError, LookupError) as failed:
            # A newer version's, or not ours. It is over all the same.
            logger.error("an expired session could not be read: %s", type(failed).__name__)
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
        """Take a session that is over out of every list; whether all of it was done.

        What is left is found by whoever looks there next. It is no error: the session is over,
        and whoever ended it has to go on with that.

        Args:
            session_id: None: it is not known, but its ``tag`` is.
        """
        if session_id is not None:
            self._subscriptions.forget(session_id)
            self._peers.forget(session_id)
        tag = tag if tag is not None else tag_of(session_id or "")
        try:
            if member is not None:
                await self._release(member)
            await self._drop_subscribers(tag, tokens_of(tokens))
        except StoreUnavailable as failed:
            logger.warning("a session that is over is still in some list: %s", failed)
            return False
        return True

    async def _release(self, member: bytes) -> None:
        owned = f"{{{self._namespace}}}:of:{member.decode().split('.')[1]}"
        await self._run(scripts.RELEASE, [self._all, owned], member)

    async def _heal(self, places: str) -> bool:
        """Give up the places of sessions that are not there; whether there were any. Not again
        before others can have become old: it asks for every session.
        """
        there = await self._clock.now()
        if there - self._healed.get(places, -math.inf) < IN_FLIGHT:
            return False
        if len(self._healed) >= _PAGE:
            self._healed.clear()
        self._healed[places] = there
        kind = "ZRANGE" if places == self._all else "SMEMBERS"
        members: list[bytes] = await self._command(
            kind, places, *((0, -1) if kind[0] == "Z" else ())
        )
        old = [member for member in members if _is_old(member, there)]
        found = await _all_of(self._command("EXISTS", self._key_of(_tag(member))) for member in old)
        gone = [member for member, is_there in zip(old, found, strict=True) if not is_there]
        await _all_of(self._release(member) for member in gone)
        return bool(gone)

    async def _note_subscribers(
        self, tag: str, token: str, uris: Iterable[str], lifetime: int
    ) -> None:
        await _all_of(
            self._run(scripts.NOTE_SUBSCRIBER, [self._subscribers_key(uri)], tag, token, lifetime)
            for uri in uris
        )

    async def _drop_subscribers(self, tag: str, tokens: Mapping[bytes, bytes]) -> None:
        await _all_of(
            self._run(scripts.DROP_SUBSCRIBER, [self._subscribers_key(decoded(uri))], tag, token)
            for uri, token in tokens.items()
        )

    # --- keys and scripts ----------------------------------------------------------------

    def _key_of(self, tag: str) -> str:
        return f"{self._namespace}:{{{tag}}}"

    def _key(self, session_id: SessionId) -> str:
        return self._key_of(tag_of(session_id))

    def _owned(self, owner: bytes) -> str:
        return f"{{{self._namespace}}}:of:{tag_of(owner.decode())[:16]}"

    def _subscribers_key(self, uri: str) -> str:
        return f"{self._namespace}:uri:{{{tag_of(uri)}}}"

    async def _time(self) -> float:
        seconds, microseconds = await self._command("TIME")
        return int(seconds) + int(microseconds) / 1_000_000

    async def _on(self, session_id: SessionId, script: Script, *args: Value) -> Answer:
        return await self._run(script, [self._key(session_id)], *args)

    async def _on_each(self, script: Script, keys: Sequence[str], *args: Value) -> list[Answer]:
        """What a script that takes any number of sessions answers of each of them. In a cluster
        each has a slot of its own.
        """
        if not keys:
            return []
        if isinstance(self._link, Link):
            return await self._run(script, keys, *args)
        each = await _all_of(self._run(script, [key], *args) for key in keys)
        return [answer for (answer,) in each]

    async def _run(self, script: Script, keys: Sequence[str], *args: Value) -> Answer:
        # A peer's text may be none in UTF-8; then it is unknown here as any other.
        args = tuple(encoded(arg) if isinstance(arg, str) else arg for arg in args)
        try:
            try:
                return await self._link.call("EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:
                # Said before anything ran. This sends it, and the server keeps it.
                return await self._link.call("EVAL", script.text, len(keys), *keys, *args)
        except ResponseError as refused:
            raise _translated(refused, script.name) from refused
        except StoreUnavailable:
            metrics.store_failed(self.name)
            raise

    async def _command(self, *args: Value) -> Answer:
        try:
            return await self._link.call(*args)
        except ResponseError as refused:
            raise _translated(refused, str(args[0])) from refused
        except StoreUnavailable:
            metrics.store_failed(self.name)
            raise


def _told_of(
    session_id: SessionId, change: ServerChange, now: float, answer: Sequence[Any]
) -> Told:
    """What ``lua/tell.lua`` answered of one session. Its message is not sent back: it is known."""
    _, stream, epoch, number, connection, fence, replaced = answer
    place = Position(LogEpoch(epoch.decode()), int(number))
    mode = Mode.PROTOCOL if stream == b"events" else Mode.TRANSPORT
    name, draft = change.told_to(mode, session_id)
    payload = draft.encode(place.event_id())
    return Told(
        session_id,
        name,
        event_of(place.log_epoch, place.number, payload, now, draft.key, None),
        stored_attachment(connection, fence),
        bool(replaced),
    )


def _translated(refused: ResponseError, what: str) -> Exception:
    if str(refused).startswith("EVENTIDS"):
        return OverflowError("this event log has issued its last id")
    logger.error("%s: %s", what, unavailable(refused))
    metrics.store_failed(RedisStore.name)
    return unavailable(refused)


async def _all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all calls answered, in their order; a bounded number of them is under way at once."""
    answers: list[T] = []
    batch: list[Coroutine[Any, Any, T]] = []
    for call in calls:
        batch.append(call)
        if len(batch) == _BATCH:
            answers += await asyncio.gather(*batch)
            batch = []
    return answers + await asyncio.gather(*batch)


async def _each_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | None]:
    """As :func:`_all_of`, where one call that fails is not to stop the others: None for it.

    Raises:
        StoreUnavailable: All of them failed, and there was more than none.
    """
    outcomes: list[T | StoreUnavailable] = await _all_of(_caught(call) for call in calls)
    failures = [each for each in outcomes if isinstance(each, StoreUnavailable)]
    if failures and len(failures) == len(outcomes) and not _is_refused(failures[0]):
        raise failures[0]
    if failures:
        logger.error("%d sessions could not be reached; one: %s", len(failures), failures[0])
    return [None if isinstance(each, StoreUnavailable) else each for each in outcomes]


async def _caught(call: Coroutine[Any, Any, T]) -> T | StoreUnavailable:
    try:
        return await call
    except StoreUnavailable as failed:
        return failed


def _is_refused(failed: StoreUnavailable) -> bool:
    """Whether the server is there, and refused a command."""
    return isinstance(failed.__cause__, ResponseError)


def _told(known: Known) -> tuple[bytes, int]:
    """What a script is told that is known of its session."""
    return known.change, int(known.peer is not None)


def _place(event_id: str | None) -> tuple[Value, ...]:
    """Why the position is none (empty: it is one), its epoch and its number."""
    if event_id is None:
        return Refusal.NO_POSITION.value, "", 0
    position = parse_position(event_id)
    if position is None:
        return Refusal.UNKNOWN_POSITION.value, "", 0
    return "", position.log_epoch, position.number


def _tag(member: bytes) -> str:
    return member.decode().split(".")[0]


def _is_old(member: bytes, now: float) -> bool:
    """Whether whoever put it into a list had time enough to do the rest."""
    return int(member.decode().split(".")[2], 16) < now - IN_FLIGHT
