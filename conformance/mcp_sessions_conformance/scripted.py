"""A server over HTTP that does what a duty's script says, and notes what it is sent.

It is driven from both sides. The client program asks the tool ``next`` what to do, over and
over; the script answers with an `Instruction`. Between two of these the script pushes events,
cuts connections, forgets sessions, and looks at what came.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions_conformance.local_server import Receive, Scope, Send, listening
from mcp_sessions_conformance.peer import Failure
from mcp_sessions_conformance.received import (
    Held,
    Received,
    acknowledgement,
    answer,
    as_result,
    begin_stream,
    completed,
    discovered,
    error,
    initialize_result,
    on_listen,
    reply,
    send_event,
    serve_lifespan,
    session_not_found,
    tool,
)
from mcp_sessions_conformance.values import SESSION, Json, as_object


class Watched:
    def __init__(self, wait: float) -> None:
        self.wait = wait
        """Seconds that anything may take."""

        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, look: Callable[[], Any], what: str, *, within: float | None = None
    ) -> Any:
        seconds = self.wait if within is None else within
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            changed = self._changed
            found = look()
            if found:
                return found
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise Failure(f"{what} did not come within {seconds:g} s")
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    async def never(self, look: Callable[[], Any], what: str, *, within: float) -> None:
        deadline = asyncio.get_running_loop().time() + within
        while True:
            changed = self._changed
            if look():
                raise Failure(what)
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()


Instruction = Json
"""An instruction to the client; see conformance/README.md."""

ELEVATION = ("start", "resume", "end")
DATA_LAYER = ("create", "delete", "state")

MOST_REQUESTS = 5_000
"""HTTP requests of one client; one that sends more has failed."""


@dataclass
class _Session:
    log: list[tuple[str, Json]] = field(default_factory=list[tuple[str, Json]])
    connection: str | None = None


class ScriptedServer(Watched):
    def __init__(
        self,
        *,
        speaks: tuple[str, ...],
        has_keys: bool = True,
        key_lifetime: float = 600,
        is_modern: bool = False,
        wait: float = 8.0,
    ) -> None:
        """Make a server that has no client yet.

        Args:
            speaks: Which session methods it has: `ELEVATION`, `DATA_LAYER` or both.
            has_keys: Whether it knows request keys.
            key_lifetime: For how many seconds it says that it knows one.
            is_modern: Whether it speaks the modern era as well.
            wait: Seconds that the client may take for anything.
        """
        super().__init__(wait)
        self.is_modern = is_modern
        self.speaks = speaks
        self.has_keys = has_keys
        self.key_lifetime = key_lifetime
        self.is_away = False
        """Everything is answered 503."""

        self.knocks = 0
        """HTTP requests that came while it was away."""

        self.url = ""
        self.received: list[Received] = []
        self.gets: list[dict[str, str]] = []
        """The headers of each GET, in lower case."""

        self.sessions: dict[str, _Session] = {}
        self.state: str | None = None
        """The ``state`` of results; None: none."""

        self.names_sessions = True
        """Results carry the metadata of the session that their request named."""

        self.override: Callable[[Received], Json | None] | None = None
        """Answers a request (``result`` or ``error``) in the server's place."""

        self.resume_result: Callable[[Received, Json], Json] | None = None
        """Changes the result of ``session/resume``."""

        self._calls: asyncio.Queue[Held] = asyncio.Queue()
        self._open: set[asyncio.Future[Json]] = set()
        """Calls with a response that neither ended nor broke."""

        self._connections: dict[str, dict[str, None]] = {}
        self._streams: dict[str, asyncio.Queue[Json]] = {}
        self._unsent: dict[str, list[Json]] = {}
        """Connection → what waits for its GET stream."""

        self._cut = asyncio.Event()
        self._numbers = itertools.count(1)
        self.next_event = 1

    # --- for scripts -------------------------------------------------------------------------

    async def has_read(self) -> None:
        """Return when the client has read everything that its streams were sent so far: it
        answers a ``ping`` that was sent after it, or gave its stream up.

        Raises:
            Failure: Neither came in time.
        """
        name = f"read-{next(self._numbers)}"
        self.notify({"id": name, "method": "ping"})

        def answered() -> bool:
            return any(
                not request.method and request.message.get("id") == name
                for request in self.received
            )

        await self.until(lambda: answered() or not self._streams, "the answer to ping")

    def requests(self, method: str = "", *, tool: str = "") -> list[Received]:
        return [
            request
            for request in self.received
            if (not method or request.method == method) and (not tool or request.tool == tool)
        ]

    async def held(self, tool: str) -> Held:
        try:
            async with asyncio.timeout(self.wait):
                held = await self._calls.get()
                # Nobody receives the answer to one that was cut while it waited here.
                while held.answer not in self._open:
                    held = await self._calls.get()
        except TimeoutError:
            raise Failure(f"the client did not call {tool} within {self.wait:g} s") from None
        if held.request.tool != tool:
            raise Failure(f"the client called {held.request.tool}, not {tool}")
        return held

    async def instruct(self, instruction: Instruction) -> Json:
        held = await self.held("next")
        held.answer.set_result(as_result(instruction))
        return cast("Json", held.request.params.get("arguments") or {})

    def push(self, uri: str, *, session_id: str | None = None, event_id: str | None = None) -> str:
        """Store an event of a session, and send it where the session is attached. Return its id."""
        name = session_id or next(reversed(self.sessions))
        session = self.sessions[name]
        # Nothing in it is a number to count with, and it still sorts.
        event_id = event_id or f"ev~{self.next_event:06d}/x"
        self.next_event += 1
        params: Json = {"uri": uri, "sessionEventId": event_id}
        params["_meta"] = {SESSION: {"sessionId": name}}
        message = {"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": params}
        session.log.append((event_id, message))
        self.send_to(session.connection, message)
        return event_id

    def notify(self, message: Json) -> None:
        for connection in list(self._streams):
            self.send_to(connection, {"jsonrpc": "2.0", **message})

    def lose_connections(self) -> None:
        self._connections.clear()
        self.cut()

    def cut(self) -> None:
        self._streams.clear()
        self._open.clear()
        self._cut.set()
        self._cut = asyncio.Event()
        for session in self.sessions.values():
            session.connection = None

    async def streaming(self) -> None:
        """Return when a client listens.

        Raises:
            Failure: None does.
        """
        await self.until(lambda: self._streams, "a GET stream, or a listen")

    # --- the ASGI application ----------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await serve_lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        body = b""
        more = True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body += part.get("body", b"")
            more = part.get("more_body", False)
        connection = headers.get("mcp-session-id")
        if self.is_away or len(self.received) > MOST_REQUESTS:
            self.knocks += 1
            self.wake()
            await reply(send, 503, b"")
        elif scope["method"] == "POST":
            await self._post(body, headers, connection, receive, send)
        elif connection not in self._connections:
            await reply(send, 404, b'{"error":"unknown session"}')
        elif scope["method"] == "GET":
            self.gets.append(headers)
            await self._stream(connection or "", receive, send)
        else:
            self._connections.pop(connection or "", None)
            await reply(send, 200, b"")

    async def _post(
        self,
        body: bytes,
        headers: dict[str, str],
        connection: str | None,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            value: Any = json.loads(body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            await reply(send, 400, b'{"error":"no JSON-RPC message"}')
            return
        request = Received(cast("Json", value), headers, len(self.received))
        self.received.append(request)
        self.wake()
        if request.method == "initialize":
            made = f"connection-{next(self._numbers)}"
            self._connections[made] = {}
            version = request.params.get("protocolVersion", "2025-11-25")
            welcome = initialize_result(version, self._settings())
            await answer(send, request, {"result": welcome}, made)
        elif request.is_modern and self.is_modern:
            await self._modern(request, receive, send)
        elif request.is_modern:
            error = {"code": -32022, "message": "Unsupported protocol version"}
            data = {"supported": ["2025-11-25"], "requested": headers["mcp-protocol-version"]}
            await answer(send, request, {"error": {**error, "data": data}}, None, status=400)
        elif connection is not None and connection not in self._connections:
            await reply(send, 404, b'{"error":"unknown session"}')
        elif "id" not in request.message or not request.method:
            await reply(send, 202, b"")
        elif self.override is not None and (answered := self.override(request)) is not None:
            await answer(send, request, answered, None)
        elif request.tool:
            await self._call(request, send)
        else:
            await answer(send, request, self._served(request, connection), None)

    async def _modern(self, request: Received, receive: Receive, send: Send) -> None:
        """Serve a POST of the modern era. Its events wait in the session that it names (HTM1)."""
        name = str(request.named.get("sessionId") or request.params.get("sessionId"))
        stream_key = f"listen of {name}"
        if "id" not in request.message or not request.method:
            await reply(send, 202, b"")
        elif self.override is not None and (answered := self.override(request)) is not None:
            await answer(send, request, answered, None)
        elif request.tool:
            await self._call(request, send)
        elif request.method == "subscriptions/listen" and name in self.sessions:
            self.sessions[name].connection = stream_key
            await self._stream(stream_key, receive, send, request)
        elif request.method == "subscriptions/listen" and request.named:
            await answer(send, request, session_not_found(name), None)
        elif request.method == "subscriptions/listen":
            await self._stream(f"bare {request.number}", receive, send, request)
        else:
            if request.method == "session/resume":
                self._streams.pop(stream_key, None)
                self._unsent.pop(stream_key, None)
            answered = self._served(request, stream_key)
            made = as_object(answered.get("result")).get("sessionId")
            if request.method == "session/start" and isinstance(made, str):
                self.sessions[made].connection = f"listen of {made}"
            await answer(send, request, completed(answered), None)

    def _settings(self) -> Json | None:
        if "start" not in self.speaks:
            return None
        window = {"maxEvents": 100, "maxBytes": 65_536, "maxAge": 600}
        settings: Json = {"features": list(self.speaks), "window": window}
        if self.has_keys:
            settings["features"].append("requestKey")
            settings["requestKeys"] = {"lifetime": self.key_lifetime, "maxBytes": 65_536}
        return settings

    def _served(self, request: Received, connection: str | None) -> Json:
        method = request.method
        if method.startswith("session/") and "start" not in self.speaks:
            return error(-32601, "Method not found")
        if method.startswith("sessions/") and "create" not in self.speaks:
            return error(-32601, "Method not found")
        match method:
            case "server/discover":
                return {"result": discovered(self._settings())}
            case "session/start":
                name = self._make(connection)
                return {"result": {"sessionId": name, "sessionEventId": "ev~000000/x"}}
            case "sessions/create":
                session = {"sessionId": self._make(connection), "state": self.state or ""}
                return {"result": {"session": session}}
            case "session/resume":
                return self._resume(request, connection)
            case "session/end" | "sessions/delete":
                name = request.params.get("sessionId") or request.named.get("sessionId")
                known = self.sessions.pop(str(name), None)
                return {"result": {}} if known is not None else session_not_found(name)
            case "tools/list":
                return {"result": {"tools": [tool("next"), tool("work")]}}
            case "resources/subscribe" | "resources/unsubscribe" | "ping":
                return {"result": {}}
            case "resources/list":
                return {"result": {"resources": []}}
            case _:
                return error(-32601, "Method not found")

    def _make(self, connection: str | None) -> str:
        name = f"session-{next(self._numbers)}-{id(self):x}"
        self.sessions[name] = _Session(connection=connection)
        return name

    def _resume(self, request: Received, connection: str | None) -> Json:
        name, position = request.params.get("sessionId"), request.params.get("lastSessionEventId")
        session = self.sessions.get(str(name))
        if session is None:
            return session_not_found(name)
        session.connection = connection
        head = session.log[-1][0] if session.log else "ev~000000/x"
        ids = ["ev~000000/x", *(event_id for event_id, _ in session.log)]
        seen = ids.index(position) if position in ids else len(session.log)
        missed = [message for _, message in session.log[seen:]]
        result: Json = {"resumed": True, "catchup": position is not None, "sessionEventId": head}
        result["replayed"] = len(missed)
        if self.resume_result is not None:
            result = self.resume_result(request, result)
        if result["catchup"]:
            for message in missed:
                self.send_to(connection, message)
        return {"result": result}

    async def _call(self, request: Received, send: Send) -> None:
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        cut = asyncio.ensure_future(self._cut.wait())
        await begin_stream(send)
        self._open.add(future)
        self._calls.put_nowait(Held(request, future))
        await asyncio.wait({future, cut}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            # Nothing more, and no end: the connection breaks.
            return
        cut.cancel()
        self._open.discard(future)
        result = future.result()
        if "error" in result:
            answered = {"error": result["error"]}
        else:
            if request.named and self.names_sessions:
                metadata: Json = {"sessionId": request.named.get("sessionId")}
                if self.state is not None:
                    metadata["state"] = self.state
                meta: Json = {SESSION: metadata, **as_object(result.get("_meta"))}
                result = {**result, "_meta": meta}
            answered: Json = {"result": result}
            answered = completed(answered) if request.is_modern else answered
        message = {"jsonrpc": "2.0", "id": request.message["id"], **answered}
        await send_event(send, message)
        await send({"type": "http.response.body", "body": b""})

    async def _stream(
        self, connection: str, receive: Receive, send: Send, listen: Received | None = None
    ) -> None:
        queue: asyncio.Queue[Json] = asyncio.Queue()
        await begin_stream(send)
        if listen is not None:
            await send_event(send, acknowledgement(listen))
        for message in self._unsent.pop(connection, []):
            queue.put_nowait(message)
        self._streams[connection] = queue
        self.wake()
        cut = asyncio.ensure_future(self._cut.wait())
        gone = asyncio.ensure_future(receive())
        try:
            while not cut.done() and not gone.done():
                taken = asyncio.ensure_future(queue.get())
                await asyncio.wait({taken, cut, gone}, return_when=asyncio.FIRST_COMPLETED)
                if taken.done():
                    message = taken.result()
                    # A place on the stream, which is no position in a session (HTL19).
                    stream_key = f"sse-{next(self._numbers)}" if listen is None else None
                    message = message if listen is None else on_listen(message, listen)
                    await send_event(send, message, stream_key)
                else:
                    taken.cancel()
        finally:
            cut.cancel()
            gone.cancel()
            if self._streams.get(connection) is queue:
                del self._streams[connection]
                self.wake()

    def send_to(self, connection: str | None, message: Json) -> None:
        if connection is None:
            return
        stream = self._streams.get(connection)
        if stream is not None:
            stream.put_nowait(message)
        else:
            self._unsent.setdefault(connection, []).append(message)


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncGenerator[str]:
    async with listening(server) as url:
        server.url = url
        try:
            yield url
        finally:
            server.cut()
