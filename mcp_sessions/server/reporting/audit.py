"""Audit each served request: its principal, its method and name, its session, and its outcome.

The logger ``mcp_sessions.audit`` gets one record for each request, when it is answered. It gets one
more for the start and for the end of each session, and for each request that was refused for its
credential, with ``event.name``.

The audit is off until that logger itself has a level (``setLevel(logging.INFO)``), whatever the
level of its parents. Names are those of OpenTelemetry's semantic conventions where they have one. A
record leaves out the rest of a client's message, the answer, and every id and key. Digests stand
for ids and keys. A digest also stands for a method or a name that the server does not have: it may
be an id (:mod:`mcp_sessions.server.reporting.loggable`).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Protocol

from opentelemetry import propagate, trace

from mcp_sessions import method_names, metrics
from mcp_sessions.authentication.key_file import ISSUER as KEY_ISSUER
from mcp_sessions.core.conversation_keys import ConversationKey
from mcp_sessions.core.ends import SessionEnd
from mcp_sessions.core.message import Message
from mcp_sessions.errors import REQUEST_CANCELLED, NotBegun, StoreUnavailable
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import SessionSecurity
from mcp_sessions.server.reporting.loggable import KnownNames, loggable_method, loggable_name
from mcp_sessions.stores.records import SessionRecord

logger = logging.getLogger("mcp_sessions.audit")

_NAMES = {method_names.CALL_TOOL: "gen_ai.tool.name", method_names.GET_PROMPT: "gen_ai.prompt.name"}
_PROTOCOLS = {"http", "websocket"}
_STARTED, _ENDED = "mcp_sessions.session.started", "mcp_sessions.session.ended"
_DENIED = "mcp_sessions.denied"
_VERSION = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_UNKNOWN = "unknown"
_DURATION = "mcp.server.operation.duration"
_MEASURED = (
    "mcp.method.name",
    "gen_ai.tool.name",
    "gen_ai.prompt.name",
    "error.type",
    "rpc.response.status_code",
    "mcp.protocol.version",
    "network.protocol.name",
    "network.transport",
)
"""Attributes of a duration, as OpenTelemetry's conventions for MCP have them."""


