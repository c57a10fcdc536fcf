from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from mcp_sessions import method_names
from mcp_sessions.argument_types import check_fields, hinting
from mcp_sessions.errors import ConfigurationError

COALESCED_BY_DEFAULT: Mapping[str, str | None] = {
    method_names.RESOURCE_UPDATED: "uri",
    method_names.TOOLS_CHANGED: None,
    method_names.PROMPTS_CHANGED: None,
    method_names.RESOURCES_CHANGED: None,
    method_names.TASK_CHANGED: "taskId",
}
"""Method → the member of ``params`` that is its key, or None: keyed by method alone."""


FORGET_AFTER = 86_400 * 30
"""Seconds: ``SessionPolicy.forget_after`` if it is None, and the store outlives the process."""

_NEVER_COALESCED = frozenset({method_names.CANCELLED, method_names.PROGRESS})
"""Notifications that belong to one request, where each message counts."""


MAY_BE_ZERO = frozenset({"progress_every", "question_timeout"})
"""Limits that 0 switches off."""


DEFAULT_GRACE = 4
"""Seconds that running calls have at a stop. Docker kills a container 10 seconds after it was told
to stop. Replicas have a delay of 3 seconds before the grace, and calls that ignore their end have 2
seconds after it.
"""


@hinting
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPolicy:
    """The limits that one layer enforces. Durations are in seconds, sizes in bytes.

    Raises:
        ConfigurationError: A number is zero, negative or not finite. ``progress_every`` and
            ``question_timeout`` may be 0.
    """

    idle_timeout: float = 1800
    """A session expires this long after its last request finished and its client left. A client
    is there while it takes what is sent on its GET or listen stream, or while its WebSocket or
    pipe is open and takes what is sent. The true moment may come up to 1 % earlier if the last
    request was short, or a tenth if the process dies: a store is not written each time."""

    max_lifetime: float = 86_400 * 7
    """A session expires this long after it was made, however busy."""

    forget_after: float | None = None
    """Seconds after its last use until a sleeping session expires, if longer than ``idle_timeout``.

    A session sleeps after ``idle_timeout``, and its streams and its log are emptied. The session of
    a conversation sleeps as well, and keeps its log. All expire ``max_lifetime`` and this after
    they were made, however busy. At ``max_sessions`` and ``max_sleeping_bytes``, sleeping sessions
    are ended, the least recently used first. None: 30 days, if the store outlives the process;
    otherwise ``idle_timeout``.
    """

    max_sleeping_bytes: int = 1_073_741_824
    """The most bytes that all sleeping sessions of one store hold, about. Beyond it the least
    recently used are ended, within a tenth of ``idle_timeout``."""

    stateless_lifetime: float = 3_600
    """Without a store: how long a session id can be used, whatever happens."""

    max_sessions: int = 100_000
    """Open sessions of both modes per store."""

    max_sessions_per_principal: int | None = None
    """Open sessions of one principal; None: only ``max_sessions``, but that a principal who has a
    tenth of those gets no more by ``Conversations``. Without authentication everyone is one
    principal."""

    min_evictable_idle_time: float = 60
    """Seconds. A server at its limit of sessions ends unused transport-mode sessions early.

    The limit is ``max_sessions``, or ``max_sessions_per_principal`` without authentication. The
    server ends a session if all of this is so: it has no principal (no authentication), it holds
    nothing (no running request, no open GET stream, no subscription, no session), and it was not
    used for this long. Sessions that were never used for longer go first. A handler's values in
    ``state`` and ``data`` do not prevent it. The client gets 404 and initializes again.

    With ``Conversations``, the server first ends sessions of the principal that needs room, if they
    were not used for this long. Then it ends sleeping transport-mode sessions of any principal.
    This last step always applies.

    For this long after a start, the server keeps a session with an open GET stream: its client
    reconnects. If this is not below ``idle_timeout``, no session is ended early.
    """

    max_client_bytes: int = 65_536
    """The most bytes of a client's description of itself, as JSON.

    It is in ``initialize`` (``capabilities``, ``clientInfo``), and in ``_meta`` of each request of
    2026-07-28. The session keeps the description, to serve the client in another process. A client
    that sends more is refused.
    """

    max_subscriptions: int = 10_000
    """Resources that one session can be subscribed to; without one, a connection."""

    max_uri_bytes: int = 8_192
    """The most bytes of the URI of one subscription."""

    max_subscription_bytes: int = 1_048_576
    """The most bytes of all URIs that one session, or a connection without one, subscribes to."""

    max_data_bytes: int = 1_048_576
    """The most bytes of one session's ``session.data``, as JSON.

    Larger data is not stored, and the handler that edits it gets a ``LimitReached``.
    """

    max_state_bytes: int = 65_536
    """The most bytes of one session's ``session.state`` in the store.

    They are its keys, its values as JSON, and the session's rules to hide and reveal. The copy that
    the client keeps has its own bound (``SessionSecurity.max_token``).
    """

    max_events: int = 1_000
    """Events that one session's replay window keeps."""

    max_bytes: int = 1_048_576
    """Encoded bytes that one replay window keeps; the newest event is always kept."""

    max_age: float = 3_600
    """How long an event can be replayed."""

    request_key_lifetime: float = 3_600
    """How long a request key is known; a client never re-sends an older one."""

    request_key_bytes: int = 1_048_576
    """Keys and kept answers of one session. Answers go first, oldest first; then new keys
    are refused."""

    max_running_requests: int = 1_000
    """Requests of one connection that run, or that wait for a running one.

    Over HTTP they count for one transport-mode session, for one session that a lone POST names, or
    for one principal (without authentication: no limit there). A further request is refused before
    it has any effect.
    """

    max_detached_requests: int = 1_000
    """Requests per process that run on with nobody listening. One more, and of the user or address
    that has most of them, in the session that has most, the oldest is cancelled."""

    max_detached_requests_per_session: int = 100
    """Those of one session, or of the requests of one authenticated principal that belong to none;
    its oldest is cancelled."""

    detached_timeout: float = 900
    """How long one request may run on with nobody listening."""

    max_finished_streams: int = 16
    """Finished response streams of one connection that ``Last-Event-ID`` can still fetch.

    Streams that were sent whole have ``max_bytes`` in sum, unread streams ``max_unread_bytes``. The
    newest stream always stays.
    """

    max_unread_bytes: int = 67_108_864
    """The most bytes of answers that wait for one WebSocket or stdio client beyond its
    ``send_buffer``.

    While ``send_buffer`` is full, the server reads no more from the client. Answers to its earlier
    requests are still queued. An answer that exceeds this bound closes the connection (1013).
    What came of requests and messages that are not whole has as much in one process.
    """

    send_buffer: int = 1_048_576
    """Bytes that wait in memory for one connection's peer to take them."""

    receive_buffer: int = 1_048_576
    """Bytes of notifications of one WebSocket or stdio client that wait for their handlers. When
    it is full nothing more is read for ``slow_timeout``; then notifications are left out until
    a handler ends."""

    slow_timeout: float = 10
    """A peer that takes nothing for this long while its buffer is full is detached."""

    receive_timeout: float = 60
    """Seconds in which a request, header and body, must arrive. Otherwise it is answered 408.

    A peer that takes nothing of its answer for this long is cut. This applies in a process that the
    layer runs itself (``run``, ``mcp-sessions serve``). In other processes, the HTTP server has its
    own limits.
    """

    max_connections: int | None = None
    """Open connections of HTTP and WebSocket in such a process. At the bound one that waits for a
    request is closed for a new one; if none waits, the new one is answered 503. None: what the
    limit of file descriptors allows, but for a few."""

    progress_every: float = 60
    """A call that carries a progress token is sent a progress message this long after the last
    one, while its handler says nothing. 0: only what the handler says is sent."""

    question_timeout: float = 900
    """Seconds that a client of the 2026 era has to answer a question of a handler. After that the
    handler gets a timeout error. 0: such clients are not asked, and the handler gets the SDK's
    error at once. Clients of the handshake era are always asked; the handler sets their time."""

    init_timeout: float = 30
    """Seconds until a WebSocket is closed if its client sends nothing after it opened."""

    max_message: int = 4_194_304
    """Bytes of one message of a client: a request's body over HTTP (a larger one is answered
    413), a message on a WebSocket (a larger one closes it, 1009) or on a pipe (a larger one is
    dropped)."""

    max_answer: int = 4_194_304
    """Bytes of one message of a wrapped command or URL. A larger answer is an error of the
    request that it answers; any other larger message is left out. A server in Python has no such
    limit."""

    max_connections_per_principal: int | None = None
    """Open WebSockets of one principal; None: no limit. Without authentication the principal is
    the client's address."""

    max_requests_per_principal: float | None = None
    """Requests a second of one principal in one process, on average; None: no limit.

    A principal that was quiet may send the requests of ten seconds at once. Without authentication
    the principal is the client's address.
    """

    max_calls_per_principal: int | None = None
    """Requests of one principal in one process that are not answered; None: no limit. Without
    authentication the principal is the client's address."""

    credential_check: float = 60
    """How often the credential of each open stream is checked again: GET, listen and response
    streams of both eras, and WebSockets. Nothing is sent any more once it expired, or so long,
    and at most 10 seconds that the application takes to say so, after it was withdrawn."""

    reconnect_spread: float = 10
    """At shutdown the server asks clients to reconnect within this long (``retryAfter``)."""

    coalescing: Mapping[str, str | None] = field(default_factory=lambda: dict(COALESCED_BY_DEFAULT))
    """Maps a notification that replaces an older one of its kind to a member of ``params``.

    Two notifications with the same member are of one kind. None: the method alone decides.
    """

    def __post_init__(self) -> None:
        for limit in fields(self):
            value: object = getattr(self, limit.name)
            if limit.name == "coalescing" or (value is None and "None" in str(limit.type)):
                continue
            kind = (int, float) if "float" in str(limit.type) else int
            if (
                not isinstance(value, kind)
                or isinstance(value, bool)
                or not math.isfinite(value)
                or not (value > 0 or (value == 0 and limit.name in MAY_BE_ZERO))
            ):
                what = "number (whole)" if kind is int else "number"
                raise ConfigurationError(f"{limit.name} must be a positive {what}, not {value!r}")
        check_fields(self)
        for method in self.coalescing:
            if not method.startswith(method_names.NOTIFICATION) or method in _NEVER_COALESCED:
                raise ConfigurationError(f"{method} cannot be coalesced")


