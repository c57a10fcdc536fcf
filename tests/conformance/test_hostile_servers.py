"""A server that hangs, lies, floods or sends garbage gives failed vectors, never a crash."""

import asyncio
import base64
import hashlib
import shlex
import socket
import struct
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import respx
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from mcp_sessions_conformance import runner
from mcp_sessions_conformance.http_peer import HttpPeer
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.report import as_json, as_text
from mcp_sessions_conformance.runner import Outcome, Run, Selection, play_one, run
from mcp_sessions_conformance.targets import parse_target
from tests.conformance.conftest import way

HASTY = Limits(
    wait=0.4,
    start=0.6,
    end=0.3,
    quiet=0.05,
    max_messages=200,
    max_bytes=1_000_000,
)
SOME = frozenset({"start-answers-with-an-id", "sessions-are-optional", "events-carry-an-id"})

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes, *, kind: str = "application/json", head: str = "") -> bytes:
    fields = f"content-type: {kind}\r\ncontent-length: {len(body)}\r\nmcp-session-id: x\r\n{head}"
    return f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode() + body


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    return


def says(answer: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            writer.write(answer)
            await writer.drain()

    return talk


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An event stream without end."""
    await reader.read(65_536)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    message = b'data: {"jsonrpc":"2.0","method":"notifications/x","params":{}}\n\n'
    while True:
        writer.write(message * 100)
        await writer.drain()


async def never_ends_a_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65_536)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ")
    while True:
        writer.write(b"x" * 1_000_000)
        await writer.drain()


DEEP = b"[" * 100_000

SERVERS: dict[str, Talk] = {
    "says nothing": says_nothing,
    "hangs up": hangs_up,
    "no HTTP": says(b"\x00\xff garbage \r\n\r\n"),
    "half a head": says(b"HTTP/1.1 200 OK\r\ncontent-le"),
    "no JSON": says(response(b"<html>hello</html>")),
    "HTML": says(response(b"<html>hello</html>", kind="text/html")),
    "no JSON-RPC": says(response(b"[1, 2, 3]")),
    "JSON of no type": says(response(b"null")),
    "deep JSON": says(response(DEEP)),
    "no result": says(response(b'{"jsonrpc":"2.0","id":0}')),
    "odd result": says(response(b'{"jsonrpc":"2.0","id":0,"result":[]}')),
    "odd error": says(response(b'{"jsonrpc":"2.0","id":0,"error":"no"}')),
    "an answer to another": says(response(b'{"jsonrpc":"2.0","id":99,"result":{}}')),
    "no UTF-8": says(response(b"data: \xff\xfe\n\n", kind="text/event-stream")),
    "an empty stream": says(response(b"", kind="text/event-stream")),
    "redirects": says(b"HTTP/1.1 307 Moved\r\nlocation: /mcp\r\ncontent-length: 0\r\n\r\n"),
    "fails": says(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"),
    "floods": floods,
    "a line without end": never_ends_a_line,
}


@asynccontextmanager
async def tcp(talk: Talk) -> AsyncGenerator[int]:
    """A server that does nothing but ``talk``; its port."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except OSError:
            pass  # the runner left: that is what it should do
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def outcome(target: str, vectors: list[Vector]) -> Run:
    begun = time.monotonic()
    done = await run([parse_target(target)], vectors, selection=Selection(only=SOME), limits=HASTY)
    assert time.monotonic() - begun < 50
    assert done.outcomes
    assert as_text(done)
    assert as_json(done)["conformant"] == done.is_conformant
    return done


async def expect_failures(target: str, vectors: list[Vector]) -> None:
    """No vector passes, and no failure is a line of the runner."""
    done = await outcome(target, vectors)
    assert done.count("passed") == 0, as_text(done)
    assert ".py" not in as_text(done)


TRANSPORT_FAULTS: list[Exception] = [
    httpx.ConnectTimeout("no connection"),
    httpx.ReadTimeout("silent"),
    httpx.WriteError("broken pipe"),
    httpx.RemoteProtocolError("no HTTP"),
    httpx.LocalProtocolError("no header"),
    httpx.DecodingError("no gzip"),
    httpx.TooManyRedirects("round and round"),
    httpx.UnsupportedProtocol("no scheme"),
    httpx.InvalidURL("no URL"),
    httpx.StreamClosed(),
    OSError("no route"),
]
"""The exceptions of the HTTP client: a socket causes only some of them."""


class BreaksOff(httpx.AsyncByteStream):
    """An event stream that ends with an error after its first bytes."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"event: message\ndata: {"
        raise self.error


@pytest.mark.parametrize("when", ["before the response", "in the response"])
@pytest.mark.parametrize("error", TRANSPORT_FAULTS, ids=lambda error: type(error).__name__)
async def test_what_the_http_client_raises(
    error: Exception, when: str, vectors: list[Vector], respx_mock: respx.MockRouter
) -> None:
    """The vector fails with the error's name, and not with a line of the runner."""
    url = "http://server.test/mcp"

    def answer(request: httpx.Request) -> httpx.Response:
        if when == "before the response":
            raise error
        head = {"content-type": "text/event-stream", "mcp-session-id": "x"}
        return httpx.Response(200, headers=head, stream=BreaksOff(error))

    route = respx_mock.route(url=url).mock(side_effect=answer)
    vector = next(v for v in vectors if v.id == "start-answers-with-an-id")
    done = await play_one(vector, way("http/handshake", url, HASTY), None, HASTY)
    assert route.called
    assert done.verdict == "failure"
    assert f"no answer to initialize: {type(error).__name__}" in done.sentence
    assert ".py" not in done.sentence


@pytest.mark.full
@pytest.mark.parametrize("name", SERVERS)
async def test_over_http(name: str, vectors: list[Vector]) -> None:
    async with tcp(SERVERS[name]) as port:
        await expect_failures(f"http://127.0.0.1:{port}/mcp", vectors)


@pytest.mark.parametrize("name", ["says nothing", "hangs up", "no HTTP", "HTML", "fails"])
async def test_what_is_no_websocket(name: str, vectors: list[Vector]) -> None:
    async with tcp(SERVERS[name]) as port:
        await expect_failures(f"ws://127.0.0.1:{port}/mcp", vectors)


async def floods_frames(socket: ServerConnection) -> None:
    while True:
        await socket.send('{"jsonrpc":"2.0","method":"notifications/x"}')


def answers(frame: str | bytes) -> Callable[[ServerConnection], Awaitable[None]]:
    async def talk(socket: ServerConnection) -> None:
        async for _ in socket:
            await socket.send(frame)

    return talk


async def closes(socket: ServerConnection) -> None:
    await socket.recv()
    await socket.close(4999, "no")


async def ignores(socket: ServerConnection) -> None:
    async for _ in socket:
        pass


SOCKETS: dict[str, Callable[[ServerConnection], Awaitable[None]]] = {
    "garbage": answers("garbage"),
    "binary": answers(b"\x00"),
    "no result": answers('{"jsonrpc":"2.0","id":0}'),
    "closes": closes,
    "ignores": ignores,
    "floods": floods_frames,
}


@pytest.mark.full
@pytest.mark.parametrize("name", SOCKETS)
async def test_over_websocket(name: str, vectors: list[Vector]) -> None:
    async with serve(SOCKETS[name], "127.0.0.1", 0, subprotocols=[Subprotocol("mcp")]) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        await expect_failures(f"ws://127.0.0.1:{port}/mcp", vectors)


PROGRAMS = {
    "ends at once": "pass",
    "ends with an error": "raise SystemExit('broken')",
    "garbage": "import sys\nfor _ in sys.stdin: print('garbage', flush=True)",
    "floods": 'while True: print(\'{"jsonrpc":"2.0","method":"notifications/x"}\')',
    "ignores": "import sys\nfor _ in sys.stdin: pass",
    "does not read": "import time; time.sleep(60)",
    "no UTF-8": "import sys\nfor _ in sys.stdin: sys.stdout.buffer.write(b'\\xff\\xfe\\n'); "
    "sys.stdout.flush()",
    "a line without end": "import sys\nwhile True: sys.stdout.write('x' * 100000)",
    "ends at the third": "import os, sys\nfor n, _ in enumerate(sys.stdin):\n if n: os._exit(9)",
    "closes its output": "import os, sys\nos.close(1)\nfor _ in sys.stdin: pass",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
async def test_over_a_pipe(name: str, vectors: list[Vector]) -> None:
    await expect_failures(f"stdio:{shlex.join([sys.executable, '-c', PROGRAMS[name]])}", vectors)


async def test_a_program_that_is_not_there(vectors: list[Vector]) -> None:
    done = await outcome("stdio:/no/such/program", vectors)
    assert done.count("passed") == 0
    assert all("cannot be started" in o.sentence for o in done.outcomes)


async def test_what_a_server_that_always_hangs_was_not_asked_is_not_played(
    vectors: list[Vector],
) -> None:
    """It does not hold the runner for ever, and what nobody looked at has not failed."""
    limits = Limits(wait=0.1, give_up=3)
    async with tcp(says_nothing) as port:
        done = await run([parse_target(f"http://127.0.0.1:{port}/mcp")], vectors, limits=limits)
    assert len(done.outcomes) == 6, "three in each era"
    assert len(done.not_played) > 200
    assert {entry.reason for entry in done.not_played} == {
        "the server said nothing in time in 3 vectors in a row"
    }
    assert done.is_complete and not done.is_conformant
    assert f"{len(done.not_played)} not played" in as_text(done)
    assert as_json(done)["counts"]["notPlayed"] == len(done.not_played)


async def test_a_server_that_answers_now_and_then_is_played_to_the_end(
    vectors: list[Vector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long all of it takes: no budget is hidden in the runner."""
    played = 0

    async def every_third_is_answered(vector: Vector, *_: Any) -> Outcome:
        nonlocal played
        played += 1
        return Outcome(vector, "", "failure", "it hung", 1e6, in_vain=played % 3 != 0)

    monkeypatch.setattr(runner, "play_one", every_third_is_answered)
    limits = Limits(wait=0.2, give_up=3)
    async with tcp(hangs_up) as port:
        done = await run([parse_target(f"http://127.0.0.1:{port}/mcp")], vectors, limits=limits)
    assert played == len(done.outcomes) > 200
    assert done.not_played == []


async def test_with_a_bound_of_0_everything_is_played(vectors: list[Vector]) -> None:
    """Once, nothing was played after the first vector in which the server said something."""
    limits = Limits(wait=0.2, quiet=0.02, give_up=0)
    async with tcp(hangs_up) as port:
        target = parse_target(f"http://127.0.0.1:{port}/mcp")
        done = await run([target], vectors[:20], limits=limits)
    assert len(done.outcomes) > 20 and done.not_played == []


def websocket_head(key: bytes) -> bytes:
    """The answer to the upgrade that was asked for with that key."""
    accept = base64.b64encode(
        hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
    )
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Protocol: mcp\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


def after_the_upgrade(then: Talk) -> Talk:
    """A server that takes the upgrade, and then does as it likes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return  # the runner looks whether the port is open
        (line,) = [
            line for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key")
        ]
        writer.write(websocket_head(line.partition(b":")[2].strip()))
        await then(reader, writer)

    return talk


async def closes_1009_and_drains(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """It says that a message is too big, and reads on without an end; it never hangs up."""
    await reader.read(1)
    writer.write(b"\x88\x02" + (1009).to_bytes(2, "big"))
    while await reader.read(65_536):
        pass


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def sends_no_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff\xff garbage \x00" * 100)
    await reader.read()


@pytest.mark.full
@pytest.mark.parametrize("then", [closes_1009_and_drains, resets, sends_no_frames])
async def test_what_comes_after_the_upgrade(then: Talk, vectors: list[Vector]) -> None:
    """The vector of a huge message among them: it is being written while the server closes."""
    some = [*SOME, "a-huge-message-closes-1009"]
    begun = time.monotonic()
    async with tcp(after_the_upgrade(then)) as port:
        done = await run(
            [parse_target(f"ws://127.0.0.1:{port}/mcp")],
            vectors,
            selection=Selection(only=frozenset(some)),
            limits=HASTY,
        )
    assert time.monotonic() - begun < 50
    assert len(done.outcomes) == 2 * len(some) and done.count("passed") == 0, as_text(done)
    assert not any(".py" in outcome.sentence for outcome in done.outcomes), as_text(done)


@pytest.mark.full
async def test_a_server_that_is_killed_in_the_middle(vectors: list[Vector]) -> None:
    """The vectors after it fail, or are not played; there is a report."""
    async with tcp(hangs_up) as port:
        pass
    done = await run([parse_target(f"http://127.0.0.1:{port}/mcp")], vectors[:40], limits=HASTY)
    assert done.is_complete and done.not_played
    assert "Connect" in done.outcomes[0].sentence


@pytest.mark.parametrize("error", [asyncio.CancelledError(), AssertionError("odd"), ValueError()])
@pytest.mark.parametrize("step", ["request", "close"])
async def test_what_a_library_raises_ends_one_vector(
    step: str,
    error: BaseException,
    vectors: list[Vector],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a cancellation that nobody asked for."""

    async def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(HttpPeer, step, broken)
    async with tcp(says(response(b"null"))) as port:
        done = await outcome(f"http://127.0.0.1:{port}/mcp", vectors)
    assert len(done.outcomes) == 2 * len(SOME) and done.count("passed") == 0


async def test_of_a_flood_the_beginning_and_the_end_are_kept(vectors: list[Vector]) -> None:
    async with tcp(floods) as port:
        done = await outcome(f"http://127.0.0.1:{port}/mcp", vectors)
    wire = done.outcomes[0].wire
    assert "initialize" in wire[0]
    assert any("lines left out" in line for line in wire)
    assert not wire[-1].endswith("left out")


async def test_an_initialize_without_an_id_is_named(vectors: list[Vector]) -> None:
    """HTL1. The next answers would be 400 or 404, without the reason."""
    result = b'{"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"2025-11-25"}}'
    head = f"content-type: application/json\r\ncontent-length: {len(result)}\r\n\r\n"
    async with tcp(says(b"HTTP/1.1 200 OK\r\n" + head.encode() + result)) as port:
        done = await outcome(f"http://127.0.0.1:{port}/mcp", vectors)
    said = [o.sentence for o in done.outcomes if o.way == "http/handshake"]
    assert said and all("no header Mcp-Session-Id" in sentence for sentence in said), said
