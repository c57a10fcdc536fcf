"""Define the messages between processes that serve the same sessions: one class for each kind.

1. A message may be lost, and arrives at most once.
2. A message is a hint. Its receiver first looks at the store, or at its own state.
3. ``kind`` and the members are the wire between two releases. A new member has a default,
   because the release before does not send it.

:mod:`mcp_sessions.server.cluster.codec` writes and reads them, and
:mod:`mcp_sessions.server.dispatch.cluster_handlers` handles them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mcp_sessions.core.messages import RequestId
from mcp_sessions.errors import Detached
from mcp_sessions.ids import ConnectionId, FencingEpoch, RequestKey, SessionId, StreamName
from mcp_sessions.principal import Principal
from mcp_sessions.stores.records import Peer

# --- sessions and their connections ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAttached:
    """To all, from the process that attached a session, to a connection or to none. Processes with
    open questions for its client ask them again.
    """

    kind: ClassVar[str] = "attached"
    session_id: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Displaced:
    """To a connection's process, from the one that took its session. Unless the store still has
    that attachment, the connection's client is notified, and gets no more of the session.
    """

    kind: ClassVar[str] = "displaced"
    session_id: SessionId
    connection_id: ConnectionId
    fencing_epoch: FencingEpoch
    """By which it was attached there."""

    reason: Detached
    newer: str | None
    """The kind of the connection that has it now; None: none has."""

    instance: str | None = None
    """How the client that has it now calls itself (TKO12); None: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """To all, from the process that took a session from an HTTP connection. Its GET stream may be
    open in any of them: that stream withdraws the unsent events of the session.
    """

    kind: ClassVar[str] = "withdrawn"
    session_id: SessionId
    connection_id: ConnectionId


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLate:
    """To all, from a process with events of a session that the store has not taken for a while. The
    stream that waits for them ends.
    """

    kind: ClassVar[str] = "late"
    session_id: SessionId
    connection_id: ConnectionId
    """The connection that the session is attached to, or an HTTP connection itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """To all, from the process that ended a session of either mode, or from an operator's command.
    If the store has the session no more, everything that runs for it ends.
    """

    kind: ClassVar[str] = "ended"
    session_id: SessionId
    connection_id: ConnectionId | None
    """The connection that it was attached to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChanged:
    """To the runner of a task: its client's answer or cancellation was noted in the store. From the
    runner to all: a change of the task is stored.
    """

    kind: ClassVar[str] = "task_changed"
    task_id: SessionId


