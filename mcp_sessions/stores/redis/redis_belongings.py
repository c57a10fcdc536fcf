from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any, assert_never

from mcp_sessions.errors import LimitReached
from mcp_sessions.ids import RequestKey, SessionId
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
from mcp_sessions.stores.redis import scripts
from mcp_sessions.stores.redis.commands import known_to_script, readable, tag_of
from mcp_sessions.stores.redis.lists import Lists
from mcp_sessions.stores.redis.record_codec import (
    encoded,
    packed,
    pair_of,
    tokens_of,
    unpacked,
)

CHANGED = 1
"""A script's answer: the field has another value now."""


class BelongingsInRedis(Lists):
    @readable
    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        match change:
            case SetCurrent(current):
                values = [packed([current.session_id, current.fencing_epoch])] if current else []
                return await self._set(session_id, "current", *values)
            case SetStreamOpened():
                # False: it is not there, or had the value.
                return await self._on(session_id, scripts.CHANGE, "opened", b"1") == CHANGED
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
                return await self._on(session_id, scripts.TELL, *flat) is not None
            case _:
                assert_never(change)

    async def _set(self, session_id: SessionId, field: str, *value: bytes | str) -> bool:
        return await self._on(session_id, scripts.CHANGE, field, *value) is not None

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
            is_count = outcome == b"max_subscriptions"
            raise LimitReached(outcome.decode(), most if is_count else most_bytes)
        return outcome != b"gone"

    @readable
    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        change = await self._token(session_id)
        answer = await self._on(session_id, scripts.UNSUBSCRIBE, encoded(uri), change)
        if answer[0]:
            self._subscriptions.changed(session_id, answer[2], change.encode(), without=uri)
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
            session_id, scripts.CHANGE, "lists", packed(sorted(lists)), token, *wanted
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

    @readable
    async def claim(
        self, session_id: SessionId, holder: str | None, instead_of: str | None
    ) -> str | None:
        found = await self._on(session_id, scripts.CLAIM, holder or "", instead_of or "")
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
        known = self._known(session_id)
        found = await self._on(
            session_id,
            scripts.CHANGE_STATE,
            *known_to_script(known),
            self._policy.max_state_bytes,
            expected_version if expected_version is not None else "",
            len(gone),
            *gone,
            *flat,
        )
        if found == b"max_state_bytes":
            raise LimitReached("max_state_bytes", self._policy.max_state_bytes)
        if isinstance(found, list) and found[:1] == [b"newer"]:
            raise StateConflict(self._record(pair_of(found)[1], known))
        return self._record(found, known) if found is not None else None

    @readable
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

    @readable
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
