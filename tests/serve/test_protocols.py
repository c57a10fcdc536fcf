"""What one WebSocket sends neither grows the process nor keeps others waiting.

The rules are those of ``mcp_sessions.serve.protocols``.
"""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from mcp_sessions.serve.open_connections import ConnectionLimits
from mcp_sessions.serve.protocols import LimitedHttp
from mcp_sessions.serve.uvicorn_server import HttpSettings, http_config
from tests.serve.test_delayed_refusals import GOOD, UPGRADE, expect_answered, served
from tests.support.hostile import WITHIN, closed_by_peer, hostile
from tests.support.raw import at_most

MASK = bytes([1, 2, 3, 4])
FIN, TEXT, CLOSE, PING, PONG = 0x80, 0x1, 0x8, 0x9, 0xA
FLOOD = 2.0
"""Seconds for which there is nothing else."""


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    assert len(payload) < 126
    masked = bytes(byte ^ MASK[n % 4] for n, byte in enumerate(payload))
    return bytes([opcode | (FIN if fin else 0), 0x80 | len(payload)]) + MASK + masked


FLOODS: dict[str, tuple[bytes, bytes]] = {
    "pings": (b"", frame(PING)),
    "long pings": (b"", frame(PING, b"x" * 125)),
    "pongs": (b"", frame(PONG)),
    "empty fragments": (frame(TEXT, fin=False), frame(0, fin=False)),
    "fragments of two bytes": (frame(TEXT, fin=False), frame(0, b"xy", fin=False)),
    "pings within a message": (
        frame(TEXT, fin=False),
        frame(PING) + frame(0, fin=False),
    ),
    "messages that are refused": (b"", frame(TEXT, b"{}")),
    "messages that are no JSON": (b"", frame(TEXT, b"{")),
}


