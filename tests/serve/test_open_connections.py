"""Whoever keeps connections open keeps nobody out: real sockets, and few file descriptors.

The rules are those of ``mcp_sessions.serve.open_connections``.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from mcp_sessions.policy import SessionPolicy
from mcp_sessions.serve.open_connections import Looked, OpenConnections, connection_limits
from tests.support.hostile import WITHIN, Setup, answer_on, closed_by_peer, hostile
from tests.support.modern import MODERN, envelope
from tests.support.serving import INITIALIZE, read_lines

pytestmark = pytest.mark.skipif(os.name != "posix", reason="has no limit of file descriptors")

BODY = json.dumps(INITIALIZE).encode()
OLD_WEBSOCKETS = int(version("websockets").partition(".")[0]) < 17
DESCRIPTORS = 64
MANY = 80

SAID = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
SPOKEN = bytes([0x81, 0x80 | len(SAID), 0, 0, 0, 0]) + SAID
"""A message on a WebSocket. Only a client that has sent one keeps its place."""


def first_and_others(cases: Mapping[str, object]) -> list[ParameterSet]:
    """The names of cases: each takes a process of its own, so that most are for the long run."""
    first, *others = cases
    return [pytest.param(first), *(pytest.param(name, marks=pytest.mark.full) for name in others)]


HELD: dict[str, Callable[[Setup], bytes]] = {
    "half a body": lambda setup: setup.post(BODY)[:-10],
    "half a header": lambda setup: setup.post(BODY)[:40],
    "nothing": lambda setup: b"",
    "a chunk of a body": lambda setup: (
        setup.post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        + b"ffff\r\n"
    ),
    "half a body that nobody reads": lambda setup: (
        setup.head("POST /healthz", "Content-Length: 1000") + b"x"
    ),
    "nothing after a request": lambda setup: setup.head("GET /healthz"),
    "half an upgrade": lambda setup: setup.upgrade()[:-2],
    "a WebSocket that says nothing": lambda setup: setup.upgrade(),
}


def session_of(answer: bytes) -> str:
    """The session that an answer to ``initialize`` names."""
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return answer.partition(b"mcp-session-id: ")[2].partition(b"\r\n")[0].decode()


def first_line(setup: Setup) -> str:
    """The first line of the log that is about no session."""
    while "dispatch.history: session" in (line := read_lines(setup.process, 1)):
        continue
    return line


@pytest.mark.parametrize("what", first_and_others(HELD))
def test_connections_that_wait_make_room_for_a_new_one(what: str, tmp_path: Path) -> None:
    """Rules 3 and 4: of as many as there are, and without a line for each."""
    with hostile(tmp_path, descriptors=DESCRIPTORS) as setup:
        for _ in range(MANY):
            setup.connect().sendall(HELD[what](setup))

        for _ in range(5):
            setup.health()
            assert setup.status(setup.post(BODY)) == b"200 OK"
        assert setup.descriptors() < DESCRIPTORS

        assert "closed while idle, to make room" in first_line(setup)
        rest = setup.log()
        assert "connections were" not in rest and "Traceback" not in rest, rest


def websocket(setup: Setup, sock: socket.socket) -> bytes:
    """One that has said something, if there is a place for it."""
    sock.sendall(setup.upgrade())
    answer = sock.recv(4_096)
    if answer.startswith(b"HTTP/1.1 101"):
        sock.sendall(SPOKEN)
    return answer


def get_stream(setup: Setup, sock: socket.socket) -> bytes:
    """The GET stream of a session that begins on the same connection."""
    sock.sendall(setup.post(BODY))
    answer = answer_on(sock)
    if answer.startswith(b"HTTP/1.1 503"):
        return answer
    accepts = ("Accept: text/event-stream", f"Mcp-Session-Id: {session_of(answer)}")
    sock.sendall(setup.head("GET /mcp", *accepts))
    return sock.recv(4_096)


def listen_stream(setup: Setup, sock: socket.socket) -> bytes:
    """A ``subscriptions/listen`` outside of sessions."""
    method, filters = "subscriptions/listen", {"toolsListChanged": True}
    params = {"notifications": filters, "_meta": envelope()}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    fields = (f"Mcp-Protocol-Version: {MODERN}", f"Mcp-Method: {method}")
    sock.sendall(setup.post(json.dumps(message).encode(), *fields))
    return sock.recv(4_096)


BUSY_NOW: dict[str, Callable[[Setup, socket.socket], bytes]] = {
    "GET streams": get_stream,
    "listen streams": listen_stream,
    "WebSockets": websocket,
}


@pytest.mark.parametrize("what", first_and_others(BUSY_NOW))
def test_health_checks_answer_while_all_connections_are_busy(what: str, tmp_path: Path) -> None:
    """Rule 3: others are asked to come back, and find a place when there is one."""
    with hostile(tmp_path, descriptors=DESCRIPTORS) as setup:
        opened = 0
        for _ in range(MANY):
            answer = BUSY_NOW[what](setup, setup.connect())
            is_served = answer.startswith((b"HTTP/1.1 101", b"HTTP/1.1 200"))
            opened += is_served
            assert is_served or b"retry-after: " in answer, answer
            assert is_served or answer.startswith(b"HTTP/1.1 503"), answer
        assert 20 < opened < DESCRIPTORS

        for _ in range(5):
            setup.health()
            assert setup.status(setup.post(BODY)) == b"503 Service Unavailable"
        for sock in setup.sockets:
            sock.close()
        until = time.monotonic() + WITHIN
        while setup.status(setup.post(BODY)) != b"200 OK":
            assert time.monotonic() < until

        assert "refused: all other connections are busy" in first_line(setup)
        rest = setup.log()
        assert "connections were" not in rest and "Traceback" not in rest, rest


@pytest.mark.parametrize("what", BUSY_NOW)
def test_busy_connections_of_one_address_keep_no_other_out(what: str, tmp_path: Path) -> None:
    """Rule 3: the address with most makes room. A health check costs nobody anything."""
    with hostile(tmp_path, "--max-connections", "6") as setup:
        many = [setup.connect() for _ in range(6)]
        for sock in many:
            assert BUSY_NOW[what](setup, sock).startswith((b"HTTP/1.1 101", b"HTTP/1.1 200"))
        setup.health()
        assert setup.status(setup.post(BODY)) == b"503 Service Unavailable"
        other = socket.socket()
        setup.sockets.append(other)
        other.bind(("127.0.0.2", 0))
        other.settimeout(WITHIN)
        other.connect(("127.0.0.1", setup.port))
        for _ in range(3):
            other.sendall(setup.post(BODY))
            assert answer_on(other).startswith(b"HTTP/1.1 200")
        closed_by_peer(many[0])
        for sock in many[1:]:
            sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                while sock.recv(65_536):
                    pass
                pytest.fail("it was cut")


def test_the_number_of_connections_can_be_bounded(tmp_path: Path) -> None:
    """Rule 3, ``max_connections``: the one that was silent for longest goes."""
    with hostile(tmp_path, "--max-connections", "3") as setup:
        first, *others = [setup.connect() for _ in range(3)]
        for sock in others:
            sock.sendall(setup.head("GET /healthz"))
            assert answer_on(sock).startswith(b"HTTP/1.1 200")

        setup.health()

        assert closed_by_peer(first) == b""
        for sock in others:
            sock.sendall(setup.head("GET /healthz"))
            assert answer_on(sock).startswith(b"HTTP/1.1 200")


def test_the_address_with_most_connections_makes_room(tmp_path: Path) -> None:
    """Rule 3: who opens many closes no connection of another address, however silent."""
    with hostile(tmp_path, "--max-connections", "6") as setup:
        other = socket.socket()
        setup.sockets.append(other)
        other.bind(("127.0.0.2", 0))
        other.settimeout(WITHIN)
        other.connect(("127.0.0.1", setup.port))
        setup.health()
        many = [setup.connect() for _ in range(12)]
        assert closed_by_peer(many[0]) == b""
        setup.health()

        other.sendall(setup.head("GET /healthz"))
        assert answer_on(other).startswith(b"HTTP/1.1 200")


def test_the_addresses_of_one_network_are_one_client() -> None:
    """Rule 3: with IPv6 one client has every address of its network (/64)."""
    limits = connection_limits([SessionPolicy(max_connections=3)])
    table, closed = OpenConnections(limits, ()), list[str]()

    def opens(address: str) -> None:
        known = {"peername": (address, 4711)}
        transport = SimpleNamespace(get_extra_info=known.get, abort=lambda: closed.append(address))
        one: Any = type("One", (), {"waits": staticmethod(lambda: True), "transport": transport})()
        one.looked = Looked()
        table.opened(one)

    for address in ("2001:db8:1::1", "2001:db8:2::1", "2001:db8:2::2", "2001:db8:3::1"):
        opens(address)
    assert closed == ["2001:db8:2::1"]


LATE: dict[str, tuple[Callable[[Setup], bytes], bytes]] = {
    "a header": (lambda setup: setup.post(BODY)[:40], b"HTTP/1.1 408"),
    "a body": (lambda setup: setup.post(BODY)[:-10], b"HTTP/1.1 408"),
    "a chunk": (HELD["a chunk of a body"], b"HTTP/1.1 408"),
    "a second header": (
        lambda setup: setup.head("GET /healthz") + setup.head("GET /healthz")[:20],
        b"HTTP/1.1 200",
    ),
    "a body that nobody reads": (HELD["half a body that nobody reads"], b"HTTP/1.1 405"),
}


@pytest.mark.parametrize("what", first_and_others(LATE))
def test_a_request_that_comes_a_byte_at_a_time_is_given_up(what: str, tmp_path: Path) -> None:
    """Rule 1: it is the whole of it that has to be here, however often something comes."""
    begun, answer = LATE[what]
    with hostile(tmp_path, "--receive-timeout", "1") as setup:
        sock = setup.connect()
        sock.sendall(begun(setup))
        sock.settimeout(0.2)
        received, until = b"", time.monotonic() + WITHIN
        while time.monotonic() < until:
            try:
                sock.sendall(b"1")
                if not (chunk := sock.recv(4_096)):
                    break
                received += chunk
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() < until
        assert received.startswith(answer)
        setup.health()


def test_a_request_that_is_whole_is_not_late(tmp_path: Path) -> None:
    """A response may take as long as it wants; so may the next request."""
    with hostile(tmp_path, "--receive-timeout", "1") as setup:
        sock = setup.connect()
        sock.sendall(setup.post(BODY)[:-10])
        sock.sendall(setup.post(BODY)[-10:])
        session = session_of(answer_on(sock))
        stream = setup.connect()
        accepts = ("Accept: text/event-stream", f"Mcp-Session-Id: {session}")
        stream.sendall(setup.head("GET /mcp", *accepts))
        assert stream.recv(4_096).startswith(b"HTTP/1.1 200")
        late = setup.connect()
        late.sendall(b"GET")
        assert closed_by_peer(late).startswith(b"HTTP/1.1 408")
        sock.sendall(setup.head("GET /healthz"))
        assert answer_on(sock).startswith(b"HTTP/1.1 200")
        stream.settimeout(0.2)
        with pytest.raises(TimeoutError):
            while stream.recv(4_096):
                pass


ENDLESS: dict[str, tuple[Callable[[Setup], bytes], bytes]] = {
    "fields": (lambda setup: setup.head("GET /healthz")[:-2], b"X-More: y\r\n" * 100),
    "one field": (lambda setup: setup.head("GET /healthz")[:-2] + b"X-More: ", b"y" * 1_000),
    "a path": (lambda setup: b"GET /", b"y" * 1_000),
    "fields after a request whose body nobody read": (
        lambda setup: (
            setup.head("POST /healthz", "Content-Length: 3")
            + b"xyz"
            + setup.head("GET /healthz")[:-2]
        ),
        b"X-More: y\r\n" * 100,
    ),
    "trailers": (
        lambda setup: setup.head("POST /mcp", "Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\n",
        b"X-More: y\r\n" * 100,
    ),
}


@pytest.mark.parametrize("what", first_and_others(ENDLESS))
def test_a_header_without_an_end_is_refused(what: str, tmp_path: Path) -> None:
    """64 KiB are what it may have, wherever it stands."""
    begun, more = ENDLESS[what]
    with hostile(tmp_path) as setup:
        before = setup.resident()
        sock = setup.connect()
        sock.sendall(begun(setup))
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 30_000_000:
                sock.sendall(more)
                sent += len(more)
        assert setup.resident() - before < 10
        setup.health()


def test_the_log_has_a_line_about_headers_that_are_too_large(tmp_path: Path) -> None:
    """A cookie that grows, for example. The client got 431, and the operator learned nothing."""
    with hostile(tmp_path) as setup:
        sock = setup.connect()
        sock.sendall(setup.head("GET /healthz")[:-2] + b"X-More: " + b"y" * 70_000)
        closed_by_peer(sock)
        said = read_lines(setup.process, 1)
        assert "connections were 1 refused: the header of the request is too large (431)" in said


def test_an_upgrade_with_a_header_that_is_too_large_is_answered(tmp_path: Path) -> None:
    """The library that serves WebSockets takes 128 fields; nothing is left open after that. Before
    its release 17 it closes the connection without an answer.
    """
    with hostile(tmp_path) as setup:
        sock = setup.connect()
        sock.sendall(setup.upgrade(*[f"X-{n}: y" for n in range(200)]))
        said = closed_by_peer(sock)
        assert said.startswith(b"HTTP/1.1 431") or (not said and OLD_WEBSOCKETS)
        setup.health()


def test_a_peer_that_takes_nothing_of_its_answer_is_cut(tmp_path: Path) -> None:
    """Rule 2: nothing of it is held any longer."""
    with hostile(tmp_path, "--receive-timeout", "1") as setup:
        answer = setup.connect()
        answer.sendall(setup.post(BODY))
        session = session_of(answer_on(answer))
        before = setup.descriptors()
        params = {"name": "large", "arguments": {"size": 6_000_000}}
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        for _ in range(5):
            sock = setup.connect(receive_buffer=4_096)
            sock.sendall(setup.post(json.dumps(call).encode(), f"Mcp-Session-Id: {session}"))
        until = time.monotonic() + WITHIN
        while setup.descriptors() <= before:
            assert time.monotonic() < until
        while setup.descriptors() > before:
            assert time.monotonic() < until
