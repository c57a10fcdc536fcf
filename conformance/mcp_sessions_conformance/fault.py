import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions_conformance.values import Json, as_object


@dataclass(frozen=True)
class Late:
    message: Json


@dataclass(eq=False)
class Talk:
    """One connection of a client: a WebSocket, a pipe, or over HTTP what shares a
    ``Mcp-Session-Id``.
    """

    name: str
    push: Callable[[Json], Awaitable[None]] | None = None
    """Sends to the client; over HTTP there while a GET stream is open."""

    requests: dict[Any, Json] = field(default_factory=dict[Any, Json])
    """The client's requests by id: the newest of each."""

    initialized: bool = False
    sessions: list[str] = field(default_factory=list[str])
    """The sessions that were started, created or resumed here, newest last."""


@dataclass
class Case:
    message: Json
    talk: Talk
    memory: dict[Any, Any]
    """The fault's memory, over all connections."""

    asked: Json | None = None
    """The request that this message answers."""

    talks: dict[str, Talk] = field(default_factory=dict[str, Talk])
    """All connections."""

    answers: list[Json] = field(default_factory=list[Json])
    """Answers for the client that the server never sees."""

    inject: list[Json] = field(default_factory=list[Json])
    """Extra messages for the server; over HTTP only, and their answers are dropped."""


Rewritten = list[Json | Late] | None
Rewrite = Callable[[Case], Rewritten]
"""Returns the messages that replace a message; None: it passes unchanged."""


@dataclass
class Http:
    """The head of an HTTP request and, once it is there, of its response."""

    verb: str
    """``UPGRADE`` for a WebSocket."""

    asked: dict[str, str]
    """The request's headers, in lower case."""

    memory: dict[Any, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """The response's headers, in lower case."""

    answer: tuple[int, Json] | None = None
    """The answer for the client without asking the server."""


@dataclass(frozen=True)
class Fault:
    name: str
    says: str
    """The behaviour of such a server."""

    to_server: Rewrite | None = None
    to_client: Rewrite | None = None
    http: "Callable[[Http], None] | None" = None
    """Changes an HTTP request, or answers it."""

    status: "Callable[[Http], None] | None" = None
    """Changes the head of an HTTP response."""

    statuses: Mapping[int, int] = field(default_factory=dict[int, int])
    """Code of an error → the HTTP status that it comes with."""

    swaps_eras: bool = False
    """JSON-RPC's own errors come with the statuses of the other era."""

    upgrade: Callable[[dict[str, str]], None] | None = None
    """Changes the headers of the response that opens a WebSocket."""

    close: int | None = None
    """The close code that the client gets, whatever the server's is."""

    ignores_cuts: bool = False
    """The server does not notice that a client went away."""

    binary: bool = False
    """Its WebSocket messages are binary."""

    primes: bool = True
    """Its streams begin with a priming event."""

    buffers: bool = False
    """It takes from the server whatever comes, and keeps what its client does not take."""

    when_cut: str = ""
    """``cancel``: what the client asked is cancelled when it goes away. ``silence``: no event
    is sent to anybody any more."""

    raw: Callable[[str], str | None] | None = None
    """Takes a line or a frame as it came; None: it is dropped."""

    limit: int = 16 * 1024 * 1024
    """Bytes of a message that goes through to the server; a longer one is dropped."""


class FaultInjector:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.memory: dict[Any, Any] = {}
        self.talks: dict[str, Talk] = {}
        self.is_silent = False
        self.injected: list[Json] = []
        """Messages that the server still has to get."""

    def talk(self, name: str) -> Talk:
        return self.talks.setdefault(name, Talk(name))

    def outgoing(self, message: Any, talk: Talk) -> tuple[list[Any], list[Json]]:
        if not isinstance(message, dict):
            return [message], []
        body = cast("Json", message)
        if "method" in body and "id" in body:
            talk.requests[_key(body["id"])] = body
            talk.initialized = talk.initialized or body["method"] == "initialize"
        if self.fault.to_server is None:
            return [body], []
        case = Case(json.loads(json.dumps(body)), talk, self.memory, None, self.talks)
        rewritten = self.fault.to_server(case)
        self.injected += case.inject
        return ([body] if rewritten is None else list(rewritten)), case.answers

    def incoming(self, message: Any, talk: Talk, asked: Json | None = None) -> list[Any]:
        if not isinstance(message, dict):
            return [message]
        body = cast("Json", message)
        if "method" not in body and asked is None:
            asked = talk.requests.get(_key(body.get("id")))
        if self.is_silent and "sessionEventId" in (body.get("params") or {}):
            return []
        self._remember(body, talk, asked)
        if self.fault.to_client is None:
            return [body]
        case = Case(json.loads(json.dumps(body)), talk, self.memory, asked, self.talks)
        rewritten = self.fault.to_client(case)
        self.injected += case.inject
        return [body] if rewritten is None else list(rewritten)

    def _remember(self, body: Json, talk: Talk, asked: Json | None) -> None:
        result: Any = body.get("result")
        if asked is None or not isinstance(result, dict):
            return
        found: Any = cast("Json", result).get("sessionId")
        if asked["method"] == "sessions/create":
            found = as_object(cast("Json", result).get("session")).get("sessionId")
        elif asked["method"] == "session/resume":
            found = as_object(asked.get("params")).get("sessionId")
        elif asked["method"] != "session/start":
            return
        if isinstance(found, str):
            talk.sessions.append(found)

    def cut(self) -> None:
        self.memory["cut"] = True
        if self.fault.when_cut == "silence":
            self.is_silent = True


def _key(request_id: Any) -> Any:
    return request_id if isinstance(request_id, (str, int)) else repr(request_id)
