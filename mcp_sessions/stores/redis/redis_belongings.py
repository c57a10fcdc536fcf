"""Change what belongs to a session, such as its subscriptions and ``data``. Read and add a session
as a whole.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, assert_never

from mcp_sessions.core.log import LogCounts
from mcp_sessions.core.request_keys import KeyedRequest, KeyState, key_cost
from mcp_sessions.core.states import UNNAMED
from mcp_sessions.errors import LimitReached
from mcp_sessions.ids import LogEpoch, Position, RequestKey, SessionId, StreamName
from mcp_sessions.security import mint_log_epoch
from mcp_sessions.stores.contract import StateConflict
from mcp_sessions.stores.limits import check_data, check_subscriptions, text_size
from mcp_sessions.stores.record_changes import (
    RecordChange,
    RenewEvents,
    SetCurrent,
    SetFilter,
    SetLogLevel,
    SetStreamOpened,
    SetWaitsFrom,
    Tell,
)
from mcp_sessions.stores.records import Data, SessionRecord
from mcp_sessions.stores.redis.commands import known_to_script, readable, tag_of
from mcp_sessions.stores.redis.lists import PAGE, Lists
from mcp_sessions.stores.redis.record_codec import (
    decoded,
    encoded,
    events_of,
    fields_of,
    optional,
    owner_of,
    packed,
    tokens_of,
    unpacked,
)
from mcp_sessions.stores.redis.redis_connection import Value
from mcp_sessions.stores.redis.redis_sessions import OF_CONVERSATION
from mcp_sessions.stores.whole_sessions import WholeLog, WholeSession

CHANGED = 1
"""A script's answer: the field has another value now."""

_ADDED = 1
"""A script's answer: the session is there now."""

_NO_LIMIT = 2**53


