"""CPU of a resume after 100 missed events, over WebSocket and GET.

    python -m bench.bench_resume [ROUNDS]

The figure is the server CPU of one resume. Over WebSocket that is ``session/resume`` and all events
after its answer, on a connection that is open and initialized. Over HTTP it is a GET with
``Last-Event-ID`` and the same events. Each event is about another resource, so none replaces
another. The bench resumes ten sessions, one after the other, and divides by ten, since the system's
clock for CPU is too coarse for one. The round with the least CPU counts.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence

from bench.bench_calls import Server
from bench.bench_noise import SESSION, Client
from bench.rows import Row, report
from bench.sockets import WITHIN, RawSocket

MISSED = 100
SESSIONS = 10


class OverWebSocket:
    def __init__(self, server: Server) -> None:
        self._server = server
        first = RawSocket(server.port)
        started = first.ask("session/start", {})
        self._session = started["sessionId"]
        self._last = started["sessionEventId"]
        for number in range(MISSED):
            _subscribe(first, self._session, f"test://{number}")
        first.close()
        self._socket: RawSocket | None = None

    def connect(self) -> None:
        self._socket = RawSocket(self._server.port)
        self._socket.ask("ping", {})

    def resume(self) -> None:
        websocket = self._socket
        assert websocket is not None
        params = {"sessionId": self._session, "lastSessionEventId": self._last}
        answer = websocket.ask("session/resume", params)
        websocket.until(MISSED)
        assert len(websocket.events) == MISSED, (answer, len(websocket.events))
        self._last = websocket.events[-1]["params"]["sessionEventId"]

    def leave(self) -> None:
        assert self._socket is not None
        self._socket.close()


class OverGet:
    def __init__(self, server: Server) -> None:
        self._client = Client(server.port)
        self._client.initialize()
        session = self._client.ask("session/start", {})["sessionId"]
        for number in range(MISSED):
            _subscribe(self._client, session, f"test://{number}")
        self._last: str | None = None
        self._stream: socket.socket | None = None
        self._read(0)
        self.leave()

    def connect(self) -> None: ...

    def resume(self) -> None:
        self._read(MISSED)

    def leave(self) -> None:
        assert self._stream is not None
        self._stream.close()

    def _read(self, count: int) -> None:
        stream = self._stream = self._client.raw("GET", None, last_event_id=self._last)
        stream.settimeout(WITHIN)
        text = b""
        # The priming event, then the events.
        while text.count(b"\nid: ") + text.count(b"\r\nid: ") < 1 or (
            text.count(b"resources/updated") < count or not text.endswith(b"\n\r\n")
        ):
            more = stream.recv(65_536)
            assert more, text
            text += more
        ids = [line[4:].strip() for line in text.splitlines() if line.startswith(b"id: ")]
        self._last = ids[-1].decode()


def _subscribe(asks: RawSocket | Client, session: str, uri: str) -> None:
    asks.ask("resources/subscribe", {"uri": uri, "_meta": {SESSION: {"sessionId": session}}})


def _resumed(server: Server, each: Sequence[OverWebSocket | OverGet]) -> float:
    """Microseconds of CPU for one of them."""
    for one in each:
        one.connect()
    before = _at_rest(server)
    for one in each:
        one.resume()
    spent = _at_rest(server) - before
    for one in each:
        one.leave()
    return spent / len(each) * 1e6


def _at_rest(server: Server) -> float:
    """Seconds of CPU that it used so far, when it has gone to sleep."""
    time.sleep(0.01)
    return server.cpu()


def rows(rounds: int) -> Iterator[Row]:
    server = Server("noisy", "memory://")
    try:
        client = Client(server.port)
        client.initialize()
        kinds = {"WebSocket": OverWebSocket, "GET": OverGet}
        finished = {way: [kind(server) for _ in range(SESSIONS)] for way, kind in kinds.items()}
        found: dict[str, list[float]] = {way: [] for way in finished}
        for _ in range(rounds):
            for way, each in finished.items():
                client.wake()
                for number in range(MISSED):
                    client.call("touch", uri=f"test://{number}")
                found[way].append(_resumed(server, each))
    finally:
        server.stop()
    least = {way: min(times) for way, times in found.items()}
    yield Row(name=f"GET, {MISSED} missed events", measured=least["GET"], unit="µs")
    yield Row(
        name=f"WebSocket, {MISSED} missed events",
        measured=least["WebSocket"],
        unit="µs",
        ratio=least["WebSocket"] / least["GET"],
        basis="times the GET",
        most=800,
    )


def main() -> None:
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 15))


if __name__ == "__main__":
    main()
