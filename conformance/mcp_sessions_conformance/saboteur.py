"""A proxy before a good server that makes it wrong in one way: it proves that vectors can fail.

It stands between the runner and the server, on HTTP (SSE included) and WebSocket as an ASGI
application, on a pipe as a program: ``python -m mcp_sessions_conformance.saboteur FAULT
COMMAND…``. What it does to each message is a `Fault`; those there are, are in ``faults.py``.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from mcp_sessions_conformance import sse
from mcp_sessions_conformance.values import Json, as_object

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LATE = 0.3
"""Seconds that a late message is late."""

_HOP = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "date"}
)
"""Headers that are between two neighbours, not between the ends."""


@dataclass(frozen=True)
class Late:
    """A message that goes out later than what comes after it."""

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
    """One message on its way, and what is known about it."""

    message: Json
    talk: Talk
    memory: dict[Any, Any]
    """What the fault remembers, over all connections."""

    asked: Json | None = None
    """The request that this message answers."""

    talks: dict[str, Talk] = field(default_factory=dict[str, Talk])
    """All connections."""

    answers: list[Json] = field(default_factory=list[Json])
    """What the client is answered without asking the server."""

    inject: list[Json] = field(default_factory=list[Json])
    """What the server is sent beside it; over HTTP only, and nobody waits for the answer."""


Rewrite = Callable[[Case], "list[Json | Late] | None"]
"""What becomes of a message; None: it goes on as it is."""


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
    """What the client is answered without asking the server."""


@dataclass(frozen=True)
class Fault:
    """One way to be wrong."""

    name: str
    says: str
    """What such a server does."""

    to_server: Rewrite | None = None
    to_client: Rewrite | None = None
    http: "Callable[[Http], None] | None" = None
    """Changes an HTTP request, or answers it."""

    status: "Callable[[Http], None] | None" = None
    """Changes the head of an HTTP response."""

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

    when_cut: str = ""
    """``cancel``: what the client asked is cancelled when it goes away. ``silence``: no event
    is sent to anybody any more."""

    raw: Callable[[str], str | None] | None = None
    """Takes a line or a frame as it came; None: it is dropped."""

    limit: int = 16 * 1024 * 1024
    """Bytes of a message that goes through to the server; a longer one is dropped."""


class Saboteur:
    """A fault at work."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.memory: dict[Any, Any] = {}
        self.talks: dict[str, Talk] = {}
        self.is_silent = False
        self.injected: list[Json] = []
        """What the server is still to be sent."""

    def talk(self, name: str) -> Talk:
        """The connection of that name."""
        return self.talks.setdefault(name, Talk(name))

    def outgoing(self, message: Any, talk: Talk) -> tuple[list[Any], list[Json]]:
        """What goes on to the server, and what the client is answered at once."""
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
        """What goes on to the client."""
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
        """A client went away."""
        if self.fault.when_cut == "silence":
            self.is_silent = True


def _key(request_id: Any) -> Any:
    return request_id if isinstance(request_id, (str, int)) else repr(request_id)


