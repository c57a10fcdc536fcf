"""The contract of a session store: what must be atomic, and what survives.

A store remembers sessions, their event logs, subscriptions, keyed requests and data. It
knows nothing of connections but their ids, and nothing of MCP. Every method takes ``now``,
seconds since 1970, so that time can be passed in. A store that processes share judges by a clock
of its own: a process whose clock is set wrong must not end what belongs to others.

Each method is one atomic step: two callers never see each other's half. Nothing is written
after a session has ended; a late write is refused and never brings the session back. There is no
``update(session)``: a slow process would overwrite what a faster one stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from mcp_sessions.core.log import Draft, LoggedEvent
from mcp_sessions.core.request_keys import KeyUse
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.errors import Refusal, SessionsError
from mcp_sessions.ids import (
    EVENTS,
    GET_STREAM,
    ConnectionId,
    FencingEpoch,
    Position,
    RequestKey,
    SessionId,
    StreamName,
)
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal
from mcp_sessions.stores.ends_contract import Ends
from mcp_sessions.stores.exchange import Exchange
from mcp_sessions.stores.record_changes import RecordChange
from mcp_sessions.stores.records import (
    Admitted,
    Appended,
    AppendedChange,
    Attached,
    Audience,
    CurrentUse,
    Data,
    Peer,
    Relayed,
    ServerChange,
    SessionPage,
    SessionRecord,
    StreamHead,
)
from mcp_sessions.stores.whole_sessions import WholeSessions


class StateConflict(SessionsError):
    """A session's state is another one than the caller looked at; nothing was changed."""

    def __init__(self, newest: SessionRecord) -> None:
        super().__init__()
        self.newest = newest
        """The session as it is."""

    def __str__(self) -> str:
        return "session.state was changed by another request meanwhile"


CHANGES_AT_ONCE = 8
"""Sessions that one call tells of a change, at the most: a store in this process does them in
half a millisecond, in which nobody else is served."""


