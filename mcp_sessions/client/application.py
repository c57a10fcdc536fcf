"""Hold the application's side: its requests, its listen streams, its open questions, and what it is
notified of.

In the modern era a session has one listen stream; an application may open several. On the wire
there is one, whose filter is what all of them ask together. `Listens` makes the application's of
it, each with its own acknowledgement, its own subscription id and its own part of the events.

Rules that must hold, and that ``tests/client/test_listen_streams.py`` owns:

1. An event reaches each of the application's streams that asked for it, once.
2. A stream that is cut on the wire is not cut for the application.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mcp_sessions import method_names, metrics
from mcp_sessions.client import messages, reports
from mcp_sessions.client.dialer import CONNECTION_CLOSED, Failure, Link
from mcp_sessions.client.reports import ConnectionLost, Loss, OnLost, OnResume, ResumeOutcome
from mcp_sessions.client.requests import PendingRequest, Questions, Requests
from mcp_sessions.client.state import Runtime
from mcp_sessions.core.listen_messages import FLAGS
from mcp_sessions.core.messages import (
    Json,
    RequestId,
    encode,
    entries_of,
    members_of,
    meta_of,
    texts_of,
)
from mcp_sessions.core.named import name_in
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import OUTCOME_UNKNOWN

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_CLOSED = "the transport was closed"
_RUNS = 3
"""Times that a call is sent anew, at most."""

_TOOLS = 1_000
"""Tools that are known to be safe, at most."""


def _no_tools() -> Recent[str, None]:
    return Recent(_TOOLS)


_FLAGS = {method_names.CHANGED[kind]: flag for kind, flag in FLAGS.items()}


def _filter_of(message: Json) -> Json:
    return members_of(members_of(message.get("params")).get("notifications"))


def _uris(wanted: Mapping[str, Any]) -> list[str]:
    return texts_of(wanted.get("resourceSubscriptions"))


def _acknowledgement(request: PendingRequest, honored: Json) -> Json:
    wanted, known = _filter_of(request.message), set(_uris(honored))
    mine: Json = {flag: True for flag in _FLAGS.values() if wanted.get(flag) and honored.get(flag)}
    uris = [uri for uri in _uris(wanted) if uri in known]
    if uris:
        mine["resourceSubscriptions"] = uris
    meta = {messages.SUBSCRIPTION_ID: request.app_id}
    return messages.notification(method_names.ACKNOWLEDGED, {"notifications": mine, "_meta": meta})


@dataclass(slots=True)
class Listens:
    wire_id: str | None = None
    """The id of the one on the wire; None: there is none."""

    _open: dict[RequestId, PendingRequest] = field(default_factory=dict[RequestId, PendingRequest])
    _on_wire: Json = field(default_factory=dict[str, Any])
    _honored: Json | None = None
    _count: int = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, request: PendingRequest) -> None:
        self._open[request.app_id] = request

    def remove(self, app_id: RequestId) -> bool:
        return self._open.pop(app_id, None) is not None

    def has(self, pending: PendingRequest) -> bool:
        return self._open.get(pending.app_id) is pending

    def cut(self) -> None:
        self.wire_id = None

    @property
    def is_answered(self) -> bool:
        return self._honored is not None

    def is_covered(self) -> bool:
        if self.wire_id is None:
            return False
        needed = self._union()
        flags = all(self._on_wire.get(flag) for flag in _FLAGS.values() if needed.get(flag))
        return flags and set(_uris(needed)) <= set(_uris(self._on_wire))

    def next_request(self) -> Json:
        """Build the listen request to send: the application's newest, with all filters."""
        self._count += 1
        self.wire_id = f"mcp-sessions-listen-{self._count}"
        self._on_wire, self._honored = self._union(), None
        newest = list(self._open.values())[-1].message
        params = {**cast("Json", newest.get("params") or {}), "notifications": self._on_wire}
        return {**newest, "id": self.wire_id, "params": params}

    def headers(self) -> Mapping[str, str]:
        return list(self._open.values())[-1].headers

    def _acknowledged(self) -> list[PendingRequest]:
        return [request for request in self._open.values() if request.is_acknowledged]

    def _wanted(self) -> list[Json]:
        return [_filter_of(request.message) for request in self._open.values()]

    def _union(self) -> Json:
        union: Json = {}
        uris: dict[str, None] = {}
        for wanted in self._wanted():
            union.update({flag: True for flag in _FLAGS.values() if wanted.get(flag)})
            uris.update(dict.fromkeys(_uris(wanted)))
        if uris:
            union["resourceSubscriptions"] = list(uris)
        return union

    def acknowledged(self, params: Mapping[str, Any] | None) -> list[Json]:
        self._honored = members_of((params or {}).get("notifications"))
        return self.not_yet_acknowledged()

    def not_yet_acknowledged(self) -> list[Json]:
        """Return the acknowledgements for streams that the open request covers already."""
        honored = self._honored
        if honored is None or not self.is_covered():
            return []
        fresh = [request for request in self._open.values() if not request.is_acknowledged]
        for request in fresh:
            request.is_acknowledged = True
        return [_acknowledgement(request, honored) for request in fresh]

    def largest(self) -> PendingRequest | None:
        """Return the stream to refuse, of those that the application does not know to be open if
        there are any.
        """
        fresh = [each for each in self._open.values() if not each.is_acknowledged]
        return max(
            fresh or self._open.values(), key=lambda each: len(encode(each.message)), default=None
        )

    def is_acknowledgement(self, message: Json) -> bool:
        if message.get("method") != method_names.ACKNOWLEDGED or self.wire_id is None:
            return False
        meta = meta_of(cast("Json | None", message.get("params")))
        return meta.get(messages.SUBSCRIPTION_ID) == self.wire_id

    def parts(self, message: Json) -> list[Json]:
        method = message.get("method")
        flag = _FLAGS.get(cast(str, method))
        uri = cast("Json", message.get("params") or {}).get("uri")
        exact = any(uri in _uris(wanted) for wanted in self._wanted())
        parts: list[Json] = []
        for request in self._acknowledged():
            wanted = _filter_of(request.message)
            if flag is not None:
                wants = bool(wanted.get(flag))
            elif method == method_names.RESOURCE_UPDATED:
                # A resource that no stream names is below one that a stream names. Only the server
                # knows below which.
                wants = uri in _uris(wanted) if exact else bool(_uris(wanted))
            else:
                wants = True
            if wants:
                parts.append(messages.listened(message, request.app_id))
        return parts

    def everything(self) -> list[Json]:
        """Return one change for each filter after a gap, so that all is read again."""
        return [
            messages.listened(change, request.app_id)
            for request in self._acknowledged()
            for change in everything(_filter_of(request.message))
        ]


