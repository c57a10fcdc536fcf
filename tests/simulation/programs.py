"""Wrapped servers outside of the layer's process: a command, and a URL.

Both are `Program`: servers of the era of handshakes in plain JSON-RPC. A command has one for each
of its processes, which dies alone or with its replica. A URL has one for each of its sessions,
and lives as long as the run.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import httpx2

from mcp_sessions import HTTPServer, StdioServer
from mcp_sessions.core.messages import members_of
from mcp_sessions.external_server import Per
from mcp_sessions.server.upstream.external import command, url
from mcp_sessions.server.upstream.external.output import Output
from tests.simulation.history import History
from tests.simulation.scheduler import Host, current_host
from tests.simulation.servers import SCHEMA, Failed, Made, Means, Work

Json = dict[str, Any]

WAY: Final = 0.001
"""Seconds that a message takes between the layer and a server."""

TOLD: Final = "notifications/told"
"""A notification of a client to the server."""

Say = Callable[[Json, object], None]
"""Sends a message. The second argument is the id of the request that it is about."""


class Program:
    """One server.

    Args:
        say: Sends its messages.
        number: Of the process of a command.
        is_shared: All sessions of a replica have it.
    """

    def __init__(
        self,
        history: History,
        say: Say,
        number: int | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.say, self.number, self.is_shared = say, number, is_shared
        self.subscribed: set[str] = set()
        self.spreads: set[object] = set()
        """Requests whose answers it writes on several lines."""

        self._history = history
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Future[Json]] = {}
        self._running: dict[object, asyncio.Task[None]] = {}

    def take(self, message: Json) -> None:
        """Take a message of the layer's."""
        method, params = message.get("method"), members_of(message.get("params"))
        if method is None:
            waiting = self._waiting.pop(str(message.get("id")), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif "id" in message:
            task = asyncio.create_task(self._serve(message))
            self._running[message["id"]] = task
            task.add_done_callback(lambda _: self._running.pop(message["id"], None))
        elif method == "notifications/cancelled":
            running = self._running.get(params.get("requestId"))
            if running is not None:
                running.cancel()
        elif method == TOLD:
            self._history.add("hears_of", call=params["mark"], n=params["n"])

    def end(self) -> None:
        """Take no further step."""
        for task in [*self._tasks, *self._running.values()]:
            task.cancel()

    async def ask(self, question: str, about: object) -> str:
        """The answer of a client.

        Raises:
            Failed: It refused, or the layer did.
        """
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[question] = future
        params = {"message": question, "requestedSchema": SCHEMA}
        self.say({"id": question, "method": "elicitation/create", "params": params}, about)
        answer = await future
        if "error" in answer:
            raise Failed("refused")
        return str(members_of(answer["result"].get("content")).get("answer"))

    async def _serve(self, message: Json) -> None:
        request_id = message["id"]
        try:
            answer: Json = {"result": await self._result(message)}
        except Failed as failed:
            code, text = _ERRORS[str(failed)]
            answer = {"error": {"code": code, "message": text}}
        self.say({"id": request_id, **answer}, request_id)

    async def _result(self, message: Json) -> Json:
        params: Json = message.get("params") or {}
        match message["method"]:
            case "initialize":
                return _INITIALIZED
            case "tools/list":
                return {"tools": [{"name": "work", "inputSchema": SCHEMA}]}
            case "resources/list":
                return {"resources": []}
            case "resources/subscribe":
                self.subscribed.add(params["uri"])
                return {}
            case "resources/unsubscribe":
                self.subscribed.discard(params["uri"])
                return {}
            case "tools/call":
                arguments: Json = params["arguments"]
                meta: Json = params.get("_meta") or {}
                means = ProgramMeans(self, message["id"], meta.get("progressToken"))
                work = Work(self._history, arguments["mark"], means, self._tasks)
                text = await work.run(arguments["script"])
                return {"content": [{"type": "text", "text": text}]}
            case "ping" | "logging/setLevel":
                return {}
            case _:
                raise Failed("unknown")


_INITIALIZED: Final[Json] = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}, "logging": {}, "resources": {"subscribe": True}},
    "serverInfo": {"name": "program", "version": "1"},
}

_ERRORS: Final[dict[str, tuple[int, str]]] = {
    "fail": (-32000, "it failed"),
    # What an SDK says of a result that a handler returned after its work.
    "invalid": (-32603, "Handler returned an invalid result"),
    "unknown": (-32601, "Method not found"),
    "status": (-32000, "it failed"),
}


