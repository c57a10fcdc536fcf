"""What came of requests and messages that are not whole has a common bound in bytes.

The rule is the fifth of ``mcp_sessions.serve.open_connections``. Each message had a bound of its
own: 209 bodies of 3.9 MB that never ended took 874 MiB.
"""

import asyncio
import json
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from mcp_sessions import SessionPolicy
from mcp_sessions.serve.open_connections import (
    ConnectionLimits,
    Looked,
    OpenConnections,
    connection_limits,
)
from mcp_sessions.serve.protocols import LimitedHttp
from mcp_sessions.serve.uvicorn_server import HttpSettings, http_config
from tests.support.hostile import WITHIN, Setup, answer_on, hostile
from tests.support.serving import INITIALIZE, read_lines

LARGEST = 200_000
MOST = 1_000_000
MANY = 12

BOUNDS = ("--max-message", str(LARGEST), "--max-unread-bytes", str(MOST))

MASK = bytes(4)
"""Of zeros: a masked text looks as it is."""


class One:
    """A connection that only counts."""

    def __init__(self, table: OpenConnections, address: str) -> None:
        known = {"peername": (address, 4711)}
        self.transport: Any = SimpleNamespace(get_extra_info=known.get)
        self.looked = Looked()
        self.is_dropped = False
        self._table = table
        table.opened(self)

    def sends(self, size: int, sender: str | None = None) -> None:
        """Have as many bytes in sum.

        Args:
            sender: Whom a proxy names.
        """
        self._table.arrived(self, size, sender or self.looked.address)

    def drop(self) -> None:
        self.is_dropped = True

    def serve_only(self, paths: frozenset[str]) -> None: ...

    def waits(self) -> bool:
        return True

    def is_stuck(self) -> bool:
        return False

    def give_up(self) -> bool:
        return False


def table_of(most: int, largest: int) -> OpenConnections:
    policy = SessionPolicy(max_message=largest, max_unread_bytes=most)
    return OpenConnections(connection_limits([policy]), ())


def test_the_largest_of_the_address_with_most_bytes_goes() -> None:
    table = table_of(100, 50)
    other = One(table, "192.0.2.1")
    other.sends(40)
    many = [One(table, "192.0.2.2") for _ in range(5)]
    for one, size in zip(many, (10, 12, 11, 10, 10), strict=True):
        one.sends(size)
    assert not any(one.is_dropped for one in many)
    many[0].sends(18)
    assert [one.is_dropped for one in many] == [True, False, False, False, False]
    many[3].sends(27)
    assert [one.is_dropped for one in many] == [True, False, False, False, False]
    many[3].sends(50)
    assert [one.is_dropped for one in many] == [True, False, False, True, False]
    assert not other.is_dropped


def test_of_two_addresses_with_as_many_bytes_the_newest_goes() -> None:
    table = table_of(100, 50)
    first, second = One(table, "192.0.2.1"), One(table, "192.0.2.2")
    first.sends(50)
    second.sends(50)
    third = One(table, "192.0.2.3")
    third.sends(50)
    assert (first.is_dropped, second.is_dropped, third.is_dropped) == (False, False, True)


def test_what_is_whole_or_gone_counts_no_more() -> None:
    table = table_of(100, 50)
    for _ in range(10):
        one = One(table, "192.0.2.1")
        one.sends(50)
        one.sends(0)
        other = One(table, "192.0.2.1")
        other.sends(50)
        table.closed(other)
        assert not one.is_dropped and not other.is_dropped
    last = [One(table, "192.0.2.1") for _ in range(3)]
    for one in last:
        one.sends(50)
    assert sum(one.is_dropped for one in last) == 1


def test_a_client_of_a_proxy_is_the_address_that_the_proxy_names() -> None:
    table = table_of(100, 50)
    one, *many = [One(table, "10.0.0.1") for _ in range(4)]
    # Until the application has looked, it is the proxy.
    one.sends(5)
    one.sends(45, "203.0.113.1")
    for each in many:
        each.sends(20, "203.0.113.2")
    assert not one.is_dropped and sum(each.is_dropped for each in many) == 1


def test_a_body_counts_as_the_largest_message_at_most() -> None:
    """An application may pass on what it reads, in a route of its own. Nothing of it is kept."""
    table = table_of(100, 50)
    upload, other = One(table, "192.0.2.1"), One(table, "192.0.2.2")
    upload.sends(10_000)
    other.sends(50)
    assert not upload.is_dropped and not other.is_dropped


