"""The calls of this process: the requests that came in and are not answered, and what runs.

Rules, owned by ``tests/server/calls/test_table.py``, and over the wire by
``tests/server/test_requests.py``:

1. On one wire an id names one request (REQ2). Over HTTP several may share one (REQ9), because some
   hosts send each request with the same id, and each has a response of its own.
2. A cancellation by an id reaches every request that has it and whose response is open. If none is,
   it reaches the newest (REQ3).
3. A call is entered once and removed once. In between it is its sender's load.

A call holds values and where its answer goes. It knows no runner and no store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from mcp_sessions.core.message import MALFORMED_KEY, Message
from mcp_sessions.core.messages import NotNamed, RequestId, error_body, wire_error
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import (
    INTERNAL_ERROR,
    InvalidReason,
    InvalidRequest,
    LimitReached,
    OutcomeUnknown,
    SessionsError,
    StoreUnavailable,
)
from mcp_sessions.ids import ConnectionId, RequestKey, SessionId
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.calls.shares import Shares
from mcp_sessions.server.connection.connection import Inbound
from mcp_sessions.stores.records import Admitted, SessionRecord

logger = logging.getLogger(__name__)

NOT_JSON = (TypeError, ValueError, RecursionError)
"""Exceptions of JSON writers for a value that they cannot write."""


class CallWork(Protocol):
    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that does the work; None: the work ended."""
        ...

    def is_awaited_by(self, call: Call) -> bool:
        """Whether the answer is still to come, and the sender of a call listens for it."""
        ...

    async def abort(self, error: dict[str, Any]) -> None: ...


class Outcome(NamedTuple):
    """A result or, if that is None, an error."""

    result: dict[str, Any] | None
    error: dict[str, Any] | None
    away: StoreUnavailable | None = None
    """The store's failure of which the error tells: nothing ran."""


class KeyScope(NamedTuple):
    """A session in which the key of a request outside of sessions is recorded."""

    session_id: SessionId
    mode: Mode
    principal: Principal


ANSWERED: Final = Outcome(None, None)
"""Somebody else answers the call, or did."""


class Stage:
    """One feature on the path of a request. It changes nothing by itself.

    Every stage is in one list (``mcp_sessions/server/dispatch/path.py``). Its findings are in the
    :class:`Call`: a stage belongs to its server, and not to one call.
    """

    __slots__ = ()

    async def before(self, call: Call) -> Outcome | None:
        """Find or change something before the call runs.

        Returns:
            The answer: no later stage gets the call. None: the next stage gets it.

        Raises:
            WireError, UpstreamError: The call is refused.
        """
        return None

    def may_have_begun(self, call: Call) -> bool:
        """Whether the call may have had an effect, if the store failed :meth:`before`: the stage
        serves it itself, or found that it began under its key.
        """
        return False

    def after(self, call: Call, outcome: Outcome) -> Outcome:
        """Change the outcome, before the client gets it and before it is kept for a request key.

        It is called for a call that has the stage in :attr:`Call.stages`, from the last stage to
        the first. The outcome may be an error, or the questions of a round (2026-07-28). If this
        raises, the client gets "Internal error".
        """
        return outcome