class Audit:
    def __init__(
        self,
        security: SessionSecurity,
        process: str,
        known: KnownNames,
        *,
        names_keys: bool = False,
    ) -> None:
        self.logger, self._names_keys = logger, names_keys
        self.security = security
        self._process = process
        self.known = known

    def begin(
        self,
        message: Message,
        *,
        principal: Principal,
        transport: str,
        client: str | None,
        version: str,
        modern: bool,
        found: Found | None,
    ) -> AuditEntry | None:
        """Begin the record of a request; None: nothing is recorded. While the audit is off, only
        its duration is measured.

        Args:
            transport: ``http``, ``websocket``, ``stdio`` or ``memory``.
            client: The address that it came from; None: it has none.
            version: Of the protocol.
            found: What the stages of its path find; None: it takes no path.
        """
        is_on = self._is_on()
        if not (is_on or metrics.measures):
            return None
        members: dict[str, Any] = {}
        if _VERSION.fullmatch(version):
            members["mcp.protocol.version"] = version
        members["network.transport"] = "tcp" if transport in _PROTOCOLS else "pipe"
        if transport in _PROTOCOLS:
            members["network.protocol.name"] = transport
        name = loggable_name(message.params)
        entry = AuditEntry(self, members, message.method, name=name, is_on=is_on)
        if not is_on:
            return entry
        members["mcp_sessions.era"] = "modern" if modern else "handshake"
        if client is not None:
            members["client.address"] = client
        members |= self._identity(principal)
        entry.follow(found)
        if message.about is not None:
            # Before it is known whether there is one: whoever tries others' ids is seen.
            entry.serve_in(digest(message.about), "session")
        entry.trace(_span_of(message.meta))
        return entry

    def session_started(self, session: str, mode: str, principal: Principal) -> None:
        if not self._is_on():
            return
        members = {"event.name": _STARTED, "mcp_sessions.session": session}
        members["mcp_sessions.session.mode"] = mode
        logger.info("session %s started", session, extra=members | self._identity(principal))

    def session_ended(self, end: SessionEnd, principal: Principal | None) -> None:
        if not self._is_on():
            return
        members: dict[str, Any] = {
            "event.name": _ENDED,
            "mcp_sessions.session": end.session,
            "mcp_sessions.session.mode": end.mode.value if end.mode is not None else None,
            "mcp_sessions.end.reason": end.reason.value,
            "mcp_sessions.end.limit": end.limit,
            "mcp_sessions.session.age": _rounded(end.age),
            "mcp_sessions.session.idle": _rounded(end.idle),
        }
        members = {name: value for name, value in members.items() if value is not None}
        members |= self._identity(principal or ANONYMOUS)
        logger.info("session %s ended: %s", end.session, end, extra=members)

    def denied(self, reason: str, client: str | None, principal: Principal) -> None:
        """Record a request that was refused for its credential.

        Args:
            client: The address that it came from.
            principal: The owner of a credential that is good and too weak; else nobody.
        """
        if not self._is_on():
            return
        members = {"event.name": _DENIED, "error.type": reason, **self._identity(principal)}
        if client is not None:
            members["client.address"] = client
        logger.info("denied: %s", reason, extra=members)

    @staticmethod
    def _is_on() -> bool:
        return logger.level != logging.NOTSET and logger.isEnabledFor(logging.INFO)

    def _identity(self, principal: Principal) -> dict[str, Any]:
        members = {"service.instance.id": self._process}
        if principal != ANONYMOUS:
            identity = (principal.client_id, principal.issuer, principal.subject)
            members["enduser.pseudo.id"] = digest(self.security.pseudonym(*identity))
            if self._names_keys and principal.issuer == KEY_ISSUER and principal.client_id:
                members["enduser.id"] = principal.client_id
        return members


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 3) if seconds is not None else None


class _Origin(Protocol):
    @property
    def conversation(self) -> ConversationKey | None: ...


class Found(Protocol):
    @property
    def inbound(self) -> _Origin: ...

    @property
    def handle(self) -> Any: ...

    @property
    def record(self) -> SessionRecord | None: ...

    @property
    def keyed(self) -> Any:
        """``was_seen``: its request key was known, so that its handler did not run for it. None: it
        has no key.
        """
        ...


