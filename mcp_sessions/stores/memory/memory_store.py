"""Sessions in this process's memory: the default store.

No method suspends, so each runs in one step of the event loop and is atomic by that. Its sessions
end with the process.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, assert_never

from mcp_sessions.core.ends import MOST_ENDS, REMEMBERED_FOR, SessionEnd, StoreMade
from mcp_sessions.core.life import (
    Admission,
    admission,
    has_come,
    idle_deadline,
)
from mcp_sessions.core.log import EventLog
from mcp_sessions.core.request_keys import KeyUse, RequestKeys, found
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import FencingEpoch, RequestKey, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.security import mint_log_epoch, mint_process
from mcp_sessions.stores.contract import StateConflict
from mcp_sessions.stores.ends_contract import EndedOutside
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
from mcp_sessions.stores.memory.memory_events import EventsInMemory
from mcp_sessions.stores.memory.tables import (
    Expiring,
    MemorySession,
    Owner,
    Tables,
    json_size,
    new_session,
    session_of,
    whole_of,
)
from mcp_sessions.stores.probe import StoreSize
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
from mcp_sessions.stores.records import (
    Admitted,
    CurrentUse,
    Data,
    Peer,
    SessionPage,
    SessionRecord,
    StoredState,
)
from mcp_sessions.stores.whole_sessions import WholeSession


class EndsInMemory(Tables):
    def __init__(self) -> None:
        super().__init__()
        # Oldest first, as a dict for its keys.
        self._ends: dict[SessionEnd, None] = {}
        # Those that no server wrote to its log yet.
        self._outside: list[SessionEnd] = []
        self._made: StoreMade | None = None

    async def remember_ends(
        self, ends: Sequence[SessionEnd], *, now: float, outside: bool = False
    ) -> Sequence[SessionEnd]:
        new = [end for end in ends if end not in self._ends]
        self._ends.update(dict.fromkeys(new))
        if outside:
            self._outside = [*self._outside, *new][-MOST_ENDS:]
        self._drop_old(now)
        return new

    def _drop_old(self, now: float) -> None:
        while self._ends:
            oldest = next(iter(self._ends))
            if len(self._ends) <= MOST_ENDS and oldest.at > now - REMEMBERED_FOR:
                return
            del self._ends[oldest]

    async def ended_outside(self, *, now: float) -> Sequence[EndedOutside]:
        outside, self._outside = self._outside, []
        return [EndedOutside(end) for end in outside]

    async def ends(self, *, now: float) -> Sequence[SessionEnd]:
        self._drop_old(now)
        return list(self._ends)

    async def made(self, *, now: float | None) -> StoreMade | None:
        if self._made is None and now is not None:
            self._made = StoreMade(mint_process(), now)
            return StoreMade(self._made.name, now, is_new=True)
        return self._made


class MemoryStore(EventsInMemory, Expiring, EndsInMemory):
    name = "memory"
    survives_process = False
    remembers = True
    exchange: Exchange | None = None

    async def open(self, policy: SessionPolicy) -> None:
        self._serve(policy)

    async def size(self) -> StoreSize:
        return StoreSize(len(self._sessions))

    async def close(self) -> None:
        self._sessions.clear()
        self._by_principal.clear()
        self._by_uri.clear()
        self._deadlines.clear()
        self._relayed.clear()
        self._ends.clear()

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
        known = self._sessions.get(session_id) if session_id is not None else None
        if known is not None and not has_come(known.record.life.expires_at, now):
            known.record.is_new = False
            return known.record
        if known is not None:
            self._forget(known)
        check_peer(peer, policy)
        owner = self._by_principal.get(principal) or Owner(principal)
        check_sessions(len(self._sessions), owner.sessions, policy, mode)
        session = new_session(session_id, mode, principal, peer, now, policy)
        record = session.record
        session_id, expires_at = record.session_id, record.life.expires_at
        if mode is Mode.CONVERSATION and owner.principal.scopes == principal.scopes:
            # Its credential is no part of it, and there may be many of one principal.
            record.principal = owner.principal
        self._sessions[session_id] = session
        self._by_principal[principal] = owner
        owner.sessions += 1
        if expires_at != math.inf:
            heapq.heappush(self._deadlines, (expires_at, session_id))
        return record

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        session = self._sessions.get(session_id)
        if session is None or has_come(session.record.life.expires_at, now):
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
        current: CurrentUse | None = None,
    ) -> Admitted | None:
        admitted = self.admitted(session_id, principal, mode, now, held, fencing_epoch, key)
        if admitted is None or current is None:
            return admitted
        at = admitted.record.client.current
        if at is None:
            return admitted
        if at.session_id != current.session_id or admitted.record.mode is not mode:
            return admitted
        epoch, key = at.fencing_epoch, current.key
        within = self.admitted(
            at.session_id, principal, Mode.PROTOCOL, now, current.held, epoch, key
        )
        if within is None or within.displaced or within.record.mode is not Mode.PROTOCOL:
            return admitted
        return Admitted(admitted.record, current=within)

    def admitted(
        self,
        session_id: SessionId,
        principal: Principal,
        mode: Mode,
        now: float,
        held: bool,
        fencing_epoch: FencingEpoch | None,
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
        # Not by ``_use``: this is on the way of every request, where a call costs.
        idle, life = self._idle_times[record.mode], record.life
        life.expires_at = idle_deadline(now=now, idle_timeout=idle, ends_at=life.ends_at)
        if key is None:
            return Admitted(record)
        if session.keys is None:
            session.keys = RequestKeys(
                max_bytes=self._policy.request_key_bytes,
                lifetime=self._policy.request_key_lifetime,
            )
        return Admitted(record, *found(*session.keys.begin(key, now=now)))

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        for session_id in session_ids:
            session = self._sessions.get(session_id)
            # A touched session was in use until now. So its idle deadline cannot have passed; the
            # absolute one can.
            if session is not None and not has_come(session.record.life.ends_at, now):
                self._use(session.record, now)

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        self._forget(session)
        return session.record

    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        record = session.record
        match change:
            case SetCurrent() | SetWaitsFrom() | SetLogLevel() | Tell():
                change.edit(record)
            case SetStreamOpened():
                is_first = not record.client.stream_opened
                change.edit(record)
                return is_first
            case SetFilter():
                self._set_filter(session, change)
            case RenewEvents():
                if record.mode is Mode.PROTOCOL:
                    session.events = EventLog(mint_log_epoch(), self._window)
            case _:
                assert_never(change)
        return True

    def _set_filter(self, session: MemorySession, change: SetFilter) -> None:
        check_subscriptions(change.uris, self._policy)
        record = session.record
        session.uri_bytes = sum(map(text_size, change.uris))
        for uri in record.client.subscriptions - change.uris:
            self._forget_subscription(record.session_id, uri)
        for uri in change.uris - record.client.subscriptions:
            self._by_uri.setdefault(uri, {})[record.session_id] = None
        change.edit(record)

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        subscriptions = session.record.client.subscriptions
        if uri not in subscriptions:
            size = text_size(uri)
            check_sizes(len(subscriptions) + 1, size, session.uri_bytes + size, self._policy)
            session.uri_bytes += size
        session.record.client.subscriptions |= {uri}
        self._by_uri.setdefault(uri, {})[session_id] = None
        return True

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        if uri in session.record.client.subscriptions:
            session.uri_bytes -= text_size(uri)
        session.record.client.subscriptions -= {uri}
        self._forget_subscription(session_id, uri)
        return True

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        records = (session.record for session in self._sessions.values())
        return [each for each in records if principal is None or each.principal == principal]

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        # Sorted once for all pages: those that come and go between two pages move no other.
        if after is None:
            self._listed = sorted(self._sessions)
        first = bisect.bisect_right(self._listed, after or "")
        ids = self._listed[first : first + limit]
        following = ids[-1] if len(ids) == limit else None
        there = (self._sessions.get(each) for each in ids)
        return SessionPage([each.record for each in there if each is not None], following)

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
        if expected_version not in (None, record.state.version):
            raise StateConflict(record)
        newest = {key: value for key, value in record.state.values.items() if key not in removed}
        newest.update(copy.deepcopy(dict(changed)))
        sizes = (text_size(key) + json_size(value) for key, value in newest.items())
        check_state(sum(sizes), self._policy)
        record.state = StoredState(newest, record.state.version + 1)
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
        data = session.data
        return Data(copy.deepcopy(data.value), data.version) if data is not None else Data({}, 0)

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        session = self._sessions.get(session_id)
        if session is None:
            return False
        if expected_version != (session.data.version if session.data is not None else 0):
            return False
        check_data(json_size(dict(value)), self._policy)
        session.data = Data(copy.deepcopy(dict(value)), expected_version + 1)
        return True

    # --- whole sessions --------------------------------------------------------------------------

    async def session_ids(self) -> Sequence[SessionId]:
        return list(self._sessions)

    async def whole(self, session_id: SessionId) -> WholeSession | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        return copy.deepcopy(whole_of(session, self._relayed.get(session_id, {})))

    async def add_whole(self, whole: WholeSession) -> bool:
        record = whole.record
        session_id, principal = record.session_id, record.principal
        if session_id in self._sessions:
            return False
        self._sessions[session_id] = session_of(copy.deepcopy(whole), self._window, self._policy)
        self._by_principal.setdefault(principal, Owner(principal)).sessions += 1
        if whole.carried:
            self._relayed[session_id] = dict(whole.carried)
        for uri in record.client.subscriptions:
            self._by_uri.setdefault(uri, {})[session_id] = None
        if record.life.expires_at != math.inf:
            heapq.heappush(self._deadlines, (record.life.expires_at, session_id))
        return True
