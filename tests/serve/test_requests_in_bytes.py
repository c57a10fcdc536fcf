"""How the bytes of one connection become requests: real sockets.

The rules are those of ``mcp_sessions.serve.protocols.LimitedHttp``.
"""

import json
import re
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.serve.test_protocols import FLOOD
from tests.support.hostile import Setup, answer_on, closed_by_peer, hostile
from tests.support.serving import INITIALIZE

BODY = json.dumps(INITIALIZE).encode()

H2C = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA",
)
"""What the ``HttpClient`` of Java and ``curl --http2`` send with their first request."""

WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)

OFFERS: dict[str, tuple[str, ...]] = {
    "h2c": H2C,
    "two fields of Connection": ("Connection: Upgrade", "Connection: keep-alive", "Upgrade: h2c"),
    "WebSocket with a POST": WEBSOCKET,
    "two protocols": ("Connection: Upgrade", "Upgrade: h2c, foo/2"),
    "unknown": ("Connection: keep-alive, upgrade", "Upgrade: TLS/1.0"),
    "only in Connection": ("Connection: Upgrade",),
    "only in Upgrade": ("Upgrade: h2c",),
}


def chunked(setup: Setup, *fields: str, body: bytes = BODY, size: int = 10) -> bytes:
    head = setup.post(b"", "Transfer-Encoding: chunked", *fields)
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head.replace(b"Content-Length: 0\r\n", b"") + framed + b"0\r\n\r\n"


def answers_on(sock: socket.socket, count: int) -> list[bytes]:
    """The statuses of so many answers, each with a length."""
    received, statuses = b"", list[bytes]()
    while len(statuses) < count:
        head, end, rest = received.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head)
        if end and found is not None and len(rest) >= int(found[1]):
            statuses.append(head.partition(b"\r\n")[0].removeprefix(b"HTTP/1.1 "))
            received = rest[int(found[1]) :]
            continue
        chunk = sock.recv(65_536)
        assert chunk, received
        received += chunk
    assert received == b""
    return statuses


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Generator[Setup]:
    with hostile(tmp_path_factory.mktemp("server")) as setup:
        yield setup


@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_that_is_not_taken_is_ignored(offer: str, setup: Setup) -> None:
    """RFC 9110, 7.8. Before, a body was taken for the next request: 400, "Parse error"."""
    fields = OFFERS[offer]
    sock = setup.connect()
    for request in (setup.post(BODY, *fields), chunked(setup, *fields), chunked(setup)):
        sock.sendall(request)
        assert answers_on(sock, 1) == [b"200 OK"], request

        head = request.index(b"\r\n\r\n") + 4
        for start, end in ((0, 30), (30, head - 2), (head - 2, head + 5), (head + 5, None)):
            sock.sendall(request[start:end])
            # It has read that when it has answered another connection.
            setup.health()
        assert answers_on(sock, 1) == [b"200 OK"], request

        sock.sendall(request * 3)
        assert answers_on(sock, 3) == [b"200 OK"] * 3, request