def everything(wanted: Mapping[str, Any]) -> list[Json]:
    lists = [messages.notification(method) for method, flag in _FLAGS.items() if wanted.get(flag)]
    return lists + [
        messages.notification(method_names.RESOURCE_UPDATED, {"uri": uri}) for uri in _uris(wanted)
    ]


@dataclass(frozen=True, slots=True)
class Callbacks:
    deliver: Callable[[Json], Awaitable[None]]
    """Takes a message."""

    hang_up: Callable[[], Awaitable[None]]
    """Ends its side, as a stock transport does whose connection is gone."""

    on_lost: OnLost | None = None
    on_resume: OnResume | None = None


@dataclass(slots=True, eq=False, repr=False)
class Application:
    _callbacks: Callbacks
    _runtime: Runtime
    hang_up: Callable[[], Awaitable[None]] = field(init=False)
    loss: Loss | None = field(init=False, default=None)
    """Its connection is lost, and ``on_resume`` did not follow so far."""

    requests: Requests = field(init=False, default_factory=Requests)
    questions: Questions = field(init=False, default_factory=Questions)
    listens: Listens = field(init=False, default_factory=Listens)
    _safe_tools: Recent[str, None] = field(init=False, default_factory=_no_tools)
    """Tools that may run again, by the server's lists."""

    protocol_version: str | None = field(init=False, default=None)
    """The version that is spoken with the server. None: it is not known yet."""

    why_ended: str | None = field(init=False, default=None)
    """Why its side was ended, and what to do, if not for the server's end."""

    def __post_init__(self) -> None:
        self.hang_up = self._callbacks.hang_up

    async def deliver(self, message: Json) -> None:
        if message.get("method") == method_names.TOOLS_CHANGED:
            # Until it is listed again, nobody knows whether a tool may run again.
            self._safe_tools.clear()
        await self._callbacks.deliver(message)

    def asks(self, message: Json, headers: Mapping[str, str], *, now: float) -> PendingRequest:
        pending = PendingRequest(message["id"], message, headers, asked_at=now)
        self.requests.add(pending)
        return pending

    async def end(self, why: str) -> None:
        self.why_ended = why
        await self.hang_up()

    async def answer(self, pending: PendingRequest, code: int, text: str, data: Any = None) -> None:
        await self.conclude(pending, messages.error_answer(pending.app_id, code, text, data))

    async def conclude(
        self, pending: PendingRequest, answer: Json, link: Link | None = None
    ) -> None:
        """Give the application an answer.

        Args:
            link: Where it came from; None: it is this client's own.
        """
        if self.requests.done(pending):
            if metrics.measures and pending.method != method_names.LISTEN:
                seconds = self._runtime.clock() - pending.asked_at
                attributes = _measured(pending, answer, link, self.protocol_version)
                metrics.lasted(_DURATION, seconds, attributes)
            self.listens.remove(pending.app_id)
            await self.deliver({**answer, "id": pending.app_id})
            pending.settled.set()

    def learn_tools(self, result: Mapping[str, Any]) -> None:
        for entry in entries_of(result.get("tools")):
            tool = members_of(entry)
            name, hints = tool.get("name"), members_of(tool.get("annotations"))
            if isinstance(name, str):
                self._safe_tools.pop(name, None)
                if hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True:
                    self._safe_tools.keep(name, None)

    def begins_anew(self, pending: PendingRequest) -> bool:
        """Whether a call whose outcome is unknown is sent again, as if it was not sent before. A
        host that manages its sessions decides that by itself.
        """
        if pending.is_hosts or pending.first_sent is None:
            return False
        if not self.may_run_again(pending.message, pending.runs):
            return False
        pending.begin_anew()
        return True

    def may_run_again(self, message: Json, runs: int) -> bool:
        """Whether a message is a call of a tool that allows it.

        Args:
            runs: How often it was sent again already.
        """
        method = str(message.get("method"))
        is_safe = method == method_names.CALL_TOOL and (
            name_in(method, message.get("params")) in self._safe_tools
        )
        if not is_safe or runs >= _RUNS or self._runtime.policy.repeat != "safe":
            return False
        logger.info("the outcome of a call is unknown: it is sent again, since its tool allows it")
        return True

    async def give_up_on(self, pending: PendingRequest, cause: str = "") -> None:
        """Answer what the server will not answer any more.

        Args:
            cause: Why; empty: the loss of the connection.
        """
        lasted = self.loss.lasted(self._runtime.clock()) if self.loss is not None else ""
        if pending.may_have_run:
            cause = cause or pending.cause or lasted or _CLOSED
            text = reports.may_have_run(pending.message, cause)
            await self.answer(pending, OUTCOME_UNKNOWN, text)
        else:
            cause = cause or lasted or pending.cause or _CLOSED
            text = reports.not_sent(pending.message, cause)
            await self.answer(pending, CONNECTION_CLOSED, text)

    async def forget_questions(self) -> None:
        for question_id in self.questions.forget():
            params = {"requestId": question_id, "reason": "the session of the server has ended"}
            await self.deliver(messages.notification(method_names.CANCELLED, params))

    def lost(self, address: str, failure: Failure) -> None:
        """Log that the connection is lost, and call ``on_lost``: once until it is replaced."""
        cause, known = reports.cause_of(failure, address), self.loss
        if known is not None:
            # The cause may change: refused first, then 502.
            self.loss = Loss(cause, known.since)
            return
        self.loss = Loss(cause, self._runtime.clock())
        logger.warning("connection lost: %s", cause)
        if self._callbacks.on_lost is not None:
            # Nothing waits for an async one: it may itself wait for the next connection.
            value = _called("on_lost", self._callbacks.on_lost, ConnectionLost(cause, address))
            if value is not None:
                self._runtime.tasks.start_soon(_finished, "on_lost", value)

    async def report_outcome(self, outcome: ResumeOutcome) -> None:
        loss, self.loss = self.loss, None
        if loss is not None and not outcome.has_ended and outcome.reason != "gave_up":
            seconds = self._runtime.clock() - loss.since
            logger.info("%s: connected again after %.1f s", outcome.connected_to, seconds)
        if self._callbacks.on_resume is not None:
            value = _called("on_resume", self._callbacks.on_resume, outcome)
            if value is not None:
                await _finished("on_resume", value)


