"""Handle the messages of other processes about sessions, requests and changes.

Each step first looks at the store, or at this process's own state. Only then it does what the
message says; see :mod:`mcp_sessions.server.cluster.replica_messages`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, assert_never

from mcp_sessions.core.messages import error_body
from mcp_sessions.core.named import updated_uri
from mcp_sessions.errors import REQUEST_CANCELLED, StoreRefused, StoreUnavailable
from mcp_sessions.ids import ConnectionId, SessionId
from mcp_sessions.server.calls.table import abort
from mcp_sessions.server.cluster.child_host import ChildHost
from mcp_sessions.server.cluster.fleet import Fleet
from mcp_sessions.server.cluster.relay import RequestRelay, Serve
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.cluster.replica_messages import (
    Alive,
    Ask,
    CancelKeyed,
    CancelRequest,
    ChangedOutside,
    ChildNotification,
    ChildRequest,
    ClientRequest,
    Describe,
    Description,
    Displaced,
    GetStreamOpened,
    Gone,
    Instruct,
    JoinRun,
    QuestionAnswer,
    QuestionProgress,
    ReplicaMessage,
    Result,
    ServerChanged,
    SessionAttached,
    SessionEnded,
    SessionQuestion,
    StreamLate,
    StreamRead,
    TaskChanged,
    Update,
    Withdrawn,
)
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.delivery.questions import RemoteQuestions
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.requests.joining import Joining
from mcp_sessions.server.requests.runner import RequestRunner

_ATTACHED_EVERY = 4
"""Rounds between two looks at who has what is attached here. The next event would show it."""

_CANCELLED = error_body(REQUEST_CANCELLED, "Request cancelled")

Work = Coroutine[Any, Any, None]
Publish = Callable[[str, Mapping[str, Any] | None], Awaitable[None]]


class HttpStreams(Protocol):
    def stream_read(self, sender: str, message: StreamRead) -> Work | None:
        """Note that another process serves a response stream, or has stopped."""
        ...

    async def round(self, carrying: Collection[SessionId]) -> None:
        """Make good what a process that died left undone.

        Args:
            carrying: Connections that carry sessions, of those that have a stream open here.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedRequests:
    relay: RequestRelay
    joining: Joining
    """Serves a keyed request that was sent again at another replica."""

    children: ChildHost | None
    """Serves requests to children of this process. None: sessions have none."""

    questions: RemoteQuestions

    def handle(self, sender: str, message: Ask | Update | Result | Alive | Gone) -> Work | None:
        match message:
            case Ask():
                return self.relay.asked(sender, message, self._server_of(message))
            case Update():
                return self.relay.updated(sender, message)
            case Result():
                return self.relay.answered(sender, message)
            case Alive():
                return self.relay.asked_for(sender, message)
            case Gone():
                return self.relay.gone(sender, message)

    def _server_of(self, message: Ask) -> Serve | None:
        match message.request:
            case JoinRun():
                return self.joining.serve
            case ChildRequest() | ChildNotification() if self.children is not None:
                return self.children.server_of(message.request)
            case SessionQuestion() | QuestionAnswer() | QuestionProgress():
                return self.questions.server_of(message.request)
            case ChildRequest() | ChildNotification() | ClientRequest():
                # The last is within a request of this process, which serves it.
                return None


