"""A URL's answers: responses as bytes on real sockets, damaged in a message, an event, a header or
anywhere.

The end of any response is the end of the request: each call gets an answer. A session next to it is
served.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from mcp_sessions import HTTPServer
from tests.fuzz import answers
from tests.fuzz.fuzzer import WITHIN, Fuzzer
from tests.fuzz.hostile import Hostile, shown
from tests.fuzz.served import Good, Served, answer_to, served
from tests.support.raw import Json, RawClient, at_most

HEADERS = (
    b"Content-Encoding: gzip",
    b"Content-Encoding: br, gzip",
    b"Content-Type: text/html",
    b"Content-Type: text/event-stream; charset=\xff",
    b"Content-Type:",
    b"Mcp-Session-Id: \xff\xfe",
    b"Mcp-Session-Id: " + b"x" * 9_000,
    b"Set-Cookie: a=" + b"b" * 4_000,
    b"Set-Cookie: \xff=\xfe; Path=/; Max-Age=" + b"9" * 5_000,
    b"Set-Cookie: =; Expires=Wed, 99 Foo 9999 99:99:99 GMT",
    b"Retry-After: " + b"9" * 5_000,
    b"Retry-After: -1",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: " + b"9" * 5_000,
    b"Location: http://127.0.0.1:1/mcp",
    b"Location: \xff",
    b"WWW-Authenticate: Bearer \xff",
    b"X: " + b"y" * 70_000,
)
FIELDS = (
    b"retry: " + b"9" * 5_000,
    b"retry: -1",
    b"retry: 0",
    b"id: \x00",
    b"id: " + b"9" * 5_000,
    b"id: call-\xff",
    b"id",
    b"event: \xff",
    b"event: error",
    b":" + b"c" * 70_000,
    b"data",
    b"data:",
    b"data: x",
    b"\xef\xbb\xbfdata: {}",
    b"foo: bar",
    b"\x00",
)
STATUSES = (
    b"200 OK", b"202 Accepted", b"204 No Content", b"206 X", b"302 Found", b"307 X", b"400 X",
    b"401 X", b"403 X", b"404 X", b"408 X", b"409 X", b"429 X", b"500 X", b"502 X", b"503 X",
    b"999 X", b"100 Continue", b"101 X", b"0 X", b"-1 X", b"2e2 X", b"", b"200",
)  # fmt: skip


class Misleading:
    """A server at a URL that answers calls of ``say`` with the bytes that it was given for them."""

    def __init__(self) -> None:
        self.given: dict[str, list[bytes]] = {}
        """By name: the pieces of a response. ``@ID@`` in them is the id of the request."""

        self.stream: list[bytes] = []
        """The response to a GET, if it is to be any."""

        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            sizes = [line for line in lines if line.startswith(b"content-length:")]
            length = int(sizes[0].partition(b":")[2]) if sizes else 0
            body = await reader.readexactly(length)
            for piece in self._response(head, body):
                writer.write(piece)
                await writer.drain()
                # So that it comes by itself.
                await asyncio.sleep(0.001)
            writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The layer left, as it may; or this is the end.
        finally:
            writer.close()

    def _response(self, head: bytes, body: bytes) -> list[bytes]:
        if head.startswith(b"GET"):
            return self.stream or [response(b"", status=b"405 X")]
        message: Json = json.loads(body or b"{}")
        if "id" not in message or "method" not in message:
            return [response(b"", status=b"202 Accepted")]
        params: Json = message.get("params") or {}
        arguments: Json = params.get("arguments") or {}
        pieces = self.given.pop(str(arguments.get("given")), None)
        if pieces is not None:
            request_id = json.dumps(message["id"]).encode()
            return [piece.replace(answers.ID, request_id) for piece in pieces]
        result: Json = {"content": [{"type": "text", "text": "good"}]}
        names = b""
        if message["method"] == "initialize":
            capabilities: Json = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
            version = message["params"]["protocolVersion"]
            info = {"name": "url", "version": "1"}
            result = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
            names = b"Mcp-Session-Id: s\r\n"
        if message["method"] == "server/discover":
            return [response(b"Bad Request", status=b"400 X", kind=b"text/plain")]
        whole = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        return [response(whole.encode(), names)]


def response(
    body: bytes,
    headers: bytes = b"",
    *,
    status: bytes = b"200 OK",
    kind: bytes = b"application/json",
    length: bool = True,
) -> bytes:
    size = b"Content-Length: %d\r\n" % len(body) if length else b""
    head = b"Content-Type: " + kind + b"\r\nConnection: close\r\n" + size + headers
    return b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + body


class UrlDoor:
    """A served layer over a URL.

    Args:
        target: It.
        server: The server at the URL.
    """

    def __init__(self, target: Served, server: Misleading) -> None:
        self._target = target
        self._server = server
        self._good = Good(target.carrier, "good", {}, lambda result: bool(result["content"]))

    async def expect_served(self) -> None:
        self._server.stream = []
        await self._good.expect_served()

    async def play(self, hostile: Hostile) -> None:
        self._server.stream = streamed(hostile) if hostile.chance(0.3) else []
        capabilities: Json = {"roots": {}} if hostile.chance(0.5) else {}
        client = RawClient(self._target.carrier, capabilities=capabilities)
        await at_most(WITHIN, client.initialize())
        given = [drawn(hostile) for _ in range(hostile.random.randint(1, 4))]
        async with asyncio.TaskGroup() as tasks:
            for number, pieces in enumerate(given):
                tasks.create_task(self._call(client, str(number), pieces))
        await client.delete().done()

    async def _call(self, client: RawClient, name: str, pieces: list[bytes]) -> None:
        self._server.given[name] = pieces
        said = client.call("say", meta={"progressToken": 0}, given=name)
        what = b"".join(pieces)
        answer = await answer_to(said, what)
        # The session may be gone with another call; then the status says so.
        is_answered = answer is not None or said.reply.status == 404
        assert is_answered, f"{shown(what)} ended as {said.reply}"


def drawn(hostile: Hostile) -> list[bytes]:
    match hostile.random.randrange(6):
        case 0:
            whole = response(answers.answer(hostile))
        case 1 | 2:
            return streamed(hostile, answers.answer(hostile))
        case 3:
            headers = hostile.one_of(*HEADERS) + b"\r\n"
            whole = response(answers.answer(hostile), headers, length=hostile.chance(0.5))
        case 4:
            status = hostile.one_of(*STATUSES)
            body = hostile.one_of(answers.answer(hostile), hostile.noise(), b"", b"<html>x</html>")
            kind = hostile.one_of(b"application/json", b"text/html", b"text/event-stream", b"")
            whole = response(body, status=status, kind=kind)
        case _:
            whole = response(answers.answer(hostile))
            whole = hostile.damaged(whole, *streamed(hostile))
    return hostile.pieces(whole)[:500]


def streamed(hostile: Hostile, *lines: bytes) -> list[bytes]:
    """The pieces of a stream of events: something unasked, and then these lines."""
    said = [answers.unasked(hostile) for _ in range(hostile.random.choice((0, 1, 3)))]
    body = b"".join(event(hostile, line) for line in [*said, *lines])
    if hostile.chance(0.2):
        body = hostile.damaged(body, event(hostile, hostile.noise()))
    if hostile.chance(0.1):
        # Chunks that are none.
        sizes = hostile.one_of(b"-1", b"zz", b"f" * 20, b"5;x=\xff", b"")
        chunked = b"Transfer-Encoding: chunked\r\n"
        body = sizes + b"\r\n" + body + b"\r\n" + hostile.one_of(b"0\r\n\r\n", b"")
        return [response(body, chunked, kind=b"text/event-stream", length=False)]
    return hostile.pieces(response(body, kind=b"text/event-stream", length=False))[:500]


def event(hostile: Hostile, line: bytes) -> bytes:
    end = hostile.one_of(b"\n", b"\n", b"\r\n", b"\r")
    fields = [b"data: " + part for part in line.split(b"\n")]
    if hostile.chance(0.3):
        fields.insert(hostile.random.randint(0, len(fields)), hostile.one_of(*FIELDS))
    return end.join([*fields, b"", b""])


@asynccontextmanager
async def _open() -> AsyncGenerator[UrlDoor]:
    server = Misleading()
    connections = set[Any]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        connections.add(task)
        try:
            await server.serve(reader, writer)
        finally:
            connections.discard(task)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{server.port}/mcp"
    try:
        async with served(HTTPServer(url, child_idle=2, silence=10)) as target:
            yield UrlDoor(target, server)
    finally:
        listening.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


URL = Fuzzer("url", _open)