class AuditEntry:
    __slots__ = (
        "_audit", "_begun", "_error", "_found", "_is_on", "_is_written", "_members", "_method",
        "_name",
    )  # fmt: skip

    def __init__(
        self,
        audit: Audit,
        members: dict[str, Any],
        method: str,
        *,
        name: str | None,
        is_on: bool,
    ) -> None:
        self._audit, self._is_on = audit, is_on
        self._method = method
        self._name = name
        self._members = members
        self._begun = time.perf_counter()
        self._error: dict[str, str] = {}
        self._found: Found | None = None
        self._is_written = False

    def follow(self, found: Found | None) -> None:
        self._found = found

    def serve_in(
        self, session: str, source: str, conversation: ConversationKey | None = None
    ) -> None:
        self._members["mcp_sessions.session"] = session
        self._members["mcp_sessions.session.source"] = source
        if conversation is not None:
            name = digest(self._audit.security.pseudonym(*conversation))
            self._members["mcp_sessions.conversation"] = name
            self._members["mcp_sessions.conversation.source"] = conversation.source or "principal"

    def connected(self, version: str, session: SessionId | None) -> None:
        self._members["mcp.protocol.version"] = version
        if session is not None:
            self.serve_in(digest(session), "connection")

    def trace(self, span: trace.Span) -> None:
        context = span.get_span_context()
        if context.is_valid:
            self._members["trace_id"] = trace.format_trace_id(context.trace_id)

    def is_result(self, result: Mapping[str, Any]) -> None:
        self._error = {"error.type": "tool_error"} if result.get("isError") is True else {}
        if not self._error:
            self._audit.known.served(self._method, self._name, result)
        if self._method in (method_names.START_SESSION, method_names.CREATE_SESSION):
            made: Any = result.get("session", result)
            self.serve_in(digest(SessionId(made["sessionId"])), "session")

    def is_error(self, error: Mapping[str, Any]) -> None:
        code = str(error.get("code"))
        self._error = {"error.type": code, "rpc.response.status_code": code}

    def failed(self, failure: BaseException) -> None:
        """Note that the request gets no answer, or none from this process."""
        # When the store failed is nothing that an operator counts.
        kind = StoreUnavailable if isinstance(failure, NotBegun) else type(failure)
        self._error = {"error.type": kind.__name__}
        # After a cancellation the client has left.
        self.write(is_awaited=isinstance(failure, Exception))

    def write(self, *, is_awaited: bool) -> None:
        if self._is_written:
            return
        self._is_written = True
        # Each knows the other: both would wait for the collector.
        found, self._found = self._found, None
        self._look(found)
        outcome = _outcome(self._error, is_awaited=is_awaited)
        seconds = time.perf_counter() - self._begun
        what = self._what()
        if metrics.measures:
            self._measured(seconds, what)
        if not self._is_on:
            return
        members = {
            **what,
            **self._members,
            "mcp_sessions.outcome": outcome,
            **self._error,
            _DURATION: round(seconds, 6),
        }
        method = members["mcp.method.name"]
        logger.info("%s %s %.0f ms", method, outcome, seconds * 1000, extra=members)

    def _measured(self, seconds: float, what: Mapping[str, Any]) -> None:
        said = {**what, **self._members, **self._error}
        measured = {name: str(said[name]) for name in _MEASURED if name in said}
        if loggable_method(self._method) != self._method:
            # What a server serves beside the protocol may be anything.
            measured["mcp.method.name"] = _UNKNOWN
        if self._method == method_names.CALL_TOOL:
            measured["gen_ai.operation.name"] = "execute_tool"
        metrics.lasted(_DURATION, seconds, measured)

    def _look(self, found: Found | None) -> None:
        if found is None:
            return
        if found.handle is not None:
            self.serve_in(found.handle.digest, found.handle.source, found.inbound.conversation)
        elif found.record is not None:
            self.serve_in(digest(found.record.session_id), "session")
        if found.keyed is not None and found.keyed.was_seen:
            self._members["mcp_sessions.request_key.seen"] = True

    def _what(self) -> dict[str, Any]:
        """Method and name, or the digest of what the server does not have."""
        known, method = self._audit.known, self._method
        if known.method(method) is None:
            unknown = digest(self._audit.security.pseudonym(method))
            return {"mcp.method.name": _UNKNOWN, "mcp_sessions.unknown": unknown}
        members = {"mcp.method.name": method}
        if self._name is not None and method in _NAMES:
            name = known.name(method, self._name)
            if name is None:
                members["mcp_sessions.unknown"] = digest(self._audit.security.pseudonym(self._name))
            else:
                members[_NAMES[method]] = name
        return members


def _outcome(error: Mapping[str, str], *, is_awaited: bool) -> str:
    if not is_awaited:
        return "cut"
    match error.get("error.type"):
        case None:
            return "ok"
        case "tool_error":
            return "tool_error"
        case code:
            return "cancelled" if code == str(REQUEST_CANCELLED) else "error"


def _span_of(meta: Mapping[str, Any]) -> trace.Span:
    """Return the span that a request names as its parent; otherwise the current one."""
    try:
        return trace.get_current_span(propagate.extract(meta))
    except (TypeError, ValueError):
        # The carrier is its sender's.
        return trace.INVALID_SPAN