class ProgramMeans(Means):
    """Of one call of a program."""

    names_calls = False

    def __init__(self, program: Program, request_id: object, token: object) -> None:
        self._program = program
        self.process = program.number if not program.is_shared else None
        self.has_one_session = not program.is_shared
        self._request_id = request_id
        self._token = token

    async def send(self, kind: str, mark: str, n: int) -> None:
        if kind == "progress":
            params: Json = {"progressToken": self._token, "progress": n}
            self._say("notifications/progress", params)
        elif kind == "log":
            self._say("notifications/message", {"level": "info", "data": {"mark": mark, "n": n}})

    async def ask(self, question: str) -> str:
        return await self._program.ask(question, self._request_id)

    async def change(self, uri: str) -> bool:
        if uri in self._program.subscribed:
            self._say("notifications/resources/updated", {"uri": uri})
        return False

    def prints(self, how: str) -> None:
        if how == "spread":
            self._program.spreads.add(self._request_id)
        else:
            self._program.say({}, None)

    def _say(self, method: str, params: Json) -> None:
        self._program.say({"method": method, "params": params}, self._request_id)


# --- a command ------------------------------------------------------------------------------------


class Process:
    """One process of a command, as `command` knows a ``ChildProcess``."""

    untaken = 0
    is_direct = is_full = False

    def __init__(
        self, history: History, label: Any, host: Host, number: int, *, is_shared: bool
    ) -> None:
        self.label = label
        self.output = Output()
        self.host = host
        self._replica = current_host() or Host("whoever started it")
        self._program = Program(history, self._say, number, is_shared=is_shared)
        self._input: deque[bytes] = deque()
        self._unread: deque[bytes] = deque()

    def write(self, line: bytes) -> None:
        self._input.append(line)
        self.host.enters(asyncio.get_running_loop().call_later, WAY, self._take)

    def _take(self) -> None:
        self._program.take(json.loads(self._input.popleft()))

    def _say(self, message: Json, about: object) -> None:
        is_spread = "method" not in message and about in self._program.spreads
        line = json.dumps({"jsonrpc": "2.0", **message}, indent=1 if is_spread else None)
        self._unread.append((line if message else "ready: 1 tool {").encode() + b"\n")
        self._replica.enters(asyncio.get_running_loop().call_later, WAY, self._feed)

    def _feed(self) -> None:
        self.output.feed(self._unread.popleft())

    async def room(self) -> None:
        """See ``ChildProcess``: there is always some."""

    async def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        """End it; its replica reads that its output ends."""
        if not self.host.is_dead:
            self.host.kill()
            self._replica.enters(asyncio.get_running_loop().call_later, WAY, self.output.end)

    async def last_words(self) -> str:
        return "it ended"


class Command:
    """A command: each replica starts processes of its own."""

    per: Per = "session"

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def make(self, history: History, host: Host) -> Made:
        return Made(StdioServer("true", per=self.per))

    def start(self, history: History, label: Any) -> Process:
        """Start a process for the replica that runs now."""
        number = len(self.processes) + 1
        is_shared = self.per == "shared"
        process = Process(history, label, Host("a process"), number, is_shared=is_shared)
        self.processes.append(process)
        replica = current_host()
        if replica is not None:
            # The guard of its replica kills it.
            replica.at_death[process] = process.kill
        return process

    def child_dies(self) -> None:
        for process in reversed(self.processes):
            if not process.host.is_dead:
                process.kill()
                return

    @contextmanager
    def installed(self, history: History) -> Generator[None]:
        """Until the block ends, the layer starts no real process."""
        start = partial(self.start, history)
        before = command.Processes
        setattr(command, "Processes", lambda: _Processes(start))  # noqa: B010
        try:
            yield
        finally:
            setattr(command, "Processes", before)  # noqa: B010


class SharedCommand(Command):
    """All sessions of a replica have one process of it."""

    per = "shared"


class _Processes:
    """As `command` knows ``Processes``."""

    def __init__(self, start: Callable[[Any], Process]) -> None:
        self._start = start

    async def start(self, server: Any, label: Any, env: Any, cwd: Any) -> Process:
        await asyncio.sleep(WAY)
        return self._start(label)

    async def close(self) -> None: ...


# --- a URL ----------------------------------------------------------------------------------------