# --- HTTP streams ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStreamOpened:
    """To all: a GET stream of an HTTP connection was opened, and an older one ends. If two were
    opened in the same moment, only the process of the older one gets it.
    """

    kind: ClassVar[str] = "get_opened"
    session_id: SessionId
    """The transport-mode session."""

    at: float
    """When, by the sender's clock; seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRead:
    """To the process that runs a request, from the process where its client reads the response
    stream again: the answer has a receiver, or (not ``is_read``) has none any more.
    """

    kind: ClassVar[str] = "stream_read"
    session_id: SessionId
    """The transport-mode session."""

    stream: StreamName
    is_read: bool


# --- requests --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """To all: a connection's client cancelled a request that does not run at the sender's. The
    request's process cancels it. The sender checked the owner of the connection.
    """

    kind: ClassVar[str] = "cancel"
    connection_id: ConnectionId
    id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelKeyed:
    """To all, or to the process that runs a request, from the process where the session's owner
    cancelled it by its key.
    """

    kind: ClassVar[str] = "cancel_keyed"
    session_id: SessionId
    key: RequestKey


# --- requests that another process serves ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    principal: Principal
    """The principal of the request, without its scopes."""

    can_send_request: bool
    """Whether its client can be asked something meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRequest:
    """To the process that has a session's child: send the child this request, if it has the child
    still.
    """

    kind: ClassVar[str] = "child"
    session_id: SessionId | None
    """None: it goes on with a call outside of sessions that waits for answers there."""

    holder: str
    """By which name the child is held; outside of sessions, the call."""

    client: Mapping[str, Any]
    """The params of ``initialize`` of a child that is started for it."""

    method: str | None
    """None: the child is started, if there is none, and asked nothing."""

    params: Mapping[str, Any] | None
    level: str | None
    """The least of a log message that goes there; None: none does."""

    caller: Caller
    asks: Mapping[str, Any] | None
    """The questions that results may carry to its client; None: the handshake era has none."""

    is_cancelled: bool = False
    """It may not have come before, and its client has left: the call that waits is cancelled."""

    scopes: Sequence[str] = ()
    """The scopes of its caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildNotification:
    """To the process that has a session's child: the session's client notified the server."""

    kind: ClassVar[str] = "child_notification"
    session_id: SessionId
    method: str
    params: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """To the process of a request's client: ask the client."""

    kind: ClassVar[str] = "client"
    method: str
    params: Mapping[str, Any] | None
    about: Sequence[str] = ()
    """Names of the requests of that process that it may be about. None: of the one within which it
    is asked.
    """

    id: str | None = None
    """Its id, if another process may ask it next. None: the process that asks makes one."""

    least: int = 0
    """See ``PeerRequest.least``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRun:
    """To the process that runs a keyed request, which was repeated at the sender. The result says
    that the answer is in the store, or that the request does not run.
    """

    kind: ClassVar[str] = "join"
    session_id: SessionId
    key: RequestKey
    run: str | None
    """The run of the key that the sender means; None: unknown."""

    token: RequestId | None
    """The progress token of this sending."""

    peer: Peer
    """Its client. Of what it said of itself only ``{"capabilities": …}`` is sent. None: it said
    nothing.
    """

    transport: str
    """The kind of its connection."""

    is_answerable: bool
    """Whether it can be asked something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuestion:
    """To the process where a session is attached: send its client a question of the sender's, or
    the withdrawal, if the session is attached there still. The result says so. If the client
    answers no such question, it is an error.
    """

    kind: ClassVar[str] = "question"
    session_id: SessionId
    connection_id: ConnectionId
    fencing_epoch: FencingEpoch
    text: str
    """The JSON-RPC message."""

    id: str
    """The question's."""

    method: str
    """The question's method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnswer:
    """A client answered a question of the receiver's. The answer counts if that principal was
    asked. The result says that the receiver has it.
    """

    kind: ClassVar[str] = "answer"
    id: str
    """The question's."""

    result: dict[str, Any] | None
    error: dict[str, Any] | None
    principal: Principal
    """The principal that answers, without its scopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionProgress:
    """A client reported progress on a question of the receiver's, named in the progress token. Its
    sender does not wait for a result.
    """

    kind: ClassVar[str] = "progress"
    params: Mapping[str, Any] | None
    principal: Principal
    """The principal that reports, without its scopes."""


RelayedChildMessage = ChildRequest | ChildNotification
RelayedQuestion = SessionQuestion | QuestionAnswer | QuestionProgress
RelayedRequest = JoinRun | ClientRequest | RelayedChildMessage | RelayedQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """To the process that serves a request. :mod:`mcp_sessions.server.cluster.relay` has the rules
    of this message and of the next four.
    """

    kind: ClassVar[str] = "ask"
    ask: str
    """The sender's name for it, which is used once."""

    within: str | None
    """The name of the receiver's own request, in which the sender asks this; None: in none."""

    request: RelayedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """To the sender of an :class:`Ask`: a message that comes before the result."""

    kind: ClassVar[str] = "update"
    ask: str
    message: Mapping[str, Any]
    """A message of JSON-RPC: a notification, or a request to its client."""

    number: int = 0
    """Among the updates of its request, from 1. 0: an earlier release does not count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """To the sender of an :class:`Ask`, or of an :class:`Alive`: how the request ended."""

    kind: ClassVar[str] = "result"
    ask: str
    result: Mapping[str, Any] | None
    error: Mapping[str, Any] | None
    """Neither: the request did not run, and never will."""

    updates: int = 0
    """The number of the last update before it. 0: there is none, or an earlier release sends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """To the process that serves a request, now and then: its sender waits for the result."""

    kind: ClassVar[str] = "alive"
    ask: str
    is_open: bool
    """Whether its client listens."""

    newest: int | None = None
    """The number of the newest update before which none is missing. None: an earlier release does
    not say it.
    """

    lacks: bool = False
    """Later updates came: those between are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """To the other side of a request: its sender does not wait any more, or its receiver does not
    know it.
    """

    kind: ClassVar[str] = "gone"
    ask: str


# --- changes of the server -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChanged:
    """A list or a resource of the server changed.

    Sent to all. Each process notifies its connections without a session, and its server's own
    listeners. The sender alone notifies sessions. Repeated if it is unknown whether it was sent.
    """

    kind: ClassVar[str] = "change"
    id: str | None = None
    """By which it is known when it is said again; None: it is said once."""

    method: str
    params: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedOutside:
    """To all: a child of clients outside of sessions says that a list changed. Each process
    notifies the listens outside of sessions. All others have children of their own.
    """

    kind: ClassVar[str] = "change_outside"
    method: str
    params: Mapping[str, Any] | None


# --- what an operator looks at ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """To all, from a process at whose page somebody looks: say what you do."""

    kind: ClassVar[str] = "describe"
    ask: str
    """The sender's name for this look."""

    session_id: SessionId | None = None
    """Say what you know of this session alone. A release before this member says all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """To the sender of a :class:`Describe`."""

    kind: ClassVar[str] = "description"
    ask: str
    facts: Mapping[str, Any]
    """See :mod:`mcp_sessions.server.dispatch.own_facts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruct:
    """To one process, from a page whose operator may act."""

    kind: ClassVar[str] = "instruct"
    what: str
    """``drain``, or ``stop`` a process of the wrapped server."""

    pid: int
    """The number of that process; 0: none is meant."""


ReplicaMessage = (
    SessionAttached
    | Displaced
    | StreamLate
    | Withdrawn
    | SessionEnded
    | TaskChanged
    | GetStreamOpened
    | StreamRead
    | CancelRequest
    | CancelKeyed
    | Ask
    | Update
    | Result
    | Alive
    | Gone
    | ServerChanged
    | ChangedOutside
    | Describe
    | Description
    | Instruct
)