@dataclass(slots=True, eq=False, repr=False)
class Keyed:
    """What the stages of request keys found."""

    of_host: RequestKey | None = None
    """The key that its host sent. None: it sent none, or the request has one of its own."""

    lock: asyncio.Lock | None = None
    """The lock of its key, held until it runs or is refused."""

    scope: KeyScope | None = None
    """Where its key is recorded. None: in its protocol-mode session."""

    instead_of: str = ""
    """A run of its key that never began; see :class:`~mcp_sessions.core.request_keys.KeyUse`."""

    known_in: SessionId | None = None
    """The session of that run."""

    was_seen: bool = False
    """Its key was, so that its handler does not run for it."""

    def release(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()


@dataclass(slots=True, eq=False, repr=False)
class Tasking:
    """What the stage of tasks decided."""

    tasks: Any
    """The ``Tasks`` of the server."""

    after: float | None = None
    """Seconds after which it becomes a task. None: it does not, or is one from its beginning."""

    ids: Sequence[SessionId] | None = None
    """The tasks that are reported on it. None: it is no listen to tasks."""

    is_told: bool = False
    """Its client knows no tasks: it gets a text about the task."""

    running: Any = None
    """The ``RunningTask`` that it is from its beginning."""

    def discard(self) -> None:
        """Forget that task: the call does not run."""
        if self.running is not None:
            self.tasks.discard(self.running)


class OfConversation(NamedTuple):
    record: SessionRecord
    started: str | None = None
    """The handle of the session, if the request started it."""


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One sending of a request: where its answer goes, and what the stages of its path found.

    Until it runs it can be cancelled. With it ends the newest call of the same id that still runs
    and that nobody listens to: as a rule that is the same request, which was sent again.
    """

    request: Message
    inbound: Inbound
    load: Hashable = None
    """The key under which the call counts; see :func:`load_of`."""

    work: CallWork | None = field(init=False, default=None)
    """None: it does not run yet. Its session is looked up, say."""

    error: dict[str, Any] | None = field(init=False, default=None)
    """It was cancelled or refused before it ran: as soon as it runs it ends."""

    owner: Hashable = field(init=False, default=None)
    """The principal whose share it is; see :class:`Shares`. None: no limit counts it."""

    is_open: bool = field(init=False, default=False)
    """It is in the table: it is neither answered nor refused."""

    earlier: Call | None = field(init=False, default=None)
    """The one with its id that a cancellation ends as well."""

    key: RequestKey | None = field(init=False, default=None)
    """The request key that is recorded with its admission."""

    keyed: Keyed | None = field(init=False, default=None)
    """What the stages of request keys found. None: it has no key."""

    admitted: Admitted | None = field(init=False, default=None)
    """How it was admitted to its protocol-mode session."""

    record: SessionRecord | None = field(init=False, default=None)
    """Its protocol-mode session."""

    conversation: OfConversation | None = field(init=False, default=None)
    """The session of its conversation."""

    is_gated: bool = field(init=False, default=False)
    """It calls a tool that is served in a session only. If the tool is hidden from it, it is
    answered like a call of a tool that does not exist."""

    handle: Any = field(init=False, default=None)
    """The session as its handler has it: a ``SessionHandle``."""

    handler_record: SessionRecord | None = field(init=False, default=None)
    """The record of that one."""

    instead: Mapping[str, str] = field(init=False, default_factory=dict[str, str])
    """The replacement of a hidden name in the request → the name."""

    tasking: Tasking | None = field(init=False, default=None)
    """What the stage of tasks decided. None: it becomes no task, and is told of none."""

    stages: Sequence[Stage] = field(init=False, default=())
    """The stages that see its outcome, in the order of its path."""

    @property
    def named(self) -> bool:
        """Whether it names its session by rule 1. Then its result has the session's ``_meta``."""
        return not isinstance(self.request.session, NotNamed)

    @property
    def task(self) -> asyncio.Task[None] | None:
        if self.work is not None:
            return self.work.task
        return self.earlier.task if self.earlier is not None else None

    @property
    def is_awaited(self) -> bool:
        return self.work is None or self.work.is_awaited_by(self)

    def begins(self, work: CallWork | None) -> None:
        self.work = work

    def follows(self, before: Call) -> None:
        self.earlier = before

    async def answer(
        self,
        outcome: Outcome,
        *,
        finish: Callable[[Call, dict[str, Any]], dict[str, Any]] | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Send its answer. Each answer to a request goes this way, also a refusal.

        Args:
            finish: Makes the result what the sender of this call gets; None: it is that.
            retry_after: Seconds after which its client may send it again.

        Raises:
            StoreUnavailable: It was answered. Its stream is not stored.
        """
        inbound, request = self.inbound, self.request
        channel, audit = inbound.channel, inbound.audit
        result, error = outcome.result, outcome.error or {}
        message = b""
        if result is not None:
            try:
                if finish is not None:
                    result = finish(self, result)
                message = channel.encode({"jsonrpc": "2.0", "id": request.id, "result": result})
            except OutcomeUnknown as unknown:
                result, error = None, wire_error(unknown)
            except (SessionsError, *NOT_JSON):
                logger.exception("the result of %s cannot be sent", request.method)
                result, error = None, error_body(INTERNAL_ERROR, "Internal error")
        if result is None:
            try:
                message = channel.encode({"jsonrpc": "2.0", "id": request.id, "error": error})
            except NOT_JSON:
                logger.exception("the error of %s cannot be sent", request.method)
                error = error_body(INTERNAL_ERROR, "Internal error")
                message = channel.encode({"jsonrpc": "2.0", "id": request.id, "error": error})
        code = error.get("code") if result is None else None
        if audit is None:
            await channel.answer(message, code=code, away=outcome.away, retry_after=retry_after)
            return
        if result is not None:
            audit.is_result(result)
        else:
            audit.is_error(error)
        is_awaited = channel.is_open
        try:
            await channel.answer(message, code=code, away=outcome.away, retry_after=retry_after)
        finally:
            audit.write(is_awaited=is_awaited)

    def stop(self, error: dict[str, Any]) -> CallWork | None:
        """End it. A call that is refused, or answered at once, never runs.

        Returns:
            The work to abort; None: nothing runs yet.
        """
        if self.work is not None:
            return self.work
        self.error = error
        return self.earlier.stop(error) if self.earlier is not None else None


async def abort(call: Call, error: dict[str, Any]) -> None:
    work = call.stop(error)
    if work is not None:
        await work.abort(error)


def load_of(session_id: SessionId | None, principal: Principal) -> Hashable:
    """Return the key under which a message without a connection counts as load.

    It counts for its session, and otherwise for its principal. None: it counts for no one. Without
    authentication all clients share one principal.

    Args:
        session_id: The session that it belongs to, or names.
        principal: The principal that sent it.
    """
    return session_id or (principal if principal != ANONYMOUS else None)


_MOST_LATEST = 10_000
"""Sessions whose newest request is known, about. An operator asks for it."""


class Run(CallWork, Protocol):
    @property
    def request(self) -> Message: ...

    @property
    def started_at(self) -> float: ...

    @property
    def sessions(self) -> Sequence[SessionId]:
        """The sessions, of any mode, that must not expire while it runs."""
        ...

    @property
    def keyed_in(self) -> SessionId | None:
        """The session in which its key is recorded."""
        ...

    @property
    def key(self) -> RequestKey | None: ...

    @property
    def waiters(self) -> Sequence[Call]: ...


R = TypeVar("R", bound=Run)


class Calls(Generic[R]):
    def __init__(self, most: int, shares: Shares | None = None) -> None:
        self._most = most
        self._shares = shares
        self.draining = False
        """No request is begun any more, but on a connection that is served until it is quiet, and
        what came before."""

        self.has_ended = False
        """It has drained: no request is begun any more, wherever it came from."""

        self.opened = 0
        """The calls that are open."""

        self._load: dict[Hashable, int] = {}
        self._by_id: dict[ConnectionId, dict[RequestId, list[Call]]] = {}
        self._running: dict[R, None] = {}
        self._by_session: dict[SessionId, dict[R, None]] = {}
        self._by_key: dict[tuple[SessionId, RequestKey], R] = {}
        self._latest: dict[SessionId, tuple[float, str]] = {}
        self._latest_before: dict[SessionId, tuple[float, str]] = {}
        """When the newest request of a session began, and its method: two generations, so that a
        call makes no room itself."""

        self.load: Mapping[Hashable, int] = self._load
        """Sender → its requests that are being admitted, that run, or that wait for a running
        one. A sender without any is not there."""

        self.running: Mapping[R, None] = self._running
        """The running requests, oldest first."""

        self.held: Mapping[SessionId, Mapping[R, None]] = self._by_session
        """The sessions, of both modes, that a request is running in."""

    def drain(self, *, has_ended: bool = False) -> None:
        self.draining, self.has_ended = True, has_ended

    def is_served_still(self, inbound: Inbound) -> bool:
        """Whether a request may begin while the process stops. Over HTTP others came no further
        than its door. A connection that is open both ways is asked here.
        """
        is_leaving = inbound.connection is not None and inbound.connection.transport.is_leaving
        return is_leaving or (inbound.channel.is_admitted and not self.has_ended)

    # --- from its arrival to its answer ------------------------------------------------------

    def open(self, call: Call, *, is_ours: bool = False) -> None:
        """Open a call for a request. A refused request leaves no trace.

        Args:
            is_ours: The layer answers it at once: it is nobody's load.

        Raises:
            InvalidRequest: ``DUPLICATE_ID``: a request with its id is still open on the same wire.
            InvalidParams: It names a session in metadata that is malformed.
            LimitReached: Its sender has too many, or its principal.
        """
        request, inbound = call.request, call.inbound
        connection = inbound.connection
        by_id = self._by_id.get(connection.id) if connection is not None else None
        same = by_id.get(request.id) if by_id is not None else None
        if same is not None and connection is not None:
            for known in same:
                if not known.is_awaited:
                    call.follows(known)
                elif connection.is_one_wire:
                    text = "a request with this id is still open"
                    raise InvalidRequest(InvalidReason.DUPLICATE_ID, text)
        if not is_ours:
            if request.session is NotNamed.MALFORMED:
                request.named()
            if connection is not None:
                owner: Hashable = connection.id
            else:
                named = request.session
                owner = load_of(None if isinstance(named, NotNamed) else named, inbound.principal)
            if owner is not None and self._load.get(owner, 0) >= self._most:
                raise LimitReached("max_running_requests", self._most)
            call.load = owner
        if self._shares is not None:
            call.owner = self._shares.opened(inbound.principal, inbound.scope)
        if call.load is not None:
            self._load[call.load] = self._load.get(call.load, 0) + 1
        call.is_open = True
        self.opened += 1
        if connection is None:
            return
        connection.last_method = request.method
        if same is not None:
            same.append(call)
        elif by_id is not None:
            by_id[request.id] = [call]
        else:
            self._by_id[connection.id] = {request.id: [call]}

    def take(self, inbound: Inbound) -> None:
        """Count a request that is no call of this table, such as a handshake.

        Raises:
            LimitReached: Its principal has too many, or sends too many.
        """
        if self._shares is not None:
            self._shares.take(inbound.principal, inbound.scope)

    def close(self, call: Call) -> None:
        """Close a call that was opened or counted. To close it again changes nothing."""
        if not call.is_open:
            return
        call.is_open = False
        self.opened -= 1
        # Its work knows its calls: otherwise both wait for the garbage collector.
        call.work = call.earlier = None
        if call.load is not None:
            left = self._load[call.load] - 1
            if left:
                self._load[call.load] = left
            else:
                del self._load[call.load]
        if call.owner is not None and self._shares is not None:
            self._shares.closed(call.owner)
        connection = call.inbound.connection
        by_id = self._by_id.get(connection.id) if connection is not None else None
        if by_id is None or connection is None:
            return
        same = by_id[call.request.id]
        if len(same) > 1:
            same.remove(call)
            return
        del by_id[call.request.id]
        if not by_id:
            del self._by_id[connection.id]

    def is_full(self, owner: Hashable) -> bool:
        return owner is not None and self._load.get(owner, 0) >= self._most

    def count(self, call: Call) -> None:
        """Count a call as its sender's load. Nothing else is recorded about a call that joins from
        another process.
        """
        call.is_open = True
        self.opened += 1
        if call.load is not None:
            self._load[call.load] = self._load.get(call.load, 0) + 1

    # --- while it runs -----------------------------------------------------------------------

    def begins(self, run: R) -> None:
        self._running[run] = None
        for session_id in run.sessions:
            self._by_session.setdefault(session_id, {})[run] = None
            self._latest[session_id] = run.started_at, run.request.method
        if run.keyed_in is not None and run.key is not None:
            self._by_key[run.keyed_in, run.key] = run
        for call in run.waiters:
            call.work = run

    def latest_in(self, session_id: SessionId) -> tuple[float, str] | None:
        """When the newest request that ran here in a session began, and its method."""
        return self._latest.get(session_id) or self._latest_before.get(session_id)

    def forget(self, session_id: SessionId) -> None:
        """Forget the newest request of a session that ended."""
        self._latest.pop(session_id, None)
        self._latest_before.pop(session_id, None)

    def round(self) -> None:
        """Forget the newest requests of the sessions that had none for long."""
        if len(self._latest) > _MOST_LATEST:
            self._latest_before, self._latest = self._latest, {}

    def handled(self, run: R) -> None:
        self._running.pop(run, None)
        for session_id in run.sessions:
            running = self._by_session.get(session_id)
            if running is not None:
                running.pop(run, None)
                if not running:
                    del self._by_session[session_id]

    def end(self, run: R, *, runs_on: bool = False) -> None:
        """End a run: its calls have ended, and no later call joins it.

        Args:
            runs_on: Its client has a task for it, which still runs in its sessions.
        """
        if not runs_on:
            self.handled(run)
        if run.keyed_in is not None and run.key is not None:
            key = run.keyed_in, run.key
            if self._by_key.get(key) is run:
                del self._by_key[key]
        for call in run.waiters:
            self.close(call)

    # --- what is there -----------------------------------------------------------------------

    def by_key(self, session_id: SessionId, key: RequestKey) -> R | None:
        return self._by_key.get((session_id, key))

    def has(self, connection_id: ConnectionId, request_id: RequestId | None = None) -> bool:
        by_id = self._by_id.get(connection_id, {})
        return bool(by_id) if request_id is None else request_id in by_id

    def meant(self, connection_id: ConnectionId, request_id: RequestId) -> list[Call]:
        """Return the calls that a cancellation by id reaches (REQ3)."""
        same = self._by_id.get(connection_id, {}).get(request_id, [])
        return [call for call in same if call.is_awaited] or same[-1:]

    def tasks(self, connection_id: ConnectionId) -> list[asyncio.Task[None]]:
        by_id = self._by_id.get(connection_id, {})
        return [call.task for same in by_id.values() for call in same if call.task]


@dataclass(slots=True, eq=False, repr=False)
class Acceptance(Stage):
    """Refuses a request before anything is looked up for it: by the limits of a server that stops,
    of a sender, and of an id. The first stage.

    Args:
        is_ours: The layer answers the request itself. A request key means nothing there, and the
            request is nobody's load.
    """

    _calls: Calls[Any]
    is_ours: bool = False

    async def before(self, call: Call) -> Outcome | None:
        calls = self._calls
        if calls.draining and not calls.is_served_still(call.inbound):
            return stopping()
        if not self.is_ours and call.request.key is MALFORMED_KEY:
            # ASC20: a malformed key is refused before anything else.
            call.request.keyed()
        calls.open(call, is_ours=self.is_ours)
        return None


def stopping() -> Outcome:
    """Refuse a request that has not started: its client may send it to another replica (ERR15)."""
    data: dict[str, Any] = {"reason": "draining", "started": False}
    return Outcome(None, error_body(INTERNAL_ERROR, "the server is shutting down", data))