@contextmanager
def flooding(sock: socket.socket, sent: bytes) -> Generator[None]:
    """Sends as much as the server reads, and reads nothing."""
    has_ended = threading.Event()
    much = sent * (200_000 // len(sent))
    sock.settimeout(0.2)

    def flood() -> None:
        while not has_ended.is_set():
            try:
                sock.sendall(much)
            except TimeoutError:
                # It may be in the middle of a frame now: what follows has to wait as well.
                break
            except OSError:
                break

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.parametrize(
    "what",
    [name if name == "pings" else pytest.param(name, marks=pytest.mark.full) for name in FLOODS],
)
def test_a_flood_of_frames_keeps_nobody_waiting(what: str, tmp_path: Path) -> None:
    """Rules 1 to 3. Before, others waited for seconds, and the process grew to 450 MiB and more."""
    first, more = FLOODS[what]
    with hostile(tmp_path) as setup:
        sock = setup.websocket()
        before, longest = setup.resident(), 0.0
        sock.sendall(first)
        with flooding(sock, more):
            until = time.monotonic() + FLOOD
            while time.monotonic() < until:
                longest = max(longest, setup.health())
        assert longest < 1.5
        # The messages that were read at once, as objects, and their answers: 40 to 90 MiB, by how
        # much the socket gave. It does not grow after that.
        assert setup.resident() - before < (160 if what.startswith("messages") else 15)


def test_the_last_ping_is_answered_when_the_peer_reads_again(tmp_path: Path) -> None:
    """Rule 2: as RFC 6455, 5.5.3 allows."""
    with hostile(tmp_path) as setup:
        sock = setup.connect(receive_buffer=4_096)
        sock.sendall(setup.upgrade())
        assert sock.recv(129 * 8).startswith(b"HTTP/1.1 101")
        # More than the buffers of both sides hold; nothing is read meanwhile.
        count = 50_000
        for first in range(0, count, 1_000):
            sock.sendall(b"".join(frame(PING, b"%120d" % n) for n in range(first, first + 1_000)))
        received, last = 0, b""
        while b"%120d" % (count - 1) not in last:
            chunk = sock.recv(65_536)
            assert chunk
            received += len(chunk)
            last = last[-200:] + chunk
        assert received < count * 122


def test_a_message_in_many_fragments_is_one_message(tmp_path: Path) -> None:
    with hostile(tmp_path) as setup:
        sock = setup.websocket()
        text = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'
        pieces = [frame(TEXT, text[:1], fin=False), frame(0, fin=False), frame(PING)]
        pieces += [frame(0, text[n : n + 1], fin=False) for n in range(1, len(text))]
        sock.sendall(b"".join(pieces) + frame(0))
        received = b""
        while b'"id":7' not in received:
            chunk = sock.recv(4_096)
            assert chunk
            received += chunk
        assert b"\x8a\x00" in received


def test_a_close_after_many_pings_is_answered(tmp_path: Path) -> None:
    with hostile(tmp_path) as setup:
        sock = setup.websocket()
        sock.sendall(frame(PING) * 5_000 + frame(CLOSE, b"\x03\xe8"))
        received = closed_by_peer(sock)
        assert received == b"\x8a\x00" * 5_000 + b"\x88\x02\x03\xe8"


EARLY: dict[str, tuple[bytes, bytes]] = {
    "a message": (frame(TEXT, b"{}"), b"\x81\x02{}"),
    "a ping": (frame(PING, b"x"), b"\x8a\x01x"),
    "a close": (frame(CLOSE, b"\x03\xe8"), b"\x88\x02\x03\xe8"),
    "no frame": (b"\xff" * 9, b"\x88"),
    "pings": (frame(PING, b"x") * 1_000, b"\x8a\x01x" * 1_000),
}


@pytest.mark.parametrize("what", EARLY)
async def test_a_frame_before_the_answer_to_the_handshake_waits_for_it(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 4. Before, a pong came before the answer, and what is no frame left a traceback."""
    sent, expected = EARLY[what]
    asked, has_come, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        assert (await receive())["type"] == "websocket.connect"
        asked.set()
        await has_come.wait()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        ended.set()

    async with served(app=app) as setup:
        reader, writer = await setup.send(UPGRADE)
        await asked.wait()
        writer.write(sent)
        # The server has read it when it has answered another connection.
        await expect_answered(await setup.send(GOOD))
        has_come.set()
        received = await reader.readuntil(b"\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 101")
        assert await reader.readexactly(len(expected)) == expected
        writer.close()
        await ended.wait()
    assert not caplog.records


async def test_a_peer_that_leaves_is_noticed_while_another_request_of_it_waits() -> None:
    """Rule 1 of HTTP. Before, an event stream stood until its next comment found nobody."""
    runs, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            runs.set()
            while (await receive())["type"] != "http.disconnect":
                continue
            left.set()
            return
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with served(app=app) as setup:
        stream = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
        _, writer = await setup.send(stream + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await at_most(WITHIN, runs.wait())
        # The server has read both when it has answered another connection.
        await expect_answered(await setup.send(GOOD))
        writer.transport.abort()
        await at_most(WITHIN, left.wait())


@pytest.mark.skipif(sys.platform != "linux", reason="an option of Linux")
async def test_the_system_ends_a_connection_whose_peer_is_gone() -> None:
    """SES14: a comment of a few bytes waits in the kernel, which would hold it for 15 minutes."""
    limits = ConnectionLimits(
        max_message=1,
        max_unfinished=1_000_000,
        receive_timeout=7.5,
        slow_timeout=1,
        max_connections=None,
    )
    served: list[LimitedHttp] = []
    found: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sock = served[0].transport.get_extra_info("socket")
        found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def connected() -> asyncio.Protocol:
        config = http_config(app, HttpSettings(limits=limits, log_level="error"))
        config.load()
        served.append(LimitedHttp(config=config, server_state=ServerState(), app_state={}))
        return served[-1]

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    async with server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        writer.close()
    assert found == [7_500]
