"""One named connection of a vector, on whatever transport: what it sent, and what came.

A peer does nothing by itself: what the server sends is kept, in order, until a step of the
vector looks at it. Every wait is bounded, and so is what is kept: a server that floods, hangs,
closes or sends garbage makes a `Failure`, and nothing else.
"""

import asyncio
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from mcp_sessions_conformance.transcript import Transcript
from mcp_sessions_conformance.values import SESSION, Json

T = TypeVar("T")

Era = Literal["handshake", "modern"]
Transport = Literal["http", "websocket", "stdio"]

HANDSHAKE_VERSION = "2025-11-25"
MODERN_VERSION = "2026-07-28"
SMALL_BUFFER = (socket.SOL_SOCKET, socket.SO_RCVBUF, 262_144)
"""A socket option. Otherwise the system may buffer tens of megabytes for a peer that takes nothing,
and its server cannot tell.
"""

CLIENT_INFO = {"name": "mcp-sessions-conformance", "version": "1"}


class Failure(Exception):
    """The peer did something else than the vector expects. The text is one sentence."""


class OtherError(Failure):
    """An error came where one was expected, and it is another one."""


@dataclass(frozen=True)
class Limits:
    wait: float = 5.0
    """Seconds that anything expected may take."""

    start: float = 15.0
    """Seconds that a program may take until its first answer."""

    end: float = 3.0
    """Seconds that a program may take to end by itself."""

    at_once: int = 1
    """Vectors that one way plays at the same time, if no other one hears of what they do."""

    quiet: float = 0.15
    """Seconds in which nothing may come where nothing is expected."""

    max_messages: int = 20_000
    """Messages that one connection may receive."""

    max_bytes: int = 64 * 1024 * 1024
    """Bytes that one connection may receive."""

    give_up: int = 12
    """Vectors in a row that fail because the server says nothing: then the rest of that way is
    not played. 0: every vector is played, however long that takes."""


@dataclass(eq=False)
class Arrival:
    message: Json
    stream: str
    """The stream of arrival: ``socket``, or over HTTP ``get`` or the name of one response."""

    sse_id: str | None = None
    used: bool = False
    """A step has looked at it."""

    @property
    def is_response(self) -> bool:
        return "method" not in self.message

    @property
    def event_of(self) -> str | None:
        params = self.message.get("params")
        if self.is_response or "id" in self.message or not isinstance(params, dict):
            return None
        members = cast("Json", params)
        meta = members.get("_meta")
        named: Any = cast("Json", meta).get(SESSION) if isinstance(meta, dict) else None
        if "sessionEventId" not in members or not isinstance(named, dict):
            return None
        found = cast("Json", named).get("sessionId")
        return found if isinstance(found, str) else None


@dataclass(eq=False)
class Sent:
    id: Any
    method: str
    stream: str = field(init=False, default="socket")
    """The stream of its answer, unless it is resumed on another stream."""

    status: int | None = field(init=False, default=None)
    """The HTTP status, once it is known."""

    headers: Mapping[str, str] = field(init=False, default_factory=dict[str, str])
    """The HTTP response's headers."""

    ended: str = field(init=False, default="")
    """How the way back ended; empty while an answer may come."""

    body: str = field(init=False, default="")
    """The beginning of a response that is no JSON-RPC message."""

    is_primed: bool | None = field(init=False, default=None)
    """Whether the first SSE event that had an id was without data; None: none had one."""

    first_id: str | None = field(init=False, default=None)
    """The first SSE id."""

    message: Json = field(default_factory=dict[str, Any])
    """It, as it was sent; empty for what is no request."""

    task: "asyncio.Task[None] | None" = field(init=False, default=None)


