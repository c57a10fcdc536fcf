"""A raw client: HTTP requests as bytes, responses as they come, nothing done for the test.

A `Reply` is one response, as far as it has come. It is fed by one of two carriers:

* `AsgiCarrier` calls the ASGI app in the test's own event loop. The test says when the peer
  takes nothing (`Reply.stall`) and when it is gone (`Reply.leave`).
* `SocketCarrier` opens one TCP connection per request; `Reply.stall` stops reading, and
  `Reply.leave` resets the connection.

`RawClient` speaks the handshake era over either: it numbers its requests from 0, as stock
clients do, and keeps the ``Mcp-Session-Id`` it was given.
"""

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import anyio
from starlette.types import ASGIApp
from starlette.types import Message as AsgiMessage

from tests.support.board import Board

SESSION = "io.modelcontextprotocol/session"
KEY = "io.github.mcp-sessions/requestKey"
EXTENSION = "io.github.mcp-sessions/sessions"
UPDATED = "notifications/resources/updated"

NEWEST = "2025-11-25"
VERSIONS = ("2025-03-26", "2025-06-18", "2025-11-25")

Json = dict[str, Any]


@dataclass(frozen=True)
class SseEvent:
    """One server-sent event: its fields, and the JSON in its data, if there is data."""

    fields: dict[str, str]
    message: Json | None

    @property
    def id(self) -> str:
        return self.fields["id"]


class Reply:
    def __init__(self, described: str) -> None:
        self.status: int | None = None
        self.headers: list[tuple[str, str]] = []
        """Names in lower case."""
        self.body = bytearray()
        self.ended = False
        """The response has ended, whoever ended it."""
        self.is_whole = False
        """The server ended it, if its carrier can tell."""
        self.error: BaseException | None = None
        """What the app raised."""
        self.stall: Callable[[], None] = _not_yet
        self.unstall: Callable[[], None] = _not_yet
        self.leave: Callable[[], None] = _not_yet
        """The client goes away."""
        self._described = described
        self.board = Board()
        self._parsed = 0
        self._events: list[SseEvent] = []
        self._answers: dict[object, Json] = {}
        """Those of a stream by id, the first of each: a look costs the same after many events."""

        self._comments: list[str] = []

    # --- for carriers --------------------------------------------------------------------

    def begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status, self.headers = status, headers
        self.board.announce()

    def feed(self, chunk: bytes) -> None:
        """A piece of the body came."""
        if self.is_sse:
            # The SDK ends its lines so, and whole events at a time.
            chunk = chunk.replace(b"\r\n", b"\n")
        self.body += chunk
        self.board.announce()

    def end(self) -> None:
        self.ended = True
        self.board.announce()

    # --- for tests -----------------------------------------------------------------------

    def header(self, name: str) -> str | None:
        return next((v for n, v in self.headers if n == name), None)

    @property
    def is_sse(self) -> bool:
        return (self.header("content-type") or "").startswith("text/event-stream")

    @property
    def events(self) -> list[SseEvent]:
        end = self.body.rfind(b"\n\n")
        if end >= self._parsed:
            for block in self.body[self._parsed : end].decode().split("\n\n"):
                self._parse(block)
            self._parsed = end + 2
        return self._events

    def _parse(self, block: str) -> None:
        fields: dict[str, str] = {}
        for line in block.split("\n"):
            if line.startswith(":"):
                self._comments.append(line)
                continue
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        if fields:
            message = json.loads(fields["data"]) if fields.get("data") else None
            self._events.append(SseEvent(fields, message))
            if isinstance(message, dict) and "method" not in message:
                self._keep(cast("Json", message))

    def _keep(self, answer: Json) -> None:
        about: object = answer.get("id")
        if isinstance(about, str | int | float):
            self._answers.setdefault(about, answer)

    @property
    def comments(self) -> list[str]:
        _ = self.events
        return self._comments

    @property
    def messages(self) -> list[Json]:
        """The JSON-RPC messages so far: of the stream, or the one in a JSON body."""
        if self.is_sse:
            return [event.message for event in self.events if event.message is not None]
        return [self.json] if self.ended and self.body else []

    @property
    def json(self) -> Json:
        return cast("Json", json.loads(bytes(self.body)))

    async def until(
        self, look: Callable[[], bool], what: str = "it", *, within: float = 20.0
    ) -> Self:
        """This reply, once ``look()`` holds.

        Raises:
            AssertionError: It does not, within ``within`` seconds.
        """
        await self.board.until(look, what=lambda: f"{what}; there is {self!s:.3000}", within=within)
        return self

    async def started(self) -> Self:
        return await self.until(lambda: self.status is not None or self.ended, "headers")

    async def done(self) -> Self:
        return await self.until(lambda: self.ended, "the end")

    async def gone(self) -> Self:
        """The client goes away; return when the server has noticed."""
        self.leave()
        return await self.done()

    async def has(self, count: int) -> list[Json]:
        """The messages, once there are at least ``count``."""
        await self.until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages

    async def event(self, number: int) -> SseEvent:
        await self.until(lambda: len(self.events) > number, f"event {number}")
        return self.events[number]

    def answer_to(self, request_id: str | int) -> Json | None:
        if self.is_sse:
            _ = self.events
            return self._answers.get(request_id)
        is_it = self.ended and self.body and "method" not in self.json
        return self.json if is_it and self.json.get("id") == request_id else None

    async def answer(self, request_id: str | int) -> Json:
        """The response to that request, once it is here."""
        await self.until(
            lambda: self.answer_to(request_id) is not None or self.ended,
            f"the answer to {request_id!r}",
        )
        found = self.answer_to(request_id)
        assert found is not None, f"ended without an answer to {request_id!r}: {self}"
        return found

    def __str__(self) -> str:
        state = "ended" if self.ended else "open"
        raised = f", raised {self.error!r}" if self.error is not None else ""
        body = bytes(self.body[-2_000:])
        return f"{self._described} -> {self.status} {dict(self.headers)} ({state}{raised}) {body!r}"


