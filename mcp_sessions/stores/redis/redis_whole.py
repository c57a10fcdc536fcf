from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_sessions.core.log import LogCounts
from mcp_sessions.core.request_keys import KeyedRequest, KeyState, key_cost
from mcp_sessions.core.states import UNNAMED
from mcp_sessions.ids import LogEpoch, Position, RequestKey, SessionId, StreamName
from mcp_sessions.security import mint_log_epoch
from mcp_sessions.stores.records import Data
from mcp_sessions.stores.redis import scripts
from mcp_sessions.stores.redis.commands import readable, tag_of
from mcp_sessions.stores.redis.lists import Lists, tag_in
from mcp_sessions.stores.redis.record_codec import (
    decoded,
    encoded,
    events_of,
    fields_of,
    of_kind,
    owner_of,
    packed,
    tokens_of,
    unpacked,
)
from mcp_sessions.stores.redis.redis_connection import Value
from mcp_sessions.stores.redis.redis_sessions import OF_CONVERSATION
from mcp_sessions.stores.whole_sessions import WholeLog, WholeSession

_NO_LIMIT = 2**53


class WholeInRedis(Lists):
    @readable
    async def session_ids(self) -> Sequence[SessionId]:
        members = await self._entries("ZRANGE", self._all, 0, -1)
        ids: list[SessionId] = []
        for start in range(0, len(members), _AT_ONCE):
            some = [self._key_of(tag_in(member)) for member in members[start : start + _AT_ONCE]]
            names = await self._on_each(scripts.IDS, some)
            ids += [SessionId(decoded(name)) for name in names if name is not None]
        return ids

    @readable
    async def whole(self, session_id: SessionId) -> WholeSession | None:
        answer = await self._on(session_id, scripts.WHOLE, mint_log_epoch())
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
            scripts.RESERVE,
            [self._all, owned],
            member, repr(life.expires_at), _NO_LIMIT, _NO_LIMIT, lifetime,
        )  # fmt: skip
        await self._note_subscribers(tag_of(session_id), token, uris, lifetime)
        known = await self._on(
            session_id, scripts.ADD_WHOLE, repr(there), *_values_of(whole, member, token)
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
        if of_kind(bytes, known) != member.encode():
            await self._release(member.encode())
        return False


_AT_ONCE = 256

_ADDED = 1


def _values_of(whole: WholeSession, member: str, token: str) -> list[Value]:
    values: list[Value] = []

    def add(pairs: Mapping[Any, Any]) -> None:
        values.append(len(pairs))
        for name, value in pairs.items():
            values.extend((name, value))

    def add_optional(value: Value | None) -> None:
        values.extend((0, "") if value is None else (1, value))

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
    add_optional(packed(whole.data.value) if whole.data is not None else None)
    values.append(len(whole.logs))
    for name, log in whole.logs.items():
        values += name, log.counts.log_epoch, log.counts.head, log.counts.floor
        values += log.counts.evicted, len(log.events)
        for event in log.events:
            values += event.number, repr(event.at), event.payload
            add_optional(event.key[1] if event.key is not None else None)
            add_optional(event.origin)
            add_optional(log.names.get(event.number))
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
