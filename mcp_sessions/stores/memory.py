"""Sessions in this process's memory: the default store.

No method suspends, so each runs in one step of the event loop and is atomic by that. What
it remembers ends with the process.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_sessions.core.log import UNBOUNDED, Draft, EventLog, LoggedEvent, Window
from mcp_sessions.core.messages import encode
from mcp_sessions.core.request_keys import Begun, KeyState, RequestKeys
from mcp_sessions.core.states import BEGINS, Change, Mode, State, after
from mcp_sessions.errors import LimitReached, Refusal
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionEventId,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import mint_log_epoch, mint_session_id
from mcp_sessions.stores.contract import StateConflict
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.limits import (
    check_data,
    check_peer,
    check_sizes,
    check_state,
    check_subscriptions,
    text_size,
)
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    Attached,
    Attachment,
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


@dataclass(slots=True)
class _Session:
    """Everything that is remembered of one session."""

    record: SessionRecord
    state: State
    events: EventLog
    streams: dict[StreamName, EventLog] | None = None
    keys: RequestKeys | None = None
    data: dict[str, Any] | None = None
    data_version: int = 0
    uri_bytes: int = 0
    """Of its subscriptions, in sum."""

    relayed: dict[SessionId, Position] | None = None
    """The last event of each carried session that its GET stream has."""


class MemoryStore:
    """A :class:`~mcp_sessions.stores.contract.SessionStore` of dictionaries."""

    name = "memory"
    survives_process = False
    remembers = True
    exchange: Exchange | None = None

    def __init__(self) -> None:
        self._policy = SessionPolicy()
        self._window = _window(self._policy)
        self._sessions: dict[SessionId, _Session] = {}
        self._by_principal: dict[Principal, int] = {}
        self._by_uri: dict[str, dict[SessionId, None]] = {}
        # (deadline, session id): a deadline that was moved since is pushed anew when its
        # old entry comes up, so that a request costs nothing here.
        self._deadlines: list[tuple[float, SessionId]] = []

    async def open(self, policy: SessionPolicy) -> None:
        """Serve within the limits of ``policy``."""
        self._policy = policy
        self._window = _window(policy)

    async def close(self) -> None:
        """Forget everything."""
        self._sessions.clear()
        self._by_principal.clear()
        self._by_uri.clear()
        self._deadlines.clear()

    async def create(
        self, mode: Mode, principal: Principal, *, peer: Peer | None, now: float
    ) -> SessionRecord:
        """See :meth:`SessionStore.create`."""
        policy = self._policy
        check_peer(peer, policy)
        owned = self._by_principal.get(principal, 0)
        if len(self._sessions) >= policy.max_sessions:
            raise LimitReached("max_sessions")
        most = policy.max_sessions_per_principal
        if most is not None and owned >= most:
            raise LimitReached("max_sessions_per_principal")
        session_id = mint_session_id()
        forever = mode is Mode.CONVERSATION
        ends_at = math.inf if forever else now + policy.max_lifetime
        record = SessionRecord(
            session_id,
            mode,
            principal,
            created_at=now,
            expires_at=self._deadline(now, ends_at),
            ends_at=ends_at,
            peer=peer,
        )
        log = EventLog(mint_log_epoch(), UNBOUNDED if forever else self._window)
        self._sessions[session_id] = _Session(record, BEGINS, log)
        self._by_principal[principal] = owned + 1
        if not forever:
            heapq.heappush(self._deadlines, (record.expires_at, session_id))
        return record

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        """See :meth:`SessionStore.load`."""
        session = self._sessions.get(session_id)
        if session is None or now >= session.record.expires_at:
            return None
        return session.record

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
        """See :meth:`SessionStore.admit`."""
        session = self._sessions.get(session_id)
        if session is None or session.record.principal != principal:
            return None
        record = session.record
        if now >= (session.record.ends_at if held else record.expires_at):
            return None
        if record.mode is not mode:
            # A conversation is of another protocol: there it is nobody's session.
            return None if Mode.CONVERSATION in (mode, record.mode) else Admitted(record)
        if fencing_epoch is not None and fencing_epoch != record.fencing_epoch:
            return Admitted(record, displaced=True)
        record.expires_at = self._deadline(now, record.ends_at)
        if key is None:
            return Admitted(record)
        keys = session.keys
        if keys is None:
            keys = session.keys = RequestKeys(
                max_bytes=self._policy.request_key_bytes,
                lifetime=self._policy.request_key_lifetime,
            )
        begun, entry = keys.begin(
            key.key,
            key.digest,
            runner=key.runner,
            now=now,
            scopes=key.scopes,
            run=key.run,
            instead_of=key.instead_of,
        )
        if entry is None or begun in (Begun.OTHER_CONTENT, Begun.FEWER_SCOPES):
            return Admitted(record, begun)
        outcome = entry.outcome if entry.state is KeyState.ANSWERED else None
        return Admitted(record, begun, outcome, entry.runner, entry.run)

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        """See :meth:`SessionStore.touch`."""
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            # Whoever touches a session was at work on it until now, so its idle deadline
            # cannot have passed; the absolute one can.
            if session is not None and now < session.record.ends_at:
                record = session.record
                record.expires_at = self._deadline(now, record.ends_at)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        """See :meth:`SessionStore.end`."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        self._finish(session, Change.END)
        return session.record

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        """See :meth:`SessionStore.expire`."""
        expired: list[SessionRecord] = []
        put_back: list[tuple[float, SessionId]] = []
        # Not a name for the heap: ending a session may replace it by a shorter one.
        while self._deadlines and self._deadlines[0][0] <= now and len(expired) < limit:
            _, session_id = heapq.heappop(self._deadlines)
            session = self._sessions.get(session_id)
            if session is None:
                continue
            record = session.record
            if record.expires_at > now:
                put_back.append((record.expires_at, session_id))
            elif session_id in held and session.record.ends_at > now:
                record.expires_at = self._deadline(now, record.ends_at)
                put_back.append((record.expires_at, session_id))
            else:
                self._finish(session, Change.EXPIRE)
                expired.append(record)
        for entry in put_back:
            heapq.heappush(self._deadlines, entry)
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
        """See :meth:`SessionStore.evict`."""
        before, idle = now - unused_for, self._policy.idle_timeout

        def order(session: _Session) -> tuple[bool, float]:
            record = session.record
            used_at = record.expires_at - idle
            return used_at - record.created_at > unused_for, used_at

        def goes(session: _Session) -> bool:
            record = session.record
            return (
                record.mode is Mode.TRANSPORT
                and record.expires_at - idle <= before
                and record.expires_at < record.ends_at
                and record.principal == ANONYMOUS
                and (opened or not record.stream_opened)
                and not (record.subscriptions or record.carried or record.current)
                and record.session_id not in held
            )

        going = heapq.nsmallest(limit, filter(goes, self._sessions.values()), key=order)
        for session in going:
            self._finish(session, Change.END)
        return [session.record for session in going]

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        """See :meth:`SessionStore.append`."""
        session = self._sessions.get(session_id)
        if session is None or now >= session.record.ends_at:
            return None
        log = session.events if stream == EVENTS else self._stream(session, stream)
        replaced = log.would_replace(draft)
        return Appended(log.append(draft, now=now), session.record.attachment, replaced)

    async def renew(self, session_id: SessionId) -> None:
        """See :meth:`SessionStore.renew`."""
        session = self._sessions.get(session_id)
        if session is not None and session.record.mode is Mode.PROTOCOL:
            session.events = EventLog(mint_log_epoch(), self._window)

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """See :meth:`SessionStore.audience`. It is one page: a hundred thousand ids take a
        millisecond.
        """
        known = self._sessions if change.uri is None else self._by_uri.get(change.uri, ())
        return Audience(list(known), None)

    async def tell(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[Told]:
        """See :meth:`SessionStore.tell`."""
        told: list[Told] = []
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            if session is None or now >= session.record.ends_at:
                continue
            record = session.record
            if not _is_entitled(record, change):
                continue
            if record.mode is Mode.PROTOCOL:
                stream, log, draft = EVENTS, session.events, change.event.draft(session_id)
            else:
                stream, log, draft = GET_STREAM, self._stream(session, GET_STREAM), change.bare
            replaced = log.would_replace(draft)
            event = log.append(draft, now=now)
            told.append(Told(session_id, stream, event, record.attachment, replaced))
        return told

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """See :meth:`SessionStore.read`."""
        log = self._log(session_id, stream)
        if log is None:
            return (), Refusal.UNKNOWN_POSITION
        return log.since_id(after, now=now, limit=limit)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        """See :meth:`SessionStore.head`."""
        log = self._log(session_id, stream)
        return log.head if log is not None else None

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        """See :meth:`SessionStore.open_stream`."""
        session = self._sessions.get(session_id)
        return self._stream(session, stream).head if session is not None else None

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        """See :meth:`SessionStore.drop_stream`."""
        session = self._sessions.get(session_id)
        if session is not None and session.streams is not None:
            session.streams.pop(stream, None)

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        """See :meth:`SessionStore.drop_origin`."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if fencing_epoch is not None and session.record.carried.get(origin, -1) > fencing_epoch:
            return
        log = self._log(session_id, stream)
        if log is not None:
            log.drop_origin(origin)
        if session.relayed is None or stream != GET_STREAM:
            return
        if session.relayed.pop(origin, None) is not None:
            carried = session.record.carried
            session.record.carried = {s: epoch for s, epoch in carried.items() if s != origin}

    async def carry(
        self,
        connection: SessionId,
        origin: SessionId,
        fencing_epoch: FencingEpoch,
        after: Position,
    ) -> bool:
        """See :meth:`SessionStore.carry`."""
        session = self._sessions.get(connection)
        carried = session.record.carried.get(origin, -1) if session is not None else -1
        if session is None or carried > fencing_epoch:
            return False
        if carried == fencing_epoch:
            return True
        log = self._log(connection, GET_STREAM)
        if log is not None:
            log.drop_origin(origin)
        session.record.carried = {**session.record.carried, origin: fencing_epoch}
        if session.relayed is None:
            session.relayed = {}
        session.relayed[origin] = after
        return True

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
        """See :meth:`SessionStore.relay`."""
        session = self._sessions.get(connection)
        if session is None or session.relayed is None or now >= session.record.ends_at:
            return Relayed()
        if session.record.carried.get(origin) != fencing_epoch:
            return Relayed()
        last = session.relayed[origin]
        if event.number <= last.number:
            return Relayed()
        if event.number > last.number + 1 and not skips:
            return Relayed(missing_after=last)
        session.relayed[origin] = Position(last.log_epoch, event.number)
        key = event.key[1] if event.key is not None else None
        log = self._stream(session, GET_STREAM)
        return Relayed(log.append(Draft(event.payload, None, key, origin), now=now))

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: str | None = None,
        only_if_free: bool = False,
    ) -> Attached | None:
        """See :meth:`SessionStore.attach`."""
        session = self._sessions.get(session_id)
        if session is None or now >= session.record.ends_at:
            return None
        record = session.record
        previous = record.attachment
        if only_if_free and previous is not None:
            return None
        replay, refusal = session.events.since_id(position, now=now)
        self._change(session, Change.ATTACH if connection_id is not None else Change.DISPLACE)
        record.fencing_epoch = FencingEpoch(record.fencing_epoch + 1)
        record.attachment = (
            Attachment(connection_id, record.fencing_epoch) if connection_id is not None else None
        )
        waits_from = None
        if connection_id is not None:
            waits_from, record.waits_from = record.waits_from, None
        head = session.events.head.event_id()
        return Attached(
            record.fencing_epoch,
            head,
            previous,
            replay,
            refusal,
            record.principal.scopes,
            waits_from,
        )

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        """See :meth:`SessionStore.detach`."""
        session = self._sessions.get(session_id)
        if session is None:
            return False
        attachment = session.record.attachment
        if attachment is None or attachment.fencing_epoch != fencing_epoch:
            return False
        self._change(session, Change.DETACH)
        session.record.attachment = None
        return True

    async def set_current(self, session_id: SessionId, current: CurrentSession | None) -> None:
        """See :meth:`SessionStore.set_current`."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.record.current = current

    async def mark_stream_opened(self, session_id: SessionId) -> bool:
        """See :meth:`SessionStore.mark_stream_opened`."""
        session = self._sessions.get(session_id)
        if session is None or session.record.stream_opened:
            return False
        session.record.stream_opened = True
        return True

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        """See :meth:`SessionStore.subscribe`."""
        session = self._sessions.get(session_id)
        if session is None:
            return False
        subscriptions = session.record.subscriptions
        if uri not in subscriptions:
            size = text_size(uri)
            check_sizes(len(subscriptions) + 1, size, session.uri_bytes + size, self._policy)
            session.uri_bytes += size
        session.record.subscriptions |= {uri}
        self._by_uri.setdefault(uri, {})[session_id] = None
        return True

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        """See :meth:`SessionStore.unsubscribe`."""
        session = self._sessions.get(session_id)
        if session is None:
            return False
        if uri in session.record.subscriptions:
            session.uri_bytes -= text_size(uri)
        session.record.subscriptions -= {uri}
        self._forget_subscription(session_id, uri)
        return True

    async def subscribers(self, uri: str) -> Sequence[SessionId]:
        """See :meth:`SessionStore.subscribers`."""
        return list(self._by_uri.get(uri, ()))

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """See :meth:`SessionStore.all_sessions`."""
        records = [session.record for session in self._sessions.values()]
        if principal is None:
            return records
        return [record for record in records if record.principal == principal]

    async def set_filter(
        self, session_id: SessionId, uris: frozenset[str], lists: frozenset[str]
    ) -> bool:
        """See :meth:`SessionStore.set_filter`."""
        session = self._sessions.get(session_id)
        if session is None:
            return False
        check_subscriptions(uris, self._policy)
        session.uri_bytes = sum(map(text_size, uris))
        record = session.record
        for uri in record.subscriptions - uris:
            self._forget_subscription(session_id, uri)
        for uri in uris - record.subscriptions:
            self._by_uri.setdefault(uri, {})[session_id] = None
        record.subscriptions, record.lists = uris, lists
        return True

    async def set_waits_from(self, session_id: SessionId, event_id: SessionEventId | None) -> None:
        """See :meth:`SessionStore.set_waits_from`."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.record.waits_from = event_id

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """See :meth:`SessionStore.change_state`."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        record = session.record
        if expected_version not in (None, record.state_version):
            raise StateConflict(record)
        newest = {key: value for key, value in record.state.items() if key not in removed}
        newest.update(copy.deepcopy(dict(changed)))
        sizes = (text_size(key) + _json_size(value) for key, value in newest.items())
        check_state(sum(sizes), self._policy)
        record.state = newest
        record.state_version += 1
        return record

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        """See :meth:`SessionStore.finish_request`."""
        session = self._sessions.get(session_id)
        if session is None or session.keys is None:
            return False
        return session.keys.finish(key, outcome, now=now)

    async def load_data(self, session_id: SessionId) -> Data | None:
        """See :meth:`SessionStore.load_data`."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        return Data(copy.deepcopy(session.data or {}), session.data_version)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """See :meth:`SessionStore.replace_data`."""
        session = self._sessions.get(session_id)
        if session is None or session.data_version != expected_version:
            return False
        check_data(_json_size(dict(value)), self._policy)
        session.data = copy.deepcopy(dict(value))
        session.data_version += 1
        return True

    def _log(self, session_id: SessionId, stream: StreamName) -> EventLog | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        if stream == EVENTS:
            return session.events
        return session.streams.get(stream) if session.streams is not None else None

    def _stream(self, session: _Session, stream: StreamName) -> EventLog:
        if session.streams is None:
            session.streams = {}
        log = session.streams.get(stream)
        if log is None:
            log = session.streams[stream] = EventLog(mint_log_epoch(), self._window)
        return log

    def _deadline(self, now: float, ends_at: float) -> float:
        return ends_at if ends_at == math.inf else min(now + self._policy.idle_timeout, ends_at)

    def _change(self, session: _Session, change: Change) -> None:
        state = after(session.state, change)
        if state is None:
            raise AssertionError("a session that is over is in no table of this store")
        session.state = state

    def _finish(self, session: _Session, change: Change) -> None:
        self._change(session, change)
        record = session.record
        del self._sessions[record.session_id]
        self._compact()
        left = self._by_principal[record.principal] - 1
        if left:
            self._by_principal[record.principal] = left
        else:
            del self._by_principal[record.principal]
        for uri in record.subscriptions:
            self._forget_subscription(record.session_id, uri)

    def _compact(self) -> None:
        """Sessions that ended leave nothing behind (END2), not their deadlines either."""
        if len(self._deadlines) > 2 * len(self._sessions) + 16:
            live = [session.record for session in self._sessions.values()]
            self._deadlines = [
                (record.expires_at, record.session_id)
                for record in live
                if record.mode is not Mode.CONVERSATION
            ]
            heapq.heapify(self._deadlines)

    def _forget_subscription(self, session_id: SessionId, uri: str) -> None:
        sessions = self._by_uri.get(uri)
        if sessions is None:
            return
        sessions.pop(session_id, None)
        if not sessions:
            del self._by_uri[uri]


def _is_entitled(record: SessionRecord, change: ServerChange) -> bool:
    if record.mode is Mode.CONVERSATION:
        return False
    if change.uri is not None:
        return change.uri in record.subscriptions
    if record.mode is Mode.TRANSPORT:
        return not record.carried
    return record.lists is None or change.listed in record.lists


def _json_size(value: Any) -> int:
    try:
        return len(encode(value))
    except TypeError:
        # This store keeps what is no JSON, too.
        return len(repr(value))


def _window(policy: SessionPolicy) -> Window:
    return Window(policy.max_events, policy.max_bytes, policy.max_age)