class SaboteurApp:
    """The ASGI application: HTTP and WebSocket before an ``http://`` URL."""

    def __init__(self, upstream: str, fault: Fault, saboteur: Saboteur | None = None) -> None:
        """Take what it works with.

        Args:
            upstream: The URL of the good server's endpoint.
            saboteur: One that stands before several servers.
        """
        self.upstream = upstream
        self.saboteur = saboteur or Saboteur(fault)
        self._client: httpx.AsyncClient | None = None
        self._late: set[asyncio.Task[None]] = set()

    def use(self, fault: Fault) -> None:
        """From now on, be wrong in another way."""
        self.saboteur = Saboteur(fault)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                timeout = httpx.Timeout(10, read=None)
                self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
                await send({"type": "lifespan.startup.complete"})
            else:
                for task in self._late:
                    task.cancel()
                if self._client is not None:
                    await self._client.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    # --- HTTP --------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        saboteur, verb = self.saboteur, cast("str", scope["method"])
        given = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        headers = {name: value for name, value in given.items() if name not in _HOP}
        body = b""
        while True:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body += part.get("body", b"")
            if not part.get("more_body", False):
                break
        talk = saboteur.talk(given.get("mcp-session-id", "lone"))
        exchange = Http(verb, headers, saboteur.memory)
        if saboteur.fault.http is not None:
            saboteur.fault.http(exchange)
            if exchange.answer is not None:
                await _answer(send, exchange.answer[0], json.dumps(exchange.answer[1]).encode())
                return
        asked: Json | None = None
        if body:
            try:
                message = json.loads(body)
            except ValueError:
                message = None
            if isinstance(message, dict):
                asked = cast("Json", message) if "method" in message else None
                forward, answers = saboteur.outgoing(message, talk)
                if answers:
                    await _answer(send, 200, json.dumps(answers[0]).encode())
                    return
                if not forward:
                    await _answer(send, 202, b"")
                    return
                body = json.dumps(forward[0]).encode()
                asked = cast("Json", forward[0]) if asked is not None else None
        self._inject(exchange.asked)
        relay = asyncio.create_task(self._relay(exchange, body, talk, asked, send))
        gone = asyncio.create_task(_until_gone(receive))
        await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not relay.done():
            saboteur.cut()
            if saboteur.fault.ignores_cuts:
                self._late.add(relay)
                relay.add_done_callback(self._late.discard)
                return
            relay.cancel()
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError, OSError):
            await relay

    def _inject(self, headers: dict[str, str]) -> None:
        """Send what the fault adds, as the client would."""
        while self.saboteur.injected:
            task = asyncio.create_task(self._send_alone(self.saboteur.injected.pop(0), headers))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _send_alone(self, message: Json, headers: dict[str, str]) -> None:
        if self._client is None:
            raise AssertionError("the lifespan has begun")
        accept = {"accept": "application/json, text/event-stream"}
        given = {**headers, **accept, "content-type": "application/json"}
        with contextlib.suppress(httpx.HTTPError, OSError):
            await self._client.post(self.upstream, json=message, headers=given, timeout=3)

    async def _relay(
        self,
        exchange: Http,
        body: bytes,
        talk: Talk,
        asked: Json | None,
        send: Send,
    ) -> None:
        if self._client is None:
            raise AssertionError("the lifespan has begun")
        saboteur = self.saboteur
        async with self._client.stream(
            exchange.verb, self.upstream, headers=exchange.asked, content=body or None
        ) as response:
            exchange.headers = {
                name.lower(): value
                for name, value in response.headers.items()
                if name.lower() not in _HOP
            }
            exchange.status = response.status_code
            if saboteur.fault.status is not None:
                saboteur.fault.status(exchange)
            kind = response.headers.get("content-type", "")
            fields = [(n.encode(), v.encode("latin-1")) for n, v in exchange.headers.items()]
            start = {"type": "http.response.start", "status": exchange.status, "headers": fields}
            if not kind.startswith("text/event-stream"):
                whole = await response.aread()
                await send(start)
                await send({"type": "http.response.body", "body": self._body(whole, talk, asked)})
                return
            await send(start)
            await self._events(response, exchange, talk, asked, send)
            await send({"type": "http.response.body", "body": b""})

    def _body(self, whole: bytes, talk: Talk, asked: Json | None) -> bytes:
        try:
            message = json.loads(whole)
        except ValueError:
            return whole
        messages = self.saboteur.incoming(message, talk, asked)
        found = [m.message if isinstance(m, Late) else m for m in messages]
        return json.dumps(found[-1]).encode() if found else b""

    async def _events(
        self, response: httpx.Response, exchange: Http, talk: Talk, asked: Json | None, send: Send
    ) -> None:
        lock, verb = asyncio.Lock(), exchange.verb

        async def put(message: Json, event_id: str | None = None) -> None:
            head = f"id: {event_id}\n" if event_id is not None else ""
            data = f"data: {json.dumps(message)}\n" if message else ""
            block = f"{head}{data}\n".encode()
            async with lock:
                await send({"type": "http.response.body", "body": block, "more_body": True})

        if verb == "GET" or (asked or {}).get("method") == "subscriptions/listen":
            talk.push = put
        reader = sse.Reader()
        async for chunk in response.aiter_bytes():
            for event in reader.feed(chunk):
                if verb == "GET" and event.id is not None:
                    self.saboteur.memory["sse"] = event.id
                if not event.data:
                    if self.saboteur.fault.primes:
                        await put({}, event.id)
                    continue
                for message in self.saboteur.incoming(json.loads(event.data), talk, None):
                    await self._put(message, lambda m, e=event.id: put(m, e))
                self._inject(exchange.asked)

    async def _put(self, message: Any, put: Callable[[Json], Awaitable[None]]) -> None:
        if not isinstance(message, Late):
            await put(message)
            return

        async def later() -> None:
            await asyncio.sleep(_LATE)
            with contextlib.suppress(OSError, RuntimeError, ConnectionClosed):
                await put(message.message)

        task = asyncio.create_task(later())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    # --- WebSocket ---------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        saboteur = self.saboteur
        await receive()
        given = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        passed = {n: given[n] for n in ("authorization", "origin") if n in given}
        exchange = Http("UPGRADE", passed, saboteur.memory)
        if saboteur.fault.http is not None:
            saboteur.fault.http(exchange)
        url = self.upstream.replace("http", "ws", 1)
        offered = [Subprotocol(name) for name in scope.get("subprotocols") or ()]
        try:
            upstream = await connect(
                url,
                subprotocols=offered or None,
                additional_headers=passed,
                compression=None,
                ping_interval=None,
                max_size=None,
                proxy=None,
            )
        except InvalidStatus as refused:
            exchange.status = refused.response.status_code
            if saboteur.fault.status is not None:
                saboteur.fault.status(exchange)
            status = exchange.status
            await send({"type": "websocket.http.response.start", "status": status, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b""})
            return
        answered = {"sec-websocket-protocol": upstream.subprotocol or ""}
        if saboteur.fault.upgrade is not None:
            saboteur.fault.upgrade(answered)
        fields = [
            (n.encode(), v.encode()) for n, v in answered.items() if n != "sec-websocket-protocol"
        ]
        await send(
            {
                "type": "websocket.accept",
                "subprotocol": answered["sec-websocket-protocol"] or None,
                "headers": fields,
            }
        )
        talk = saboteur.talk(f"websocket {len(saboteur.talks)}")

        async def put(message: Json) -> None:
            text = json.dumps(message)
            framed = {"bytes": text.encode()} if saboteur.fault.binary else {"text": text}
            await send({"type": "websocket.send", **framed})

        talk.push = put
        try:
            await self._pump(receive, send, upstream, talk, put)
        finally:
            talk.push = None
            await upstream.close()

    async def _pump(
        self,
        receive: Receive,
        send: Send,
        upstream: ClientConnection,
        talk: Talk,
        put: Callable[[Json], Awaitable[None]],
    ) -> None:
        saboteur = self.saboteur
        fault = saboteur.fault

        async def up() -> None:
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    saboteur.cut()
                    if fault.when_cut == "cancel":
                        for request_id in talk.requests:
                            params = {"requestId": request_id}
                            note = {"method": "notifications/cancelled", "params": params}
                            await upstream.send(json.dumps({"jsonrpc": "2.0", **note}))
                    return
                raw: str | bytes = message.get("text") or message.get("bytes") or ""
                if len(raw) > fault.limit or (isinstance(raw, bytes) and fault.close):
                    continue
                await self._up(raw, talk, upstream.send, put)

        async def down() -> None:
            async for frame in upstream:
                for message in saboteur.incoming(json.loads(frame), talk):
                    await self._put(message, put)

        tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[1] in done:
            code = fault.close or upstream.close_code or 1000
            with contextlib.suppress(OSError, RuntimeError):
                await send({"type": "websocket.close", "code": code if code != 1006 else 1011})

    async def _up(
        self,
        raw: str | bytes,
        talk: Talk,
        forward: Callable[[str | bytes], Awaitable[None]],
        put: Callable[[Json], Awaitable[None]],
    ) -> None:
        saboteur = self.saboteur
        if isinstance(raw, str) and saboteur.fault.raw is not None:
            changed = saboteur.fault.raw(raw)
            if changed is None:
                return
            raw = changed
        try:
            message = json.loads(raw) if isinstance(raw, str) else None
        except ValueError:
            message = None
        if not isinstance(message, dict):
            await forward(raw)
            return
        messages, answers = saboteur.outgoing(message, talk)
        for answer in answers:
            await put(answer)
        for changed_message in messages:
            await forward(json.dumps(changed_message))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --- a pipe ------------------------------------------------------------------------------------