_DURATION = "mcp.client.operation.duration"
_NETWORKS = {"http": ("tcp", "http"), "websocket": ("tcp", "websocket"), "stdio": ("pipe", None)}


def _measured(
    pending: PendingRequest, answer: Json, link: Link | None, version: str | None
) -> dict[str, str]:
    """Return the attributes of a duration, as OpenTelemetry's conventions for MCP have them. The
    time of an outage is a part of it.
    """
    method, error = pending.method, members_of(answer.get("error"))
    measured = {"mcp.method.name": method}
    name = name_in(method, pending.message.get("params"))
    if name is not None and method == method_names.CALL_TOOL:
        measured |= {"gen_ai.tool.name": name, "gen_ai.operation.name": "execute_tool"}
    elif name is not None and method == method_names.GET_PROMPT:
        measured["gen_ai.prompt.name"] = name
    if "error" in answer:
        code = str(error.get("code"))
        measured["error.type"] = code
        if link is not None:
            measured["rpc.response.status_code"] = code
    elif members_of(answer.get("result")).get("isError") is True:
        measured["error.type"] = "tool_error"
    transport, protocol = _NETWORKS.get(link.kind, (None, None)) if link else (None, None)
    if version is not None:
        measured["mcp.protocol.version"] = version
    if transport is not None:
        measured["network.transport"] = transport
    if protocol is not None:
        measured["network.protocol.name"] = protocol
    return measured


def _called(
    name: str, function: Callable[[_Value], Awaitable[None] | None], value: _Value
) -> Awaitable[None] | None:
    try:
        result = function(value)
    except Exception:
        # The application's own function: what is wrong with it must not end the session.
        logger.exception("%s raised", name)
        return None
    return result if inspect.isawaitable(result) else None


async def _finished(name: str, value: Awaitable[None]) -> None:
    try:
        await value
    except Exception:
        # See above.
        logger.exception("%s raised", name)