def _not_yet() -> None:
    raise AssertionError("the carrier has not set this")


class Carrier(Protocol):
    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        """The reply, which fills itself as the response comes."""
        ...


_ports = itertools.cycle(range(50_000, 60_000))


class AsgiCarrier:
    """Calls an ASGI app, each request in a task of its own, as on one connection."""

    def __init__(self, app: ASGIApp, *, user: object = None, address: str = "127.0.0.1") -> None:
        """Nothing is sent yet.

        Args:
            user: What an authentication middleware would have left in the scope.
            address: Where its requests come from.
        """
        self._app = app
        self._user = user
        self._client = (address, next(_ports))
        self.stalls_next = False
        """The next request's client takes nothing, from the first byte on."""
        self.holds_next: tuple[int, asyncio.Event] | None = None
        """Of the next request's body so many bytes come at once, and the rest when this is set."""
        self.journal: list[tuple[Reply, bytes]] = []
        """Every piece of every response body, in the order in which they were sent."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: list[Reply] = []

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        reply = Reply(f"{method} {path}")
        self._replies.append(reply)
        gone, flows = asyncio.Event(), asyncio.Event()
        if not self.stalls_next:
            flows.set()
        self.stalls_next = False

        def leave() -> None:
            gone.set()
            flows.set()

        reply.leave, reply.stall, reply.unstall = leave, flows.clear, flows.set
        encoded = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": encoded,
            "client": self._client,
            "server": ("127.0.0.1", 8_000),
        }
        if self._user is not None:
            scope["user"] = self._user
        task = asyncio.create_task(self._serve(reply, scope, body, gone, flows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return reply

    async def _serve(
        self,
        reply: Reply,
        scope: dict[str, Any],
        body: bytes,
        gone: asyncio.Event,
        flows: asyncio.Event,
    ) -> None:
        sent = False
        holds, self.holds_next = self.holds_next, None

        async def receive() -> AsgiMessage:
            nonlocal sent, holds, body
            if holds is not None:
                (first, comes), holds = holds, None
                if first:
                    begun, body = body[:first], body[first:]
                    holds = 0, comes
                    return {"type": "http.request", "body": begun, "more_body": True}
                await comes.wait()
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: AsgiMessage) -> None:
            # As uvicorn: it waits while the peer takes nothing, and is silent when it left.
            await flows.wait()
            if gone.is_set():
                return
            if message["type"] == "http.response.start":
                headers = [
                    (n.decode("latin-1").lower(), v.decode("latin-1"))
                    for n, v in message.get("headers", [])
                ]
                reply.begin(message["status"], headers)
            else:
                self.journal.append((reply, message.get("body", b"")))
                reply.feed(message.get("body", b""))
                if not message.get("more_body", False):
                    # uvicorn tells the app that the exchange has ended.
                    gone.set()

        try:
            await self._app(scope, receive, send)
        except Exception as error:
            # What a server would log and answer with 500 is the test's to see.
            reply.error = error
        finally:
            reply.end()

    def forget(self) -> None:
        """Forget the replies that have ended, and the journal: they take memory."""
        for reply in self._replies:
            assert reply.error is None, f"the app raised: {reply}"
        self._replies = [reply for reply in self._replies if not reply.ended]
        self.journal.clear()

    async def aclose(self) -> None:
        """Every client leaves; wait for the app to be done with them."""
        await asyncio.sleep(0)
        for reply in self._replies:
            if not reply.ended:
                reply.leave()
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=10)
            assert not stuck, f"the app goes on after its client left: {stuck}"
        errors = [reply for reply in self._replies if reply.error is not None]
        assert not errors, f"the app raised: {errors[0]}"


class SocketCarrier:
    """Sends each request on a TCP connection of its own and reads HTTP/1.1."""

    def __init__(self, host: str, port: int, *, receive_buffer: int | None = None) -> None:
        """Nothing is sent yet.

        Args:
            receive_buffer: Bytes that the kernel may keep for a peer that does not read.
        """
        self._address = (host, port)
        self._receive_buffer = receive_buffer
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        reply = Reply(f"{method} {path}")
        host, port = self._address
        names = {name.lower() for name, _ in headers}
        lines = [f"{method} {path} HTTP/1.1"]
        if "host" not in names:
            lines.append(f"Host: {host}:{port}")
        lines += [f"{name}: {value}" for name, value in headers]
        if body and "content-length" not in names:
            lines.append(f"Content-Length: {len(body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        task = asyncio.create_task(self._exchange(reply, head + body))

        def leave() -> None:
            task.cancel()

        reply.leave = leave
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            reply.end()

        task.add_done_callback(done)
        return reply

    async def _exchange(self, reply: Reply, request: bytes) -> None:
        sock = socket.socket()
        if self._receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._address)
        except OSError:
            # Nobody listens: the reply has ended.
            sock.close()
            return
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
        flows = asyncio.Event()
        flows.set()

        def leave() -> None:
            # If the server was first, the socket may be closed.
            if not writer.transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            flows.set()

        reply.leave, reply.stall, reply.unstall = leave, flows.clear, flows.set
        try:
            writer.write(request)
            await self._read(reply, reader, flows)
        except (OSError, asyncio.IncompleteReadError):
            pass  # The connection broke: the reply has ended.
        finally:
            writer.transport.abort()
            reply.end()

    async def _read(self, reply: Reply, reader: asyncio.StreamReader, flows: asyncio.Event) -> None:
        await flows.wait()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.rstrip("\r\n").split("\r\n")
        headers = [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines)]
        reply.begin(int(status_line.split()[1]), headers)
        if reply.header("transfer-encoding") == "chunked":
            while True:
                await flows.wait()
                size = int((await reader.readuntil(b"\r\n")).strip(), 16)
                chunk = await reader.readexactly(size)
                await reader.readexactly(2)
                if size == 0:
                    return
                reply.feed(chunk)
        length = reply.header("content-length")
        if length is not None:
            reply.feed(await reader.readexactly(int(length)))

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)


Headers = Mapping[str, str | None]
"""Instead of what a stock client sends; None: without that header."""


def result_of(answer: Json) -> Json:
    """The result; an error is an assertion error."""
    assert "result" in answer, answer
    return cast("Json", answer["result"])


def error_of(answer: Json) -> Json:
    """The error; a result is an assertion error."""
    assert "error" in answer, answer
    return cast("Json", answer["error"])


def initialize_params(
    name: str = "raw", *, capabilities: Json | None = None, version: str = NEWEST
) -> Json:
    """The params with which a client called ``name`` shakes hands."""
    return {
        "protocolVersion": version,
        "capabilities": capabilities or {},
        "clientInfo": {"name": name, "version": "1"},
    }


class RawClient:
    """One client of the handshake era. Its requests are numbered from 0."""

    def __init__(
        self,
        carrier: Carrier,
        *,
        version: str = NEWEST,
        capabilities: Json | None = None,
        path: str = "/mcp",
    ) -> None:
        self.carrier = carrier
        self.version = version
        self.capabilities: Json = capabilities or {}
        self.path = path
        self.session_id: str | None = None
        """The transport-mode session; None: every POST is a lone one."""
        self.numbers = itertools.count()

    # --- HTTP ----------------------------------------------------------------------------

    def headers(self, *, accept: str = "application/json, text/event-stream") -> dict[str, str]:
        """What a stock client sends with every request."""
        headers = {
            "Host": "127.0.0.1:8000",
            "Accept": accept,
            "Mcp-Protocol-Version": self.version,
        }
        if self.session_id is not None:
            headers["Mcp-Session-Id"] = self.session_id
        return headers

    def post(self, message: Any, *, headers: Headers | None = None) -> Reply:
        """POST a message.

        Args:
            headers: Instead of the stock client's; None: without that header.
        """
        sent = {**self.headers(), "Content-Type": "application/json"}
        return self.http("POST", _merged(sent, headers), json.dumps(message).encode())

    def get(self, last_event_id: str | None = None, *, headers: Headers | None = None) -> Reply:
        sent = self.headers(accept="text/event-stream")
        if last_event_id is not None:
            sent["Last-Event-ID"] = last_event_id
        return self.http("GET", _merged(sent, headers))

    def delete(self, *, headers: Headers | None = None) -> Reply:
        return self.http("DELETE", _merged(self.headers(), headers))

    def http(self, method: str, headers: Mapping[str, str], body: bytes = b"") -> Reply:
        return self.carrier.send(method, self.path, list(headers.items()), body)

    # --- JSON-RPC ------------------------------------------------------------------------

    async def initialize(self) -> Json:
        """Shake hands; the result. From now on there is a transport-mode session."""
        self.session_id = None
        request_id = next(self.numbers)
        params = initialize_params(capabilities=self.capabilities, version=self.version)
        reply = self.post(_request(request_id, "initialize", params))
        result = result_of(await reply.answer(request_id))
        self.session_id = reply.header("mcp-session-id")
        assert self.session_id is not None
        await self.notify("notifications/initialized")
        return result

    def send(
        self,
        method: str,
        params: Json | None = None,
        *,
        request_id: str | int | None = None,
        headers: Headers | None = None,
    ) -> "Sent":
        """Send a request; do not wait for the answer."""
        if request_id is None:
            request_id = next(self.numbers)
        return Sent(request_id, self.post(_request(request_id, method, params), headers=headers))

    async def answer(
        self, method: str, params: Json | None = None, *, headers: Headers | None = None
    ) -> Json:
        return await self.send(method, params, headers=headers).answer()

    async def result(
        self, method: str, params: Json | None = None, *, headers: Headers | None = None
    ) -> Json:
        """The result of a request.

        Raises:
            AssertionError: It was answered with an error.
        """
        return await self.send(method, params, headers=headers).result()

    async def error(
        self, method: str, params: Json | None = None, *, headers: Headers | None = None
    ) -> Json:
        """The error object with which a request was answered.

        Raises:
            AssertionError: It succeeded.
        """
        return await self.send(method, params, headers=headers).error()

    async def notify(self, method: str, params: Json | None = None) -> None:
        """Send a notification; it must be accepted."""
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        reply = await self.post(message).done()
        assert reply.status == 202, reply

    async def respond(self, request: Json, result: Json) -> None:
        """Answer a request of the server's; the answer must be accepted."""
        reply = await self.post({"jsonrpc": "2.0", "id": request["id"], "result": result}).done()
        assert reply.status == 202, reply

    def call(self, tool: str, *, meta: Json | None = None, **arguments: Any) -> "Sent":
        return self.send("tools/call", call_params(tool, arguments, meta))

    async def text(self, tool: str, *, meta: Json | None = None, **arguments: Any) -> str:
        return text_of(await self.call(tool, meta=meta, **arguments).result())

    # --- sessions ------------------------------------------------------------------------

    async def start(self) -> Json:
        return await self.result("session/start", {})

    async def resume(self, session_id: str, position: str | None = None) -> Json:
        params: Json = {"sessionId": session_id}
        if position is not None:
            params["lastSessionEventId"] = position
        return await self.result("session/resume", params)

    async def end(self, session_id: str) -> Json:
        return await self.result("session/end", {"sessionId": session_id})


