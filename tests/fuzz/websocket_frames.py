"""WebSocket: frames made by hand on real sockets, damaged in a message, a frame, or anywhere.

Each request that was sent whole before any frame was damaged gets an answer, or the
connection's end. So is a last one, after everything. A peer that sends and reads nothing gets no
more memory than the policy says.
"""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

from tests.fuzz import messages
from tests.fuzz.echo import echo_server
from tests.fuzz.fuzzer import WITHIN, Fuzzer
from tests.fuzz.hostile import Hostile, shown
from tests.fuzz.served import POLICY, Good, Served, served
from tests.support.raw import Json

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA

UNREAD_BOUND = POLICY["max_unread_bytes"] + POLICY["send_buffer"] + 2 * POLICY["max_message"]
"""Bytes that may wait for one peer: what the policy says, and the messages that are being sent."""

FLOOD = 3_000_000
"""Bytes that a peer sends that reads nothing: more than the system keeps, and the bound."""

FLOOD_FRAMES = 20_000
"""Frames of such a peer: each takes time to be read."""


class WebSocketDoor:
    def __init__(self, target: Served) -> None:
        self._target = target
        right: Json = {"text": "good"}
        self._good = Good(
            target.carrier, "echo", right, lambda result: result["structuredContent"] == right
        )

    async def expect_served(self) -> None:
        await self._good.expect_served()

    async def play(self, hostile: Hostile) -> None:
        if hostile.chance(0.03):
            await self._flood(hostile)
            return
        peers = [
            self._converse(Hostile(hostile.fork())) for _ in range(hostile.random.randint(1, 3))
        ]
        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(peer)

    async def _converse(self, hostile: Hostile) -> None:
        async with connected(self._target.port) as (reader, writer):
            received = Received(reader)
            reading = asyncio.create_task(received.read())
            try:
                await self._talk(hostile, writer, received)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _talk(
        self, hostile: Hostile, writer: asyncio.StreamWriter, received: "Received"
    ) -> None:
        sent, pending_writes = list[bytes](), list[int]()
        is_whole, is_modern = True, hostile.chance(0.5)
        if not is_modern:
            asked = {"jsonrpc": "2.0", "id": 100, "method": "initialize"}
            sent.append(frames(json.dumps({**asked, "params": messages.REQUESTS["initialize"][0]})))
            pending_writes.append(100)
        for number in range(101, 101 + hostile.random.randint(1, 8)):
            request = messages.request(hostile, number, modern=is_modern)
            text = json.dumps(request)
            match hostile.random.randrange(10):
                case 0 | 1 | 2:
                    # With another id: whoever's request that is, it is none that is due.
                    request["id"] = hostile.one_of(-1, "z", 0.5, None, 2**60)
                    sent.append(frames(hostile.spoiled(request)))
                case 3:
                    sent.append(frames(hostile.spoiled(messages.other(hostile))))
                case 4:
                    sent.append(frames(text, hostile))
                    pending_writes += [number] if is_whole else []
                case 5:
                    sent.append(controls(hostile))
                case 6:
                    is_whole = False
                    sent.append(bad_frames(hostile, text))
                case 7 if hostile.chance(0.3):
                    is_whole = False
                    sent.append(hostile.damaged(frames(text), frames(hostile.noise()[:60_000])))
                case _:
                    sent.append(frames(text))
                    pending_writes += [number] if is_whole else []
        last = {"jsonrpc": "2.0", "id": 99, "method": "ping"}
        if is_whole:
            pending_writes.append(99)
            sent.append(frames(json.dumps(last)))
        what = b"".join(sent)
        try:
            for piece in hostile.pieces(what):
                writer.write(piece)
            await asyncio.wait_for(writer.drain(), WITHIN)
        except OSError:
            return  # The server ended it, as it may.
        if not is_whole and hostile.chance(0.5):
            writer.transport.abort()
            return
        if not is_whole:
            # Half a frame is due nothing: so this ends it.
            writer.write(frame(CLOSE, b"\x03\xe8"))
        try:
            async with asyncio.timeout(WITHIN if is_whole else 0.3):
                await received.has(pending_writes)
        except TimeoutError:
            missing = [each for each in pending_writes if each not in received.ids]
            assert not is_whole, (
                f"unanswered: {missing} of {shown(what)}; heard {received.messages}"
            )
        for message in received.messages:
            assert message.get("error", {}).get("code") != -32603, f"{message} to {shown(what)}"

    async def _flood(self, hostile: Hostile) -> None:
        """Send much that is answered, and read nothing."""
        ask = json.dumps(
            {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ECHO}
        ).encode()
        one = hostile.one_of(
            frame(PING, b"p" * 125),
            frame(PING, b"") + frame(PONG, b"") * 3,
            frame(TEXT, ask),
            frame(TEXT, b'{"jsonrpc":"2.0","id":1,"method":"ping"}'),
            frame(TEXT, b"{"),
        )
        async with connected(self._target.port) as (reader, writer):
            cast(Any, reader)._transport.pause_reading()
            most = 0
            try:
                for _ in range(0, min(FLOOD, FLOOD_FRAMES * len(one)), 50_000):
                    writer.write(one * (50_000 // len(one)))
                    await asyncio.wait_for(writer.drain(), 1)
                    most = max(most, self._target.unsent())
                    assert most <= UNREAD_BOUND, (
                        f"{most} bytes wait for a peer that sends {one!r:.200}"
                    )
                await self.expect_served()
                most = max(most, self._target.unsent())
            except (TimeoutError, OSError):
                # It is no longer read, or was cut: that is what it should be.
                most = max(most, self._target.unsent())
            assert most <= UNREAD_BOUND, f"{most} bytes wait for a peer that sends {one!r:.200}"


ECHO: Json = {"name": "echo", "arguments": {"text": "x" * 500}}


class Received:
    """The bytes of the server.

    Args:
        reader: Of its bytes, after the upgrade.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.messages: list[Json] = []
        self.ids: set[Any] = set()
        self._has_ended = False
        self._changed = asyncio.Event()

    async def has(self, ids: list[int]) -> None:
        """Wait for answers to all of these, or the connection's end."""
        while not (self._has_ended or self.ids.issuperset(ids)):
            self._changed.clear()
            await self._changed.wait()

    async def read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(2)
                length = head[1] & 0x7F
                if length == 126:
                    length = int.from_bytes(await self._reader.readexactly(2))
                elif length == 127:
                    length = int.from_bytes(await self._reader.readexactly(8))
                payload = await self._reader.readexactly(length)
                if head[0] & 0xF == TEXT:
                    message = json.loads(payload)
                    self.messages.append(message)
                    if "method" not in message:
                        self.ids.add(message.get("id"))
                    self._changed.set()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._has_ended = True
            self._changed.set()


@asynccontextmanager
async def connected(
    port: int,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = socket.socket()
    # So that what is not read is seen at the other end early.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    key = base64.b64encode(b"0" * 16).decode()
    try:
        writer.write(
            f"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Protocol: mcp\r\n\r\n".encode()
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN)
        assert b" 101 " in head, head
        yield reader, writer
    finally:
        writer.transport.abort()


def frame(
    opcode: int, payload: bytes, *, fin: bool = True, rsv: int = 0, mask: bytes | None = b"mask"
) -> bytes:
    head = bytes([fin << 7 | rsv << 4 | opcode])
    masked = 0x80 if mask is not None else 0
    if len(payload) < 126:
        head += bytes([masked | len(payload)])
    elif len(payload) < 65_536:
        head += bytes([masked | 126]) + len(payload).to_bytes(2)
    else:
        head += bytes([masked | 127]) + len(payload).to_bytes(8)
    if mask is None:
        return head + payload
    pad = (mask * (len(payload) // 4 + 1))[: len(payload)]
    mixed = int.from_bytes(payload) ^ int.from_bytes(pad)
    return head + mask + mixed.to_bytes(len(payload))


def frames(text: str | bytes, hostile: Hostile | None = None) -> bytes:
    """A message: in one frame, or as fragments with control frames between them."""
    data = text.encode() if isinstance(text, str) else text
    if hostile is None:
        return frame(TEXT, data)
    cuts = sorted(hostile.random.randint(0, len(data)) for _ in range(hostile.random.randint(1, 4)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole = b""
    for number, part in enumerate(parts):
        opcode, fin = (TEXT if number == 0 else 0), number == len(parts) - 1
        whole += frame(opcode, part, fin=fin) + (b"" if fin else frame(PING, b"between"))
    return whole


def controls(hostile: Hostile) -> bytes:
    payload = hostile.random.randbytes(hostile.random.choice((0, 1, 125)))
    return frame(hostile.one_of(PING, PONG), payload) * hostile.random.choice((1, 3, 200))


def bad_frames(hostile: Hostile, text: str) -> bytes:
    data = text.encode()
    big = POLICY["max_message"] + 1
    close = hostile.one_of(
        b"\x03", b"\x00\x00", b"\x03\xed", b"\x03\xee", b"\xff\xff", b"\x03\xe8\xff"
    )
    return hostile.one_of(
        lambda: frame(TEXT, data, mask=None),
        lambda: frame(TEXT, data, rsv=hostile.random.randint(1, 7)),
        lambda: frame(hostile.random.choice((3, 7, 11, 15)), data),
        lambda: frame(PING, b"x" * 126),
        lambda: frame(PING, b"x", fin=False),
        lambda: frame(0, data),
        lambda: frame(TEXT, data, fin=False) + frame(TEXT, data),
        lambda: frame(TEXT, data, fin=False) + frame(0, b"", fin=False) * 2_000,
        lambda: frame(TEXT, b"\xff\xfe"),
        lambda: frame(TEXT, data + b"\xed\xa0\x80"),
        lambda: frame(BINARY, data),
        lambda: frame(TEXT, b"x" * big),
        lambda: frame(TEXT, b"x" * (big // 2), fin=False) + frame(0, b"x" * big),
        lambda: b"\x81\xff" + hostile.one_of(b"\xff" * 8, b"\x80" + b"\0" * 7, b"\0" * 8) + b"mask",
        lambda: b"\x81\xfe\x00\x01maskx",
        lambda: frame(CLOSE, close),
        lambda: frame(CLOSE, b"\x03\xe8" + b"x" * 123),
        lambda: hostile.random.randbytes(hostile.random.randint(1, 300)),
    )()


@asynccontextmanager
async def _open() -> AsyncGenerator[WebSocketDoor]:
    async with served(echo_server()) as target:
        yield WebSocketDoor(target)


WEBSOCKET = Fuzzer("websocket", _open)