class Url:
    """A server at a URL, for all replicas."""

    def __init__(self) -> None:
        self.host = Host("a URL")
        self.sessions: dict[str, _UrlSession] = {}
        self._count = 0

    def make(self, history: History, host: Host) -> Made:
        return Made(HTTPServer("http://url.example/mcp"))

    def child_dies(self) -> None:
        """It starts anew, and knows no session any more."""
        for session in self.sessions.values():
            session.end()
        self.sessions.clear()

    @contextmanager
    def installed(self, history: History) -> Generator[None]:
        """Until the block ends, the layer's requests to URLs come here."""
        self._history = history
        before = url.httpx2
        client = partial(_client, self)
        ours = SimpleNamespace(
            AsyncClient=client, create_ssl_context=lambda: None, Limits=before.Limits,
            Auth=before.Auth, TimeoutException=before.TimeoutException,
        )  # fmt: skip
        setattr(url, "httpx2", ours)  # noqa: B010
        try:
            yield
        finally:
            setattr(url, "httpx2", before)  # noqa: B010

    async def serve(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request of a replica's."""
        await asyncio.sleep(WAY)
        session_id = request.headers.get("mcp-session-id")
        if session_id is not None and session_id not in self.sessions:
            return _response(request, 404)
        if request.method == "DELETE":
            self.sessions.pop(session_id or "").end()
            return _response(request, 200)
        if request.method == "GET":
            assert session_id is not None
            return self.sessions[session_id].own_stream(request)
        message = json.loads(await request.aread())
        if session_id is None:
            if message.get("method") != "initialize":
                return _response(request, 400)
            self._count += 1
            session_id = f"url-{self._count}"
            self.sessions[session_id] = _UrlSession(self._history, self.host)
        return await self.sessions[session_id].post(request, message, session_id)


class _UrlSession:
    def __init__(self, history: History, host: Host) -> None:
        self._host = host
        self._program = Program(history, self._say)
        self._responses: dict[object, _Events] = {}
        self._own: _Events | None = None

    async def post(
        self, request: httpx2.Request, message: Json, session_id: str
    ) -> httpx2.Response:
        headers = {"mcp-session-id": session_id}
        if "method" not in message or "id" not in message:
            self._host.enters(self._program.take, message)
            return _response(request, 202, headers)
        events = self._responses[message["id"]] = _Events()
        self._host.enters(self._program.take, message)
        status = _status_of(message)
        if status is not None:
            await events.whole()
            return _response(request, status, headers, content=_REFUSAL)
        return _response(request, 200, headers, events)

    def own_stream(self, request: httpx2.Request) -> httpx2.Response:
        if self._own is not None:
            self._own.end()
        self._own = _Events()
        return _response(request, 200, None, self._own)

    def _say(self, message: Json, about: object) -> None:
        """On the response of the request while it is open, else on the session's own stream."""
        response = self._responses.get(about)
        if response is None:
            response = self._own
        if response is not None:
            response.put({"jsonrpc": "2.0", **message})
        if "method" not in message:
            answered = self._responses.pop(about, None)
            if answered is not None:
                answered.end()

    def end(self) -> None:
        """It is forgotten, and its connections break."""
        self._program.end()
        for events in [*self._responses.values(), self._own]:
            if events is not None:
                events.end()


class _Events(httpx2.AsyncByteStream):
    """A response of server-sent events, as it is written."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, message: Json) -> None:
        data = json.dumps(message)
        self._queue.put_nowait(f"event: message\ndata: {data}\n\n".encode())

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def whole(self) -> None:
        """Return once it has ended; nobody reads it."""
        while await self._queue.get() is not None:
            pass

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        while (chunk := await self._queue.get()) is not None:
            await asyncio.sleep(WAY)
            yield chunk


class _Transport(httpx2.AsyncBaseTransport):
    def __init__(self, url: Url) -> None:
        self._url = url

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._url.serve(request)


_REFUSAL: Final = b"bad session state: the protocol version of the record is old"
"""What a handler may say that ran, in words that could be about a session."""


def _status_of(message: Json) -> int | None:
    """The status that the script of a call asks for."""
    script: list[str] = members_of(members_of(message.get("params")).get("arguments")).get(
        "script", []
    )
    statuses = [step.partition(":")[2] for step in script if step.startswith("status:")]
    return int(statuses[0]) if statuses else None


def _client(url: Url, *, cookies: Any, **_: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=_Transport(url), cookies=cookies, trust_env=False)


def _response(
    request: httpx2.Request,
    status: int,
    headers: dict[str, str] | None = None,
    events: _Events | None = None,
    *,
    content: bytes = b"",
) -> httpx2.Response:
    members: Json = {"headers": dict(headers or {}), "request": request}
    if content:
        members["content"] = content
    if events is not None:
        members["headers"]["content-type"] = "text/event-stream"
        members["stream"] = events
    return httpx2.Response(status, **members)