@dataclass
class Sent:
    """A request that was sent, and the reply to its POST."""

    id: str | int
    reply: Reply

    async def answer(self) -> Json:
        return await self.reply.answer(self.id)

    async def result(self) -> Json:
        return result_of(await self.answer())

    async def error(self) -> Json:
        return error_of(await self.answer())


def _request(request_id: str | int, method: str, params: Json | None) -> Json:
    message: Json = {"jsonrpc": "2.0", "id": request_id, "method": method}
    if params is not None:
        message["params"] = params
    return message


def _merged(headers: dict[str, str], other: Headers | None) -> dict[str, str]:
    """``headers`` with some replaced, added, or (None) left out, whatever their case."""
    replaced = {name.lower() for name in other or {}}
    kept = {name: value for name, value in headers.items() if name.lower() not in replaced}
    return kept | {name: value for name, value in (other or {}).items() if value is not None}


def call_params(tool: str, arguments: Json | None = None, meta: Json | None = None) -> Json:
    params: Json = {"name": tool, "arguments": arguments or {}}
    if meta is not None:
        params["_meta"] = meta
    return params


def text_of(result: Json) -> str:
    return str(result["content"][0]["text"])


def in_session(session_id: str | None) -> Json:
    """``_meta`` that names a session (rule 1), or ``null``."""
    return {SESSION: None if session_id is None else {"sessionId": session_id}}


def keyed(key: str, session_id: str | None = None, **meta: Any) -> Json:
    """``_meta`` with a request key, and a session if one is given."""
    named = in_session(session_id) if session_id is not None else {}
    return {KEY: key, **named, **meta}


def uris(messages: list[Json]) -> list[str]:
    """What ``resources/updated`` messages are about; other messages by their method."""
    return [
        m["params"]["uri"] if m.get("method") == UPDATED else str(m.get("method")) for m in messages
    ]


def event_ids(messages: list[Json]) -> list[str]:
    return [m["params"]["sessionEventId"] for m in messages]


@asynccontextmanager
async def in_process(
    app: ASGIApp, *, user: object = None, address: str = "127.0.0.1"
) -> AsyncGenerator[AsgiCarrier]:
    """A carrier to ``app``, whose lifespan somebody else runs."""
    carrier = AsgiCarrier(app, user=user, address=address)
    try:
        yield carrier
    finally:
        with anyio.CancelScope(shield=True):
            await carrier.aclose()


async def at_most(seconds: float, work: Awaitable[Any]) -> Any:
    """``await work``, or an error after so many seconds."""
    with anyio.fail_after(seconds):
        return await work