class Peer(ABC):
    transport: Transport

    def __init__(self, name: str, era: Era, *, transcript: Transcript, limits: Limits) -> None:
        self.name = name
        self.era: Era = era
        self.transcript = transcript
        self.limits = limits
        self.capabilities: Json = {}
        self.arrivals: list[Arrival] = []
        self.sent: list[Sent] = []
        self.problems: list[str] = []
        """Faults of the server that are not allowed in any vector."""

        self.listens: dict[str, Sent] = {}
        """Session → the open ``subscriptions/listen`` of it."""

        self.ended = ""
        """How the connection ended; empty while it is open."""

        self.has_received = False
        """Something came, of whatever kind."""

        self.close_code: int | None = None
        self.accepted: Mapping[str, str] = {}
        """Headers of the response that opened it."""

        self.first_id = 0
        """Answers to requests with a lower id belong to an earlier vector."""

        self.next_id = 0
        self._bytes = 0
        self._changed = asyncio.Event()
        self.takes = asyncio.Event()
        """Cleared: nothing more of what carries events is read."""

        self.takes.set()

    # --- the port --------------------------------------------------------------------------

    @abstractmethod
    async def post(self, message: Any, sent: Sent | None, headers: Mapping[str, str]) -> None:
        """Send one message; headers are for HTTP.

        Raises:
            Failure: It cannot be sent.
        """

    @abstractmethod
    async def cut(self, what: str) -> None:
        """Break the connection, or a part of it, without a message; see the schema."""

    @abstractmethod
    async def close(self) -> None:
        """Leave in order. It never raises."""

    # --- sending ---------------------------------------------------------------------------

    def enveloped(self, params: Json | None, meta: Json) -> Json | None:
        given = cast("Json", (params or {}).get("_meta") or {})
        merged = {**given, **meta}
        if self.era == "modern":
            merged = {
                "io.modelcontextprotocol/protocolVersion": MODERN_VERSION,
                "io.modelcontextprotocol/clientInfo": CLIENT_INFO,
                "io.modelcontextprotocol/clientCapabilities": self.capabilities,
                **merged,
            }
        if merged:
            return {**(params or {}), "_meta": merged}
        return params

    async def request(
        self,
        method: str,
        params: Json | None = None,
        *,
        meta: Json | None = None,
        request_id: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Sent:
        if request_id is None:
            request_id = self.next_id
            self.next_id += 1
        message: Json = {"jsonrpc": "2.0", "id": request_id, "method": method}
        members = self.enveloped(params, meta or {})
        if members is not None:
            message["params"] = members
        sent = Sent(request_id, method, message=message)
        self.sent.append(sent)
        self.transcript.note(self.name, "->", json.dumps(message))
        await self.post(message, sent, headers or {})
        return sent

    async def notify(
        self, method: str, params: Json | None = None, *, meta: Json | None = None
    ) -> None:
        message: Json = {"jsonrpc": "2.0", "method": method}
        members = self.enveloped(params, meta or {}) if meta or params is not None else None
        if members is not None:
            message["params"] = members
        self.transcript.note(self.name, "->", json.dumps(message))
        await self.post(message, None, {})

    async def respond(self, request: Json, answer: Json) -> None:
        message = {"jsonrpc": "2.0", "id": request.get("id"), **answer}
        self.transcript.note(self.name, "->", json.dumps(message))
        await self.post(message, None, {})

    # --- what came -------------------------------------------------------------------------

    def took(self, text: str | bytes, stream: str, sse_id: str | None = None) -> None:
        self.has_received = True
        self._bytes += len(text)
        if len(self.arrivals) >= self.limits.max_messages or self._bytes > self.limits.max_bytes:
            raise Failure(
                f"the server floods: {len(self.arrivals)} messages, {self._bytes} bytes on "
                f"connection {self.name}"
            )
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        self.transcript.note(self.name, "<-", shown)
        try:
            message: Any = json.loads(text)
        except (ValueError, RecursionError):
            self.problem(f"what came is no JSON: {shown[:200]!r}")
            return
        if not isinstance(message, dict) or cast("Json", message).get("jsonrpc") != "2.0":
            self.problem(f"what came is no JSON-RPC message: {shown[:200]!r}")
            return
        arrival = Arrival(cast("Json", message), stream, sse_id)
        if arrival.is_response:
            self._check_response(arrival)
        self.arrivals.append(arrival)
        self.announce()

    def _check_response(self, arrival: Arrival) -> None:
        message = arrival.message
        if "result" not in message and "error" not in message:
            self.problem(f"a message is neither request nor response: {message!r:.200}")
        request_id = message.get("id")
        if request_id is None or (isinstance(request_id, int) and request_id < self.first_id):
            return
        asked = sum(sent.id == request_id for sent in self.sent)
        answered = sum(a.is_response and a.message.get("id") == request_id for a in self.arrivals)
        if not asked:
            self.problem(f"an answer to a request that was never sent: id {request_id!r}")
        elif answered >= asked:
            self.problem(f"request {request_id!r} was answered more than once")

    def problem(self, sentence: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(sentence)
        self.announce()

    def announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def ended_by(self, how: str) -> None:
        if not self.ended:
            self.ended = how
            self.transcript.note(self.name, "--", f"ended: {how}")
        for sent in self.sent:
            sent.ended = sent.ended or how
        self.announce()

    async def until(
        self, look: Callable[[], T | None], what: Callable[[], str], within: float | None = None
    ) -> T:
        """Wait until ``look()`` finds something, and return it.

        Raises:
            Failure: It found nothing in time, or a problem came up first.
        """
        seconds = self.limits.wait if within is None else within
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            changed = self._changed
            found = look()
            if found is not None:
                return found
            if self.problems:
                raise Failure(self.problems[0])
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise Failure(f"{what()} did not come within {seconds:g} s")
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    def response_to(self, sent: Sent) -> Arrival | None:
        like_it = [other for other in self.sent if other.id == sent.id]
        found = [a for a in self.arrivals if a.is_response and a.message.get("id") == sent.id]
        own = [arrival for arrival in found if arrival.stream == sent.stream]
        if sent.stream != "socket" and (own or len(like_it) > 1):
            return own[0] if own else None
        position = like_it.index(sent)
        return found[position] if position < len(found) else None

    async def answer(self, sent: Sent, within: float | None = None) -> Arrival:
        def look() -> Arrival | None:
            found = self.response_to(sent)
            if found is None and sent.ended:
                body = f": {sent.body!r}" if sent.body else ""
                status = f" (HTTP {sent.status})" if sent.status is not None else ""
                raise Failure(f"no answer to {sent.method}: {sent.ended}{status}{body}")
            return found

        return await self.until(look, lambda: f"the answer to {sent.method}", within)

    async def fence(self) -> None:
        """Return when everything that the server sent before now has come, as far as that can be
        known.
        """
        await asyncio.sleep(self.limits.quiet)