def test_an_offer_with_an_expectation_gets_both_answers(setup: Setup) -> None:
    """RFC 9110, 7.8: a client may send both. The body comes after 100."""
    sock = setup.connect()
    request = setup.post(BODY, "Expect: 100-continue", *H2C)
    sock.sendall(request[: -len(BODY)])
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert sock.recv(len(interim)) == interim
    sock.sendall(BODY)
    assert answers_on(sock, 1) == [b"200 OK"]


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_an_offer_on_a_connection_that_closes_is_ignored(version: bytes, setup: Setup) -> None:
    """RFC 9110, 7.8: with HTTP/1.0 a server must."""
    sock = setup.connect()
    request = setup.post(BODY, "Connection: close", *H2C)
    sock.sendall(request.replace(b"HTTP/1.1", version))
    assert closed_by_peer(sock).startswith(b"HTTP/1.1 200")
    sock = setup.connect()
    sock.sendall(setup.head("GET /healthz", *WEBSOCKET).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert closed_by_peer(sock).startswith(b"HTTP/1.1 200")


def test_an_offer_with_the_whole_address_is_ignored(setup: Setup) -> None:
    """RFC 9112, 3.2.2: the absolute form, which a proxy may pass on."""
    sock = setup.connect()
    whole = b"POST http://127.0.0.1:%d/mcp" % setup.port
    sock.sendall(setup.post(BODY, *H2C).replace(b"POST /mcp", whole))
    assert answers_on(sock, 1) == [b"200 OK"]


@pytest.mark.parametrize("fields", [["Content-Length: 2"], ["Transfer-Encoding: chunked"]])
def test_an_offer_of_a_websocket_with_a_body_is_ignored(fields: list[str], setup: Setup) -> None:
    """RFC 9110, 7.8. Before, the connection was closed without an answer."""
    body = b"{}" if "Length" in fields[0] else b"2\r\n{}\r\n0\r\n\r\n"
    sock = setup.connect()
    sock.sendall(setup.upgrade(*fields) + body + setup.head("GET /healthz"))
    assert answers_on(sock, 2) == [b"406 Not Acceptable", b"200 OK"]


def test_a_websocket_is_opened_behind_a_request(setup: Setup) -> None:
    """Also if its handshake came before the answer."""
    sock = setup.connect()
    sock.sendall(setup.head("GET /healthz") + setup.upgrade())
    received = b""
    while b"HTTP/1.1 101" not in received:
        chunk = sock.recv(4_096)
        assert chunk, received
        received += chunk
    assert received.startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_their_order(setup: Setup) -> None:
    """RFC 9112, 9.3.2: of every kind of body, also cut at every byte."""
    paths = setup.head("GET /healthz"), setup.post(BODY), setup.head("GET /other")
    mixed = b"".join((*paths, chunked(setup), b"\r\n", chunked(setup, body=b"\r\n\r\n" * 9)))
    expected = [b"200 OK", b"200 OK", b"404 Not Found", b"200 OK", b"400 Bad Request"]
    sock = setup.connect()
    sock.sendall(mixed)
    assert answers_on(sock, 5) == expected
    for cut in range(1, len(mixed), 7):
        sock.sendall(mixed[:cut])
        setup.health()
        sock.sendall(mixed[cut:])
        assert answers_on(sock, 5) == expected, cut


PIPELINED: dict[str, Callable[[Setup], tuple[bytes, bytes]]] = {
    "requests": lambda setup: (b"", b"GET / HTTP/1.1\r\n\r\n"),
    "requests with a body": lambda setup: (b"", setup.post(b"{}")),
    "requests with an offer": lambda setup: (b"", setup.post(b"{}", *H2C)),
    "requests behind a stream": lambda setup: (get_stream(setup), setup.head("GET /healthz")),
    "tiny chunks": lambda setup: (
        chunked(setup).removesuffix(b"0\r\n\r\n"),
        b"1\r\n \r\n" * 1_000,
    ),
    "tiny fields": lambda setup: (b"", setup.head("GET /healthz", *["a:b"] * 900)),
    "empty lines": lambda setup: (b"", b"\r\n" * 1_000 + setup.head("GET /healthz")),
}


def get_stream(setup: Setup) -> bytes:
    sock = setup.connect()
    sock.sendall(setup.post(BODY))
    session = answer_on(sock).partition(b"mcp-session-id: ")[2].partition(b"\r\n")[0].decode()
    return setup.head("GET /mcp", "Accept: text/event-stream", f"Mcp-Session-Id: {session}")


@pytest.mark.parametrize(
    "what",
    [
        name if name == "requests" else pytest.param(name, marks=pytest.mark.full)
        for name in PIPELINED
    ],
)
def test_a_flood_of_requests_keeps_nobody_waiting(what: str, tmp_path: Path) -> None:
    """Rule 1: 16 MB at once. Before, others waited for 7 to 14 s, and the process grew by up to 343
    MiB.
    """
    with hostile(tmp_path) as setup:
        first, more = PIPELINED[what](setup)
        setup.status(setup.post(BODY))
        before, longest = setup.resident(), 0.0
        much = first + more * (250_000 // len(more))
        for _ in range(64):
            setup.connect().sendall(much)
        until = time.monotonic() + FLOOD
        while time.monotonic() < until:
            longest = max(longest, setup.health())
        assert longest < 1.5
        assert setup.resident() - before < 60


@pytest.mark.parametrize("what", ["a trailer", "the extension of a chunk"])
def test_a_chunked_body_without_an_end_is_refused(what: str, tmp_path: Path) -> None:
    """64 KiB is what may be between two pieces of it."""
    begun = b"1\r\n{\r\n" + (b"0\r\nX-More: " if what == "a trailer" else b"1;more=")
    with hostile(tmp_path) as setup:
        before = setup.resident()
        sock = setup.connect()
        sock.sendall(chunked(setup, body=b"").removesuffix(b"0\r\n\r\n") + begun)
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 30_000_000:
                sock.sendall(b"y" * 1_000)
                sent += 1_000
        assert setup.resident() - before < 10
        setup.health()