class BelongingsInRedis(Lists):
    @readable
    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        match change:
            case SetCurrent(current):
                values = [packed([current.session_id, current.fencing_epoch])] if current else []
                return await self._set(session_id, "current", *values)
            case SetStreamOpened():
                # False: it is not there, or had the value.
                return await self._on(session_id, "change", "opened", b"1") == CHANGED
            case SetWaitsFrom(event_id):
                values = [encoded(event_id)] if event_id is not None else []
                return await self._set(session_id, "waits", *values)
            case SetLogLevel(level):
                return await self._set(session_id, "level", encoded(level))
            case SetFilter(uris, lists):
                return await self._set_filter(session_id, uris, lists)
            case RenewEvents():
                return await self._set(session_id, "log", mint_log_epoch())
            case Tell(entries):
                parts = [(repr(await self._clock.at(at)), text) for at, text in entries]
                flat = [part for pair in parts for part in pair]
                return await self._set(session_id, "story", *flat)
            case _:
                assert_never(change)

    async def _set(self, session_id: SessionId, field: str, *value: bytes | str) -> bool:
        return await self._on(session_id, "change", field, *value) is not None

    @readable
    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        if text_size(uri) > self._policy.max_uri_bytes:
            if await self._command("EXISTS", self._key(session_id)):
                raise LimitReached("max_uri_bytes", self._policy.max_uri_bytes)
            return False
        # The list of subscribers first: a process that dies in between leaves one there who is
        # none, and whom the next reader finds out. The other way round a subscription that
        # the session has would never be served.
        tag, token = tag_of(session_id), await self._token(session_id)
        key = self._subscribers_key(uri)
        await self._run("note_subscriber", [key], tag, token, self._list_lifetime)
        most, most_bytes = self._policy.max_subscriptions, self._policy.max_subscription_bytes
        outcome, *before = await self._on(
            session_id, "subscribe", encoded(uri), token, most, most_bytes
        )
        if before:
            self._sessions.changed(session_id, before[0], token.encode(), with_one=uri)
        if outcome != b"subscribed":
            await self._run("drop_subscriber", [key], tag, token)
        if outcome in (b"max_subscriptions", b"max_subscription_bytes"):
            is_count = outcome == b"max_subscriptions"
            raise LimitReached(outcome.decode(), most if is_count else most_bytes)
        return outcome != b"gone"

    @readable
    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        change = await self._token(session_id)
        answer = await self._on(session_id, "unsubscribe", encoded(uri), change)
        if answer[0]:
            self._sessions.changed(session_id, answer[2], change.encode(), without=uri)
        if answer[0] and answer[1] is not None:
            await self._drop_subscribers(tag_of(session_id), {encoded(uri): answer[1]})
        return bool(answer[0])

    async def _set_filter(
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
            session_id, "change", "lists", packed(sorted(lists)), token, *wanted
        )
        if answer is None:
            await self._drop_subscribers(tag, wanted)
            return False
        before = tokens_of(answer)
        gone = {uri: token for uri, token in before.items() if uri not in wanted}
        await self._drop_subscribers(tag, gone)
        return True

    @readable
    async def claim(
        self, session_id: SessionId, holder: str | None, instead_of: str | None
    ) -> str | None:
        found = await self._on(session_id, "claim", holder or "", instead_of or "")
        return found.decode() if found is not None else None

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
        known = self._sessions.of(session_id)
        found = await self._on(
            session_id,
            "change_state",
            *known_to_script(known),
            self._policy.max_state_bytes,
            expected_version if expected_version is not None else "",
            len(gone),
            *gone,
            *flat,
        )
        if found == b"max_state_bytes":
            raise LimitReached("max_state_bytes", self._policy.max_state_bytes)
        match found:
            case None:
                return None
            case [b"newer", newest]:
                raise StateConflict(self._record(newest, known))
            case _:
                return self._record(found, known)

    @readable
    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        now = await self._clock.at(now)
        policy = self._policy
        return bool(
            await self._on(
                session_id,
                "finish",
                encoded(key),
                int(outcome is not None),
                outcome or b"",
                repr(now),
                policy.request_key_bytes,
                repr(policy.request_key_lifetime),
            )
        )

    @readable
    async def load_data(self, session_id: SessionId) -> Data | None:
        answer = await self._on(session_id, "load_data")
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
        answer = await self._on(session_id, "replace_data", expected_version, version, text)
        return bool(answer)

    # --- a session as a whole ------------------------------------------------------------

    @readable
    async def session_ids(self) -> Sequence[SessionId]:
        members = await self._command("ZRANGE", self._all, 0, -1)
        ids: list[SessionId] = []
        for start in range(0, len(members), PAGE):
            ids += await self._ids(members[start : start + PAGE])
        return ids

    @readable
    async def whole(self, session_id: SessionId) -> WholeSession | None:
        answer = await self._on(session_id, "whole", mint_log_epoch())
        if answer is None:
            return None
        record, version, value, carried, logs, keys = answer
        return WholeSession(
            self._record(record),
            Data(unpacked(value), int(version)) if value is not None else None,
            {StreamName(decoded(name)): _log_of(*log) for name, *log in logs},
            [_key_of(*each) for each in keys],
            {
                SessionId(decoded(origin)): _position_of(text)
                for origin, text in tokens_of(carried).items()
            },
        )

    @readable
    async def add_whole(self, whole: WholeSession) -> bool:
        record = whole.record
        session_id, life, uris = record.session_id, record.life, record.client.subscriptions
        if await self._command("EXISTS", self._key(session_id)):
            return False
        is_endless = life.ends_at == math.inf
        there, token = await self._clock.now(), await self._token(session_id)
        owned = self._owned(owner_of(record.principal))
        member = f"{tag_of(session_id)}.{owned[-16:]}.{int(there):x}"
        if record.mode in UNNAMED:
            member += OF_CONVERSATION.decode()
        lifetime = 0 if is_endless else self._list_lifetime
        # The lists first, as for a new session and a new subscription.
        await self._run(
            "reserve",
            [self._all, owned],
            member, repr(life.expires_at), _NO_LIMIT, _NO_LIMIT, lifetime,
        )  # fmt: skip
        await self._note_subscribers(tag_of(session_id), token, uris, lifetime)
        known = await self._on(
            session_id, "add_whole", repr(there), *_values_of(whole, member, token)
        )
        if known == _ADDED:
            return True
        # The lists have one place for a session: it has the tokens of the one that is there again.
        own = tokens_of(await self._command("HGETALL", f"{self._key(session_id)}:u"))
        for uri, first in own.items():
            await self._note_subscribers(
                tag_of(session_id), decoded(first), [decoded(uri)], lifetime
            )
        await self._drop_subscribers(
            tag_of(session_id),
            {encoded(uri): encoded(token) for uri in uris if encoded(uri) not in own},
        )
        if known != member.encode():
            await self._release(member.encode())
        return False