async def _lines(stream: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    rest = b""
    while chunk := await stream.read(65_536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def sabotage_pipe(fault: Fault, command: list[str]) -> None:
    """Run a server program, and be its wrong standard input and output."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    to_program, from_program = process.stdin, process.stdout
    saboteur = Saboteur(fault)
    talk = saboteur.talk("pipe")
    loop = asyncio.get_running_loop()
    ours = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ours), sys.stdin)

    def write(message: Any) -> None:
        value = message.message if isinstance(message, Late) else message
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    async def up() -> None:
        async for line in _lines(ours):
            if len(line) > fault.limit:
                continue
            text: str | None = line.decode(errors="replace")
            if fault.raw is not None:
                text = fault.raw(line.decode(errors="replace"))
            if text is None:
                continue
            try:
                message = json.loads(text)
            except ValueError:
                message = None
            if isinstance(message, dict):
                messages, answers = saboteur.outgoing(message, talk)
                for answer in answers:
                    write(answer)
                for changed in messages:
                    to_program.write(json.dumps(changed).encode() + b"\n")
            else:
                to_program.write(text.encode() + b"\n")
            await to_program.drain()
        to_program.close()

    async def down() -> None:
        async for line in _lines(from_program):
            for message in saboteur.incoming(json.loads(line), talk):
                write(message)

    await asyncio.gather(up(), down())
    await process.wait()


def main() -> None:
    """Be a wrong program: ``saboteur FAULT COMMAND…``."""
    from mcp_sessions_conformance.faults import FAULTS

    asyncio.run(sabotage_pipe(FAULTS[sys.argv[1]], sys.argv[2:]))


if __name__ == "__main__":
    main()