def test_two_messages_of_the_largest_size_can_always_come() -> None:
    table = table_of(100, 500)
    one, other = One(table, "192.0.2.1"), One(table, "192.0.2.1")
    one.sends(500)
    other.sends(500)
    assert not one.is_dropped and not other.is_dropped


async def test_a_request_that_is_refused_is_answered_and_whoever_reads_it_keeps_nothing() -> None:
    """Its client learns when to come again. No part of its body is held until it is gone."""
    reads, told = asyncio.Queue[int](), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            reads.put_nowait(len(message["body"]))
        told.set()

    limits = ConnectionLimits(
        max_message=1_000,
        max_unfinished=1_500,
        receive_timeout=60,
        slow_timeout=60,
        max_connections=None,
    )
    config = http_config(app, HttpSettings(limits=limits, log_level="error"))
    config.load()
    state = ServerState()

    def connected() -> asyncio.Protocol:
        return LimitedHttp(config=config, server_state=state, app_state={})

    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    async with server, asyncio.timeout(WITHIN):
        address = server.sockets[0].getsockname()
        reader, first = await asyncio.open_connection(*address)
        first.write(head + b"x" * 950)
        read = 0
        while read < 950:
            read += await reads.get()
        _, second = await asyncio.open_connection(*address)
        second.write(head + b"x" * 900)
        answer = await reader.read()
        await told.wait()
        first.close()
        second.close()
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n")


def initialize(size: int) -> bytes:
    """A body of as many bytes."""
    body = json.dumps(INITIALIZE).encode()
    return body + b" " * (size - len(body))


def chunked(setup: Setup) -> bytes:
    head = setup.post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    return head + b"%x\r\n" % LARGEST + b" " * (LARGEST - 10)


def framed(size: int, sent: int, *, is_first: bool, is_last: bool) -> bytes:
    opcode = (0x80 if is_last else 0) | (0x1 if is_first else 0)
    return bytes([opcode, 0x80 | 127]) + size.to_bytes(8, "big") + MASK + b" " * sent


HALF: dict[str, Callable[[Setup], bytes]] = {
    "bodies": lambda setup: setup.post(initialize(LARGEST))[:-10],
    "bodies in chunks": chunked,
    "frames": lambda setup: framed(LARGEST, LARGEST - 10, is_first=True, is_last=True),
    "fragments": lambda setup: (
        framed(LARGEST // 2, LARGEST // 2, is_first=True, is_last=False)
        + framed(LARGEST // 2 - 10, LARGEST // 2 - 10, is_first=False, is_last=False)
    ),
    "requests that wait for one before them": lambda setup: (
        setup.post(initialize(LARGEST)) + setup.post(initialize(LARGEST))[:-10]
    ),
}


def until_gone(what: str, sockets: list[socket.socket], count: int) -> None:
    """Wait until the server has closed as many of them."""
    until, gone = time.monotonic() + 2 * WITHIN, 0
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        while gone < count:
            assert time.monotonic() < until, (what, gone)
            for key, _ in selector.select(1):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    is_open = bool(key.fileobj.recv(65_536))
                except ConnectionError:
                    is_open = False
                if not is_open:
                    selector.unregister(key.fileobj)
                    gone += 1


@pytest.mark.timeout(300)
def test_what_is_not_whole_has_a_common_bound(tmp_path: Path) -> None:
    """One address sends much that never ends. Another one's request comes to its end."""
    with hostile(tmp_path, *BOUNDS) as setup:
        other = socket.socket()
        setup.sockets.append(other)
        other.bind(("127.0.0.2", 0))
        other.settimeout(WITHIN)
        other.connect(("127.0.0.1", setup.port))
        whole = setup.post(initialize(LARGEST))
        other.sendall(whole[:-10])
        for what, half in HALF.items():
            is_websocket = what in ("frames", "fragments")
            many = [setup.websocket() if is_websocket else setup.connect() for _ in range(MANY)]
            for sock in many:
                try:
                    sock.sendall(half(setup))
                except ConnectionError:
                    continue
            # Each of them has almost LARGEST bytes.
            until_gone(what, many, MANY - MOST // LARGEST)
            for sock in many:
                sock.close()
        other.sendall(whole[-10:])
        assert answer_on(other).startswith(b"HTTP/1.1 200")
        setup.health()
        while "dispatch.history: session" in (line := read_lines(setup.process, 1)):
            continue
        assert "refused: too many bytes came of what was not whole" in line
        rest = setup.log()
        assert "Traceback" not in rest, rest
