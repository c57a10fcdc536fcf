"""A server at a URL, in plain ASGI and without an SDK, that can be notified how to misbehave.

Each of its tools (`UrlServer.tool`) answers in another way. It keeps its sessions in memory, and
forgets them when it is asked to.
"""

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

Json = dict[str, Any]

_TAKEN = ("notifications/roots/list_changed", "notifications/cancelled")


class Cut(Exception):
    """The connection ends here."""


class UrlServer:
    """An ASGI application; ``misdeed`` is what it does wrong at its start."""

    def __init__(self, misdeed: str = "") -> None:
        self.misdeed = misdeed
        self.sessions: dict[str, Json] = {}
        """By id: what its client said in ``initialize``."""

        self.calls: list[str] = []
        """The tools that were called, in order."""

        self.received: list[Json] = []
        """Every message, in order."""

        self.headers: list[Json] = []
        """Of each request."""

        self.ended: list[str] = []
        """The sessions that clients ended."""

        self.streams: dict[str, asyncio.Queue[bytes]] = {}
        """By session: what its own stream has still to say."""

        self.accepts: str | None = None
        """The one credential; None: any, or none."""

        self.resumed: list[str] = []
        """The positions that were asked for."""

        self.resumed_at: list[float] = []
        """When; seconds of the event loop's clock."""

        self.takes = asyncio.Event()
        """It takes what it is notified of roots, and of cancelled requests."""

        self.takes.set()
        self.subscribed: set[str] = set()
        self.subscribes = asyncio.Event()
        """It answers subscriptions. It reads them, and what ends them, in any case."""

        self.subscribes.set()
        self.open = 0
        """Responses that are kept open after their answers."""

    def forget(self) -> None:
        """Be started again: nothing is known of any session."""
        self.sessions.clear()
        self.hang_up()

    def hang_up(self) -> None:
        """End the stream of each session, which goes on."""
        for stream in self.streams.values():
            stream.put_nowait(b"")
        self.streams.clear()

    def say(self, method: str, params: Json | None = None) -> None:
        """Notify all of its clients, on their own streams."""
        message = {"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})}
        for stream in self.streams.values():
            stream.put_nowait(event(message))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        session = request.headers.get("mcp-session-id", "")
        self.headers.append(dict(request.headers))
        answer = _Answer(send)
        if self.accepts is not None and request.headers.get("authorization") != self.accepts:
            await answer.whole(401, None, {"www-authenticate": "Bearer"})
        elif session and session not in self.sessions:
            error: Json = {"code": -32600, "message": "Session not found"}
            await answer.whole(404, {"jsonrpc": "2.0", "id": None, "error": error})
        elif request.method == "DELETE":
            self.ended.append(session)
            self.sessions.pop(session)
            await answer.whole(200, None)
        elif request.method == "GET":
            await self._get(request, session, answer)
        else:
            message = json.loads(await request.body())
            self.received.append(message)
            if message.get("method") in _TAKEN:
                await self.takes.wait()
            if self.misdeed == "sessions" and not session and message["method"] != "initialize":
                error = {"code": -32600, "message": "Bad Request: Missing session ID"}
                await answer.whole(400, {"jsonrpc": "2.0", "id": None, "error": error})
                return
            if "method" not in message or "id" not in message:
                await answer.whole(202, None)
            elif message["method"] == "initialize":
                await self._initialize(message, answer)
            elif message["method"] == "tools/call":
                await self.tool(request, message, session, answer)
            elif message["method"] == "resources/subscribe":
                self.subscribed.add(message["params"]["uri"])
                await self.subscribes.wait()
                await answer.result(message, {})
            elif message["method"] == "resources/unsubscribe":
                self.subscribed.discard(message["params"]["uri"])
                await answer.result(message, {})
            else:
                await answer.result(message, {"tools": []})

    async def _initialize(self, message: Json, answer: "_Answer") -> None:
        match self.misdeed:
            case "html":
                await answer.begin(200, "text/html")
                await answer.piece(b"<html>Sign in</html>", more=False)
            case "302":
                await answer.whole(302, None, {"location": "https://elsewhere.example/mcp"})
            case "307":
                await answer.whole(307, None, {"location": "http://elsewhere.example/mcp"})
            case "401" | "404" | "502":
                await answer.whole(int(self.misdeed), None)
            case "old":
                # What it writes is no message.
                await answer.begin(400, "text/plain")
                await answer.piece(b"Bad Request", more=False)
            case "silent":
                await asyncio.Event().wait()
            case "version":
                await answer.result(message, {"protocolVersion": "1999-01-01"})
            case _:
                session = f"s{len(self.sessions)}-{id(self)}"
                self.sessions[session] = message["params"]
                capabilities: Json = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
                result = {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": capabilities,
                    "serverInfo": {"name": "url", "version": "1"},
                }
                names = {} if self.misdeed == "stateless" else {"mcp-session-id": session}
                await answer.result(message, result, names)

    async def _get(self, request: Request, session: str, answer: "_Answer") -> None:
        if self.misdeed == "no route":
            await answer.begin(404, "text/html")
            await answer.piece(b"Cannot GET /mcp", more=False)
            return
        position = request.headers.get("last-event-id")
        if position is not None:
            self.resumed.append(position)
            self.resumed_at.append(asyncio.get_running_loop().time())
        if position is not None and position.startswith("again-"):
            await answer.begin(200, "text/event-stream")
            asked, times = (int(number) for number in position.split("-")[1:])
            said = event(result({"id": asked}, text("at last"))) if times == 3 else b""
            head = b"id: again-%d-%d\nretry: 0\ndata: \n\n" % (asked, times + 1)
            await answer.piece(head + said, more=False)
            return
        if position is not None and position.startswith("call-"):
            await answer.begin(200, "text/event-stream")
            message = {"id": int(position.removeprefix("call-"))}
            await answer.piece(event(result(message, text("the rest"))), more=False)
            return
        if self.misdeed == "no stream":
            await answer.whole(405, None)
            return
        stream = self.streams[session] = asyncio.Queue()
        await answer.begin(200, "text/event-stream")
        gone = asyncio.ensure_future(_gone(request))
        try:
            while True:
                piece = asyncio.ensure_future(stream.get())
                await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done() or not piece.result():
                    piece.cancel()
                    return
                await answer.piece(piece.result())
        finally:
            gone.cancel()
            await answer.piece(b"", more=False)

    async def tool(self, request: Request, message: Json, session: str, answer: "_Answer") -> None:
        name = message["params"]["name"]
        self.calls.append(name)
        match name:
            case "count":
                await answer.result(message, text(len(self.calls)))
            case "client":
                await answer.result(message, text(json.dumps(self.sessions[session])))
            case "params":
                await answer.result(message, text(json.dumps(message["params"])))
            case "log":
                await answer.begin(200, "text/event-stream")
                said = {"level": "info", "data": message["params"]["arguments"]["text"]}
                notified = {"jsonrpc": "2.0", "method": "notifications/message", "params": said}
                await answer.piece(event(notified))
                await answer.piece(event(result(message, text("logged"))), more=False)
            case "html":
                await answer.begin(200, "text/html")
                await answer.piece(b"<html>Sign in</html>", more=False)
            case "accepted":
                await answer.whole(202, None)
            case "302":
                await answer.whole(302, None, {"location": "https://elsewhere.example/mcp"})
            case "307":
                await answer.whole(307, None, {"location": "http://elsewhere.example/mcp"})
            case "refused":
                error = {"code": -32602, "message": "no such session of yours"}
                await answer.whole(400, {"jsonrpc": "2.0", "id": message["id"], "error": error})
            case "400" | "401" | "403" | "429" | "500" | "502" | "503":
                await answer.whole(int(name), None)
            case "refuses":
                # After its work, which the call counts. ID is its id.
                said = message["params"]["arguments"]
                await answer.begin(said["status"], "application/json", said["headers"])
                body = said["body"].replace("ID", str(message["id"])).encode()
                await answer.piece(body, more=False)
            case "silent":
                await asyncio.Event().wait()
            case "cut":
                await answer.begin(200, "text/event-stream")
                await answer.piece(b"event: message\ndata: {")
                raise Cut
            case "cut json":
                await answer.begin(200, "application/json", {"content-length": "100"})
                await answer.piece(b'{"jsonrpc":"2.0"')
                raise Cut
            case "nothing":
                await answer.begin(200, "text/event-stream")
                await answer.piece(b": nothing\n\n", more=False)
            case "resumable":
                await answer.begin(200, "text/event-stream")
                await answer.piece(b"id: call-%d\nretry: 1\ndata: \n\n" % message["id"])
                raise Cut
            case "again and again":
                # Each time there is an event, and no answer, and the next time may be at once.
                await answer.begin(200, "text/event-stream")
                await answer.piece(b"id: again-%d-0\nretry: 0\ndata: \n\n" % message["id"])
                raise Cut
            case "left open":
                await answer.begin(200, "text/event-stream")
                await answer.piece(event(result(message, text("answered"))))
                await self._keep_open(request)
            case "answered elsewhere":
                # On its own stream; of this response each call has another part.
                times = self.calls.count(name)
                if times > 1:
                    await answer.begin(200, "text/event-stream" if times > 2 else "text/json")
                    await answer.piece(b": wait\n\n")
                said = event(result(message, text("answered")))
                self.streams[session].put_nowait(said)
                await self._keep_open(request)
            case "dribbles":
                await answer.begin(400, "text/plain")
                gone = asyncio.ensure_future(_gone(request))
                while not gone.done():
                    await answer.piece(b"x")
                    await asyncio.wait({gone}, timeout=0.05)
            case "other id":
                await answer.whole(200, result({"id": 4711}, text("wrong")))
            case "given":
                # In place of ID and RESULT, as JSON, as an event, or on its own stream.
                arguments = message["params"]["arguments"]
                said = arguments["given"].replace("ID", str(message["id"])).encode("latin-1")
                if arguments["how"] == "json":
                    await answer.begin(200, "application/json")
                    await answer.piece(said, more=False)
                    return
                said = b"data: " + said + b"\n\n"
                await answer.begin(200, "text/event-stream")
                if arguments["how"] == "stream":
                    await answer.piece(b": wait\n\n")
                    self.streams[session].put_nowait(said)
                    await self._keep_open(request)
                else:
                    await answer.piece(said + event(result(message, text("later"))), more=False)
            case "malformed":
                wrong = {"jsonrpc": "2.0", "id": message["id"], "result": "no object"}
                await answer.whole(200, wrong)
            case "no json":
                await answer.begin(200, "application/json")
                await answer.piece(b"{", more=False)
            case "large":
                await answer.whole(200, result(message, text("x" * 5_000_000)))
            case "large event":
                await answer.begin(200, "text/event-stream")
                await answer.piece(event(result(message, text("x" * 5_000_000))), more=False)
            case "endless":
                await answer.begin(200, "text/event-stream")
                await answer.piece(b'data: {"jsonrpc":"2.0","id":%d,"result":"' % message["id"])
                for _ in range(400):
                    await answer.piece(b"x" * 1_000_000)
                raise Cut
            case _:
                raise AssertionError(name)

    async def _keep_open(self, request: Request) -> None:
        self.open += 1
        try:
            await asyncio.wait_for(_gone(request), 60)
        finally:
            self.open -= 1


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Answer:
    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self, status: int, kind: str, headers: dict[str, str] | None = None) -> None:
        fields = {"content-type": kind, **(headers or {})}
        start: Message = {"type": "http.response.start", "status": status}
        start["headers"] = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._send(start)

    async def piece(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(
        self, status: int, message: Json | None, headers: dict[str, str] | None = None
    ) -> None:
        await self.begin(status, "application/json", headers)
        await self.piece(json.dumps(message).encode() if message is not None else b"", more=False)

    async def result(
        self, message: Json, value: Json, headers: dict[str, str] | None = None
    ) -> None:
        await self.whole(200, result(message, value), headers)


def result(message: Json, value: Json) -> Json:
    return {"jsonrpc": "2.0", "id": message["id"], "result": value}


def event(message: Json) -> bytes:
    return b"event: message\ndata: " + json.dumps(message).encode() + b"\n\n"


def text(value: object) -> Json:
    return {"content": [{"type": "text", "text": str(value)}], "ofAnotherKind": {"kept": True}}