def _values_of(whole: WholeSession, member: str, token: str) -> list[Value]:
    values: list[Value] = []

    def add(pairs: Mapping[Any, Any]) -> None:
        values.append(len(pairs))
        for name, value in pairs.items():
            values.extend((name, value))

    record = whole.record
    client = record.client
    add(_fields(whole, member, token))
    add({encoded(name): packed(value) for name, value in record.state.values.items()})
    add({encoded(uri): token for uri in client.subscriptions})
    add(
        {
            encoded(origin): f"{client.carried[origin]} {at.log_epoch} {at.number}"
            for origin, at in whole.carried.items()
        }
    )
    values += optional(packed(whole.data.value) if whole.data is not None else None)
    values.append(len(whole.logs))
    for name, log in whole.logs.items():
        values += name, log.counts.log_epoch, log.counts.head, log.counts.floor
        values += log.counts.evicted, len(log.events)
        for event in log.events:
            values += event.number, repr(event.at), event.payload
            key = event.key[1] if event.key is not None else None
            values += optional(key, event.origin, log.names.get(event.number))
    values.append(len(whole.keys))
    for key, entry in whole.keys:
        values += key, key_cost(key), entry.digest, entry.runner, entry.run
        values += packed(sorted(entry.scopes)), repr(entry.at), entry.state.value
        values.append(bytes(entry.outcome))
    return values


def _fields(whole: WholeSession, member: str, token: str) -> dict[str, Value]:
    record = whole.record
    client, attachment = record.client, record.attachment
    fields: dict[str, Value] = {
        **fields_of(record.session_id, record.mode, record.principal, client.peer, record.life),
        "member": member,
        "fence": record.fencing_epoch,
    }
    optional: dict[str, Value | None] = {
        "conn": encoded(attachment.connection_id) if attachment is not None else None,
        "current": packed([client.current.session_id, client.current.fencing_epoch])
        if client.current is not None
        else None,
        "opened": "1" if client.stream_opened else None,
        "lists": packed(sorted(client.lists)) if client.lists is not None else None,
        "waits": encoded(client.waits_from) if client.waits_from is not None else None,
        "level": encoded(client.log_level) if client.log_level is not None else None,
        "statev": record.state.version or None,
        "datav": whole.data.version if whole.data is not None else None,
        "story": record.story or None,
        "uris": token if client.subscriptions else None,
        "ub": sum(len(encoded(uri)) for uri in client.subscriptions) or None,
    }
    return fields | {name: value for name, value in optional.items() if value is not None}


def _log_of(epoch: bytes, counts: Sequence[bytes], entries: Sequence[Any]) -> WholeLog:
    log_epoch = LogEpoch(epoch.decode())
    names = {
        int(entry_id.partition(b"-")[0]): decoded(named)
        for entry_id, members in entries
        if (named := tokens_of(members).get(b"c")) is not None
    }
    return WholeLog(
        LogCounts(log_epoch, *(int(each) for each in counts)), events_of(log_epoch, entries), names
    )


def _position_of(text: bytes) -> Position:
    _, epoch, number = text.split()
    return Position(LogEpoch(epoch.decode()), int(number))


def _key_of(
    key: bytes,
    digest: bytes,
    runner: bytes,
    run: bytes,
    scopes: bytes,
    at: bytes,
    state: bytes,
    outcome: bytes,
) -> tuple[RequestKey, KeyedRequest]:
    return RequestKey(decoded(key)), KeyedRequest(
        digest,
        decoded(runner),
        float(at),
        KeyState(state.decode()),
        outcome,
        frozenset(unpacked(scopes)),
        decoded(run),
    )