LIMITS = tuple(each.name for each in fields(SessionPolicy) if each.name != "coalescing")
"""Limits that are numbers. Each is an option of ``serve``, with hyphens in its name."""


def how_to_raise(limit: str) -> str:
    if limit.startswith("max_tasks"):
        return f"{limit} in TaskPolicy"
    option = f"--{limit.replace('_', '-')}"
    return f"{limit} in SessionPolicy, or {option}" if limit in LIMITS else option


@hinting
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPolicy:
    """Which calls of tools become tasks, and how long a task is kept. Durations are in seconds.

    A call can become a task only if its client declares the extension
    ``io.modelcontextprotocol/tasks`` with it, but see :attr:`tools`.

    Raises:
        ConfigurationError: A number is negative or not finite, or is zero and is not ``after``; or
            tools are given as a text, or in two of the collections.
    """

    after: float = 2.0
    """A call that runs longer than this becomes a task."""

    always: Collection[str] = ()
    """Tools whose calls become tasks at once."""

    never: Collection[str] = ()
    """Tools whose calls become no tasks."""

    required: Collection[str] = ()
    """Tools that run as tasks only. A client without tasks gets the error -32021."""

    tools: bool = False
    """Whether clients without the extension have tasks, too: a text names the task, and the tools
    ``task_status`` and ``task_cancel`` ask for it."""

    ttl: float = 3_600
    """A task is kept for this long after it ended."""

    poll_interval: float = 1.0
    """Clients are asked to wait this long between two polls."""

    max_time: float = 86_400
    """A task that runs longer than this is cancelled, and fails."""

    max_tasks: int = 20_000
    """Tasks that this process runs or ran and keeps."""

    max_tasks_per_principal: int = 10_000
    """The same of one principal; without authentication, of one address."""

    def __post_init__(self) -> None:
        check_fields(self)
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and limit.name != "after"):
                raise ConfigurationError(f"{limit.name} must be a positive number, not {value!r}")
        twice = {*self.always, *self.required} & {*self.never}
        if twice:
            raise ConfigurationError(f"these tools are tasks always and never: {sorted(twice)}")