class SessionStore(Ends, WholeSessions, Protocol):
    """Stores sessions. The module's first lines say which rules always hold.

    Every method may raise :class:`~mcp_sessions.errors.StoreUnavailable`. It is then unknown
    whether a write happened.
    """

    name: str
    """For people: ``memory``, ``sqlite``, ``redis``."""

    survives_process: bool
    """Whether sessions outlive the process that made them."""

    remembers: bool
    """False: it stores nothing, and ``sessions/create`` with ``state`` is all there is."""

    exchange: Exchange | None
    """How the processes that share it reach each other; None: one process has it alone."""

    async def open(self, policy: SessionPolicy) -> None:
        """Connect, and serve within the limits of ``policy``. Called once, first."""
        ...

    async def close(self) -> None:
        """Release every resource. Nothing is called after it."""
        ...

    async def create(
        self,
        mode: Mode,
        principal: Principal,
        *,
        peer: Peer | None,
        now: float,
        session_id: SessionId | None = None,
    ) -> SessionRecord:
        """Make a session with a new id, nobody attached, an empty log and no subscriptions.

        Args:
            session_id: Make it with this id, which the server derived from what its client calls
                it by, instead of one whose time has ended; if one lives that has it, nothing is
                made, and it is the answer, as it is. So whoever comes first makes it.

        Raises:
            LimitReached: ``max_sessions`` or ``max_sessions_per_principal`` are open
                already (for one of ``Mode.CONVERSATION``, where the latter is None, a tenth of
                ``max_sessions`` is its principal's), or ``peer`` has more than
                ``max_client_bytes`` (``stores/limits.py``). Nothing was made.
        """
        ...

    async def load(self, session_id: SessionId, *, now: float) -> SessionRecord | None:
        """The session, or None if it is unknown, ended or past its deadline, which is not
        moved.
        """
        ...

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
        """Let a request of ``principal`` use the session: alive, owned, key recorded,
        deadline moved, in one step.

        Args:
            mode: The session's mode; in a session of the other one nothing is changed, and
                the caller sees it from the record.
            held: The caller is working on this session, so it cannot be idle.
            fencing_epoch: The session's, as the caller knows it; if it is another now,
                nothing is changed and the answer says ``displaced``.
            key: Record this request key, or say what is known of it.
            current: If it is admitted, and this is the session's current one, of the fencing epoch
                that it is known by there: let the request into that as well, in this step. For a
                store that asks another process; any other may leave it to its caller.

        Returns:
            None if the session is unknown, ended, expired or somebody else's, or if the two
            modes differ and are not ``PROTOCOL`` and ``TRANSPORT``; then nothing was
            changed, not even the deadline (SES8).
        """
        ...

    async def touch(self, session_ids: Collection[SessionId], *, now: float) -> None:
        """Move the idle deadline of these sessions, those that still live."""
        ...

    async def end(self, session_id: SessionId) -> SessionRecord | None:
        """End the session for ever and forget every trace of it: logs, subscriptions, keys,
        data. The record as it was, or None if it was not there (END2).
        """
        ...

    async def expire(
        self, *, now: float, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        """End up to ``limit`` sessions whose deadline has passed, but none of ``held``
        whose absolute lifetime has not passed; the records as they were.
        """
        ...

    async def evict(
        self,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
        opened: bool,
    ) -> Sequence[SessionRecord]:
        """End up to ``limit`` sessions, none of ``held``; the records as they were. First go those
        that sleep (:func:`~mcp_sessions.core.life.asleep_by`), then transport-mode sessions that
        are nobody's (:data:`~mcp_sessions.principal.ANONYMOUS`) and hold nothing: no subscription,
        no current session, no session that is attached there. Among these, sessions that were used
        for no longer than ``unused_for`` after they were made go first. In each group, the longest
        unused go first.

        Args:
            unused_for: Seconds that nobody used it. It is not known if the lifetime ends before the
                idle time; such a session stays.
            opened: Those too whose GET stream was open once: the caller holds those where it
                still is, and nobody else serves them.
        """
        ...

    async def evict_own(
        self,
        principal: Principal,
        *,
        now: float,
        unused_for: float,
        held: Collection[SessionId],
        limit: int,
    ) -> Sequence[SessionRecord]:
        """End up to ``limit`` of the principal's sessions of ``Mode.CONVERSATION`` that were not
        used for so long, of those of ``Mode.KEYS`` that were not since their keys were forgotten,
        and of the others that sleep; those first that were not used for longest. The records as
        they were. For the arguments see :meth:`evict`.
        """
        ...

    async def evict_heavy(
        self, *, now: float, most: int, held: Collection[SessionId], limit: int
    ) -> Sequence[SessionRecord]:
        """End up to ``limit`` of the sessions that sleep, those of ``Mode.CONVERSATION`` included,
        but none of ``held``: the least recently used first, until the others keep no more than
        ``most`` bytes, about: events, answers, data, state, subscriptions, and descriptions of
        clients.
        """
        ...

    async def sleep(self, *, now: float) -> None:
        """Empty the events and the GET streams of the sessions that sleep (see :meth:`evict`), as
        if they had exceeded the space, and drop their response streams: once after each use. If a
        call fails, the next one does the rest.
        """
        ...

    async def append(
        self, session_id: SessionId, draft: Draft, *, now: float, stream: StreamName = EVENTS
    ) -> Appended | None:
        """Store ``draft`` as the newest event of a stream; make the stream if it is new.

        The id comes from the stream's own counter, in the same step, so that two processes
        can neither repeat nor skip one (EVT7). If the draft says that a call before ended in
        ``StoreUnavailable`` (:attr:`Draft.since`), and the stream has the event of its name, that
        one is the answer, and nothing is stored.

        Returns:
            None if the session is unknown, ended or expired. A late append never brings it
            back (SES18).
        """
        ...

    async def audience(self, change: ServerChange, after: str | None) -> Audience:
        """Sessions that a change may be for, in pages of hundreds: :meth:`append_change` decides.

        A session that is entitled from the first page to the last is in at least one page. A
        session that never was is in none, or is skipped by :meth:`append_change`.

        Args:
            after: The start of this page (:attr:`Audience.following`); None: the first page.
        """
        ...

    async def append_change(
        self,
        session_ids: Sequence[SessionId],
        change: ServerChange,
        *,
        now: float,
        again: bool = False,
    ) -> Sequence[AppendedChange]:
        """Append a change to those of these sessions that are entitled to it, as
        :meth:`append` does; who has it now, in the order of ``session_ids``.

        A protocol-mode session is sent by ``change.event`` if it is subscribed to
        ``change.uri``, or if its :attr:`SessionClient.lists` have ``change.listed``; a
        transport-mode session by ``change.bare`` on its GET stream if it is subscribed, or
        carries no session; one of another mode by nothing. Whether it is entitled is asked in the
        step that appends. Each session is one step at least.

        Args:
            session_ids: ``CHANGES_AT_ONCE`` at the most, each of them once.
            again: They may have it already: a call before ended in ``StoreUnavailable``. A session
                that has the change does not get it again, and is in the answer as if this call had
                stored it.

        Raises:
            StoreUnavailable: Unknown which of them have it.
        """
        ...

    async def read(
        self,
        session_id: SessionId,
        after: str | None,
        *,
        now: float,
        stream: StreamName = EVENTS,
        limit: int | None = None,
    ) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        """The events of a stream after a position, whole and in order, or nothing and why.

        A stream that is not there answers ``UNKNOWN_POSITION``, whatever was asked.

        Args:
            limit: Read a page of at most this many, which ends with the event that makes
                its payloads ``core.log.PAGE_BYTES`` or more; go on from the last one's id,
                until a page is empty.
        """
        ...

    async def head(self, session_id: SessionId, *, stream: StreamName = EVENTS) -> Position | None:
        """The position of who has seen everything of a stream; None if it is not there."""
        ...

    async def heads(self, streams: Sequence[tuple[SessionId, StreamName]]) -> Sequence[StreamHead]:
        """How far each of these streams is, in their order: each is a step of its own."""
        ...

    async def open_stream(self, session_id: SessionId, stream: StreamName) -> Position | None:
        """Make a stream if it is new; its head. None if the session is not there."""
        ...

    async def drop_stream(self, session_id: SessionId, stream: StreamName) -> None:
        """Forget a stream and everything in it."""
        ...

    async def drop_origin(
        self,
        session_id: SessionId,
        origin: SessionId,
        *,
        stream: StreamName = GET_STREAM,
        fencing_epoch: FencingEpoch | None = None,
    ) -> None:
        """Remove one session's events from a connection's stream, which carries that session
        no longer.

        Args:
            fencing_epoch: Do nothing if it carries that session with a higher epoch: who
                displaced it comes too late, and it is attached there anew. None: whatever.
        """
        ...

    async def carry(
        self, connection: SessionId, origin: SessionId, fencing_epoch: FencingEpoch, after: Position
    ) -> bool:
        """From now on the GET stream of the transport-mode session ``connection`` takes the events
        of ``origin``, attached there with that epoch, that follow ``after``. Entries of that
        session by an older epoch are removed from the stream, as :meth:`drop_origin` does. A second
        call for an epoch changes nothing: relayed events are not relayed again.

        Returns:
            False if ``connection`` is unknown, ended or expired, or carries that session
            with a higher epoch already.
        """
        ...

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
        """Append an event of ``origin`` to the GET stream of ``connection``, as
        :meth:`append` does, under its coalescing key and with ``origin``: once, in the order
        of its own log, and only while the stream carries that session with that epoch.

        Processes that store events of one session at the same time relay them in any order;
        this is where they fall into line again.

        Args:
            skips: The events between the last one relayed and this one were replaced by
                newer ones: the caller read the log, and relays all that is left of it.
        """
        ...

    async def attach(
        self,
        session_id: SessionId,
        connection_id: ConnectionId | None,
        *,
        now: float,
        position: Position | None = None,
        only_if_free: bool = False,
        entry: Entry | None = None,
    ) -> Attached | None:
        """Make this the session's one connection; raise its fencing epoch.

        Attach, head and range are one step: what is appended later is after ``head``.

        Args:
            connection_id: The connection; None: displace whoever is there and let the
                events wait (there is no stream to send them on).
            position: The last event that the client has, as it says.
            only_if_free: Do nothing and answer None if another connection is attached.
            entry: Add this to its story, with the :func:`~mcp_sessions.core.story.outcome`.

        Returns:
            None if the session is unknown, ended or expired, or not free.
        """
        ...

    async def detach(
        self, session_id: SessionId, fencing_epoch: FencingEpoch, entry: Entry | None = None
    ) -> bool:
        """Detach the session, if the attachment with that epoch still has it. A late close of a
        displaced connection changes nothing (TKO9).

        Args:
            entry: Add this to its story, if it is detached.
        """
        ...

    async def change(self, session_id: SessionId, change: RecordChange) -> bool:
        """Apply a change to the session's record (``stores/record_changes.py``). Its other parts
        stay as they are.

        Returns:
            False if the session is not there. For ``SetStreamOpened`` also if the stream was open
            before.

        Raises:
            LimitReached: For ``SetFilter``, as :meth:`subscribe`. Nothing was changed.
        """
        ...

    async def subscribe(self, session_id: SessionId, uri: str) -> bool:
        """Add a resource subscription; False if the session is not there.

        Raises:
            LimitReached: It has ``max_subscriptions`` others already, the URI has more than
                ``max_uri_bytes``, or all together ``max_subscription_bytes``. Nothing was added.
        """
        ...

    async def unsubscribe(self, session_id: SessionId, uri: str) -> bool:
        """Remove a resource subscription; False if the session is not there."""
        ...

    async def all_sessions(self, principal: Principal | None = None) -> Sequence[SessionRecord]:
        """Every live session, or every one of a principal. One that cannot be read is left out."""
        ...

    async def some_sessions(self, after: str | None, limit: int) -> SessionPage:
        """A page of the sessions, for who looks at many and keeps few. Some may have expired.

        A session that exists from the first page to the last is in at least one of them. One that
        cannot be read is in none.

        Args:
            after: The start of this page (:attr:`SessionPage.following`); None: the first page.
            limit: Records of a page, about.
        """
        ...

    async def change_state(
        self,
        session_id: SessionId,
        changed: Mapping[str, Any],
        removed: Collection[str],
        *,
        expected_version: int | None = None,
    ) -> SessionRecord | None:
        """Apply one request's changes to the newest state, key by key, and raise its
        version; the session as it is then, or None if it is not there.

        Args:
            expected_version: Of the state that the caller looked at; None: whichever it is.

        Raises:
            StateConflict: The state's version is another one. Nothing was changed.
            LimitReached: It would have more than ``max_state_bytes``. Nothing was changed.
        """
        ...

    async def finish_request(
        self, session_id: SessionId, key: RequestKey, outcome: bytes | None, *, now: float
    ) -> bool:
        """Keep the outcome of a keyed request (None: unknown); whether it was kept."""
        ...

    async def load_data(self, session_id: SessionId) -> Data | None:
        """The session's data, a copy; None if the session is not there."""
        ...

    async def replace_data(
        self, session_id: SessionId, value: Mapping[str, Any], *, expected_version: int
    ) -> bool:
        """Replace the session's data if its version still is ``expected_version``.

        Raises:
            LimitReached: It is more than ``max_data_bytes``. Nothing was replaced.
        """
        ...
