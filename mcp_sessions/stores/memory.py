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

from mcp_sessions.core import attachment, relaying
from mcp_sessions.core.admission import Admission, admission
from mcp_sessions.core.entitlement import is_entitled
from mcp_sessions.core.lifetime import end_of_life, idle_deadline, is_over
from mcp_sessions.core.log import UNBOUNDED, Draft, EventLog, LoggedEvent, Window
from mcp_sessions.core.messages import encode
from mcp_sessions.core.relaying import Carry, Relay
from mcp_sessions.core.request_keys import RequestKeys, found
from mcp_sessions.core.states import Mode, state_of
from mcp_sessions.errors import Refusal
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
    check_sessions,
    check_sizes,
    check_state,
    check_subscriptions,
    text_size,
)
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
    attachment_of,
)


@dataclass(slots=True)
class _Session:
    """Everything that is remembered of one session."""

    record: SessionRecord
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
        policy = self._policy
        check_peer(peer, policy)
        owned = self._by_principal.get(principal, 0)
        check_sessions(len(self._sessions), owned, policy)
        session_id = mint_session_id()
        ends_at = end_of_life(mode, now=now, max_lifetime=policy.max_lifetime)
        record = SessionRecord(
            session_id,
            mode,
            principal,
            created_at=now,
            expires_at=self._deadline(now, ends_at),
            ends_at=ends_at,
            peer=peer,
        )
        is_kept_whole = mode is Mode.CONVERSATION
        log = EventLog(mint_log_epoch(), UNBOUNDED if is_kept_whole else self._window)
        self._sessions[session_id] = _Session(record, log)
        self._by_principal[principal] = owned + 1
        if ends_at != math.inf:
            heapq.heappush(self._deadlines, (record.expires_at, session_id))
        return record

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
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
        session = self._sessions.get(session_id)
        if session is None:
            return None
        record = session.record
        verdict = admission(
            record, principal, mode=mode, now=now, held=held, fencing_epoch=fencing_epoch
        )
        if verdict is Admission.REFUSED:
            return None
        if verdict is not Admission.ADMITTED:
            return Admitted(record, displaced=verdict is Admission.DISPLACED)
        record.expires_at = self._deadline(now, record.ends_at)
        if key is None:
            return Admitted(record)
        if session.keys is None:
            session.keys = RequestKeys(
                max_bytes=self._policy.request_key_bytes,
                lifetime=self._policy.request_key_lifetime,
            )
        begun, entry = session.keys.begin(
            key.key,
            key.digest,
            runner=key.runner,
            now=now,
            scopes=key.scopes,
            run=key.run,
            instead_of=key.instead_of,
        )
        return Admitted(record, *found(begun, entry))

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            # Whoever touches a session was at work on it until now, so its idle deadline
            # cannot have passed; the absolute one can.
            if session is not None and now < session.record.ends_at:
                record = session.record
                record.expires_at = self._deadline(now, record.ends_at)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        self._forget(session)
        return session.record

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        expired: list[SessionRecord] = []
        put_back: list[tuple[float, SessionId]] = []
        # Not a name for the heap: ending a session may replace it by a shorter one.
        while self._deadlines and self._deadlines[0][0] <= now and len(expired) < limit:
            _, session_id = heapq.heappop(self._deadlines)
            session = self._sessions.get(session_id)
            if session is None:
                continue
            record = session.record
            expires_at, ends_at = record.expires_at, record.ends_at
            if is_over(now=now, expires_at=expires_at, ends_at=ends_at, held=session_id in held):
                self._forget(session)
                expired.append(record)
                continue
            if now >= expires_at:
                record.expires_at = self._deadline(now, ends_at)
            put_back.append((record.expires_at, session_id))
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
            self._forget(session)
        return [session.record for session in going]

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        session = self._sessions.get(session_id)
        if session is None or now >= session.record.ends_at:
            return None
        log = self._stream(session, stream)
        replaced = log.would_replace(draft)
        return Appended(log.append(draft, now=now), session.record.attachment, replaced)

    async def renew(self, session_id: SessionId) -> None:
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
        told: list[Told] = []
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            if session is None or now >= session.record.ends_at:
                continue
            record = session.record
            if not is_entitled(
                record.mode,
                uri=change.uri,
                listed=change.listed,
                is_subscribed=change.uri in record.subscriptions,
                lists=record.lists,
                carries=bool(record.carried),
            ):
                continue
            stream, draft = change.told_to(record.mode, session_id)
            log = self._stream(session, stream)
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
        log = self._log(session_id, stream)
        if log is None:
            return (), Refusal.UNKNOWN_POSITION
        return log.since_id(after, now=now, limit=limit)

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        log = self._log(session_id, stream)
        return log.head if log is not None else None

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        session = self._sessions.get(session_id)
        return self._stream(session, stream).head if session is not None else None

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
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
        session = self._sessions.get(session_id)
        if session is None:
            return
        if not relaying.may_drop(session.record.carried.get(origin), fencing_epoch):
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
        session = self._sessions.get(connection)
        if session is None:
            return False
        carries = relaying.carry(session.record.carried.get(origin), fencing_epoch)
        if carries is not Carry.BEGINS:
            return carries is Carry.GOES_ON
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
        session = self._sessions.get(connection)
        if session is None or session.relayed is None or now >= session.record.ends_at:
            return Relayed()
        carried = session.record.carried.get(origin)
        if carried is None:
            return Relayed()
        last = session.relayed[origin]
        relays = relaying.relay(
            carried, last.number, fencing_epoch=fencing_epoch, number=event.number, skips=skips
        )
        if relays is not Relay.STORED:
            return Relayed(missing_after=last if relays is Relay.TOO_EARLY else None)
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
        session = self._sessions.get(session_id)
        if session is None or now >= session.record.ends_at:
            return None
        record = session.record
        previous = record.attachment
        attached = attachment.attach(
            state_of(is_attached=previous is not None),
            connection_id,
            fencing_epoch=record.fencing_epoch,
            waits_from=record.waits_from,
            only_if_free=only_if_free,
        )
        if attached is None:
            return None
        replay, refusal = session.events.since_id(position, now=now)
        record.fencing_epoch, record.waits_from = attached.fencing_epoch, attached.waits_from
        record.attachment = attachment_of(attached.connection_id, attached.fencing_epoch)
        head = session.events.head.event_id()
        return Attached(
            record.fencing_epoch,
            head,
            previous,
            replay,
            refusal,
            record.principal.scopes,
            attached.listens_from,
        )

    async def detach(self, session_id: SessionId, fencing_epoch: FencingEpoch) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        record = session.record
        if not attachment.detaches(
            state_of(is_attached=record.attachment is not None),
            fencing_epoch=record.fencing_epoch,
            attached_with=fencing_epoch,
        ):
            return False
        record.attachment = None
        return True

    async def set_current(self, session_id: SessionId, current: CurrentSession | None) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.record.current = current

    async def mark_stream_opened(self, session_id: SessionId) -> bool:
        session = self._sessions.get(session_id)
        if session is None or session.record.stream_opened:
            return False
        session.record.stream_opened = True
        return True

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
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
        session = self._sessions.get(session_id)
        if session is None:
            return False
        if uri in session.record.subscriptions:
            session.uri_bytes -= text_size(uri)
        session.record.subscriptions -= {uri}
        self._forget_subscription(session_id, uri)
        return True

    async def subscribers(self, uri: str) -> Sequence[SessionId]:
        return list(self._by_uri.get(uri, ()))

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        records = [session.record for session in self._sessions.values()]
        if principal is None:
            return records
        return [record for record in records if record.principal == principal]

    async def set_filter(
        self, session_id: SessionId, uris: frozenset[str], lists: frozenset[str]
    ) -> bool:
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
        session = self._sessions.get(session_id)
        if session is None or session.keys is None:
            return False
        return session.keys.finish(key, outcome, now=now)

    async def load_data(self, session_id: SessionId) -> Data | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        return Data(copy.deepcopy(session.data or {}), session.data_version)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
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
        if stream == EVENTS:
            return session.events
        if session.streams is None:
            session.streams = {}
        log = session.streams.get(stream)
        if log is None:
            log = session.streams[stream] = EventLog(mint_log_epoch(), self._window)
        return log

    def _deadline(self, now: float, ends_at: float) -> float:
        return idle_deadline(now=now, idle_timeout=self._policy.idle_timeout, ends_at=ends_at)

    def _forget(self, session: _Session) -> None:
        """A session is over: it is remembered in no list (END2)."""
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


def _json_size(value: Any) -> int:
    try:
        return len(encode(value))
    except TypeError:
        # This store keeps what is no JSON, too.
        return len(repr(value))


def _window(policy: SessionPolicy) -> Window:
    return Window(policy.max_events, policy.max_bytes, policy.max_age)