class ClusterHandlers:
    """The :class:`~mcp_sessions.server.cluster.replica.Handlers` of a layer.

    Args:
        forget: Ends what runs here for a session that has ended in the store.
        publish: Puts a change on the server's own bus, and tells nobody else.
    """

    def __init__(
        self,
        replica: Replica,
        delivery: Delivery,
        runner: RequestRunner,
        *,
        relayed: RelayedRequests,
        streams: HttpStreams,
        fleet: Fleet,
        forget: Callable[[SessionId, ConnectionId | None], Awaitable[None]],
        publish: Publish,
    ) -> None:
        self._store, self._bus, self._runner = replica.store, replica.bus, runner
        self._connections, self._attachments = delivery.connections, delivery.attachments
        self._publisher, self._broadcaster = delivery.publisher, delivery.broadcaster
        self._questions, self._relayed, self._streams = delivery.questions, relayed, streams
        self._forget, self._publish = forget, publish
        self._fleet = fleet
        self._rounds = 0

    def handle(self, sender: str, message: ReplicaMessage) -> Work | None:
        match message:
            case SessionAttached():
                return self._publisher.push_open(message.session_id)
            case Displaced():
                return self._displaced(message)
            case Withdrawn():
                return self._withdrawn(message)
            case StreamLate():
                return self._attachments.end_late_stream(message)
            case SessionEnded():
                return self._ended(message)
            case GetStreamOpened():
                return self._get_opened(sender, message)
            case StreamRead():
                return self._streams.stream_read(sender, message)
            case CancelRequest():
                return self._cancel(message)
            case CancelKeyed():
                return self._cancel_keyed(message)
            case ServerChanged():
                return self._changed(message)
            case ChangedOutside():
                return self._changed_outside(message)
            case TaskChanged():
                tasks = self._runner.tasks
                return tasks.changed(message.task_id, sender) if tasks is not None else None
            case Ask() | Update() | Result() | Alive() | Gone():
                return self._relayed.handle(sender, message)
            case Describe():
                return self._fleet.describe(sender, message)
            case Description():
                return self._fleet.answered(sender, message)
            case Instruct():
                return self._fleet.obey(message)
            case _:
                assert_never(message)

    def missed(self) -> Work | None:
        self._rounds = -1  # A takeover may be among it: the next round looks.
        return self._runner.tasks.refresh() if self._runner.tasks is not None else None

    async def session_ended(self, session_id: SessionId) -> None:
        await self._forget(session_id, None)

    def round(self, carrying: Collection[SessionId]) -> Sequence[Callable[[], Work]]:
        streams, children = partial(self._streams.round, carrying), self._relayed.children
        steps = (self._relayed.relay.round, self._check_sessions, streams)
        if self._runner.tasks is not None:
            steps = (*steps, self._runner.tasks.check_runners)
        return (*steps, children.round) if children is not None else steps

    async def _check_sessions(self) -> None:
        """Sessions that run here may have ended at another replica, or left a connection of this
        process for one at another replica, and no message said so.
        """
        self._rounds += 1
        if self._rounds % _ATTACHED_EVERY == 0:
            for connection in self._connections.all():
                for session_id in list(connection.attached):
                    try:
                        await self._attachments.check_attached(session_id, connection)
                    except StoreRefused:
                        # Perhaps it cannot be read. Its own requests say why.
                        continue
                    except StoreUnavailable:
                        self._rounds = -1  # The next round looks again.
                        raise
        for session_id in list(self._runner.held):
            with suppress(StoreRefused):  # The others are looked at all the same.
                if await self._store.head(session_id) is None:
                    if await self._store.load(session_id, now=0) is None:
                        await self._forget(session_id, None)

    # --- sessions ----------------------------------------------------------------------------

    async def _displaced(self, message: Displaced) -> None:
        connection = self._connections.local(message.connection_id)
        if connection is not None:
            await self._attachments.displaced_at_replica(message, connection)

    def _withdrawn(self, message: Withdrawn) -> Work | None:
        connection = self._stored(message.connection_id)
        if connection is None:
            return None
        return connection.withdrawn_at_replica(message.session_id)

    def _get_opened(self, sender: str, message: GetStreamOpened) -> Work | None:
        connection = self._stored(ConnectionId(message.session_id))
        if connection is None or connection.opened_at_replica((message.at, sender)):
            return None
        return connection.announce_opened(to=sender)

    def _stored(self, connection_id: ConnectionId) -> StoredConnection | None:
        connection = self._connections.local(connection_id)
        return connection if isinstance(connection, StoredConnection) else None

    async def _ended(self, message: SessionEnded) -> None:
        session_id, connection_id = message.session_id, message.connection_id
        knows = session_id in self._runner.held or self._connections.knows(session_id)
        rounds, children = self._questions.rounds, self._relayed.children
        knows = knows or (rounds is not None and rounds.waits_in(session_id))
        knows = knows or (children is not None and children.has(session_id))
        known = connection_id is not None and self._connections.local(connection_id) is not None
        if (knows or known) and await self._store.load(session_id, now=0) is None:
            await self._forget(session_id, connection_id)

    # --- requests ----------------------------------------------------------------------------

    async def _cancel(self, message: CancelRequest) -> None:
        for call in self._runner.calls.meant(message.connection_id, message.id):
            await abort(call, _CANCELLED)

    async def _cancel_keyed(self, message: CancelKeyed) -> None:
        running = await self._relayed.joining.find_running(message.session_id, message.key)
        if running is not None:
            await running.abort(_CANCELLED)

    # --- changes -----------------------------------------------------------------------------

    async def _changed(self, message: ServerChanged) -> None:
        if self._broadcaster.is_new(message.id):
            uri = updated_uri(message.method, message.params)
            await self._broadcaster.notify_sessionless(message.method, message.params, uri)
            await self._publish(message.method, message.params)

    async def _changed_outside(self, message: ChangedOutside) -> None:
        await self._publish(message.method, message.params)
