"""A session that missed 100 events and is resumed: CPU of the server, over WebSocket and GET.

    python -m tests.bench.bench_resume [ROUNDS]

Counted is, over WebSocket, `session/resume` and all events that follow its answer on a connection
that is open and initialized; over HTTP a GET with `Last-Event-ID` and the same events. Every one of
them is of another resource, so that none replaces another. Rounds alternate, and the median round
counts: now and then a clock that is read so soon stands still.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from tests.bench.bench_calls import Server
from tests.bench.bench_noise import SESSION, Client
from tests.bench.rows import Row, report
from tests.bench.sockets import WITHIN, RawSocket

MISSED = 100


class OverWebSocket:
    """A session that one WebSocket after the other resumes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        first = RawSocket(server.port)
        started = first.ask("session/start", {})
        self._session = started["sessionId"]
        self._last = started["sessionEventId"]
        for number in range(MISSED):
            _subscribe(first, self._session, f"socket://{number}")
        first.close()

    def miss(self, client: Client) -> None:
        """The events."""
        for number in range(MISSED):
            client.call("touch", uri=f"socket://{number}")

    def resumed(self) -> float:
        """Seconds of CPU."""
        socket = RawSocket(self._server.port)
        socket.ask("ping", {})
        before = self._server.cpu()
        params = {"sessionId": self._session, "lastSessionEventId": self._last}
        answer = socket.ask("session/resume", params)
        socket.until(MISSED)
        spent = self._server.cpu() - before
        assert len(socket.events) == MISSED, (answer, len(socket.events))
        self._last = socket.events[-1]["params"]["sessionEventId"]
        socket.close()
        return spent


def _subscribe(asks: RawSocket | Client, session: str, uri: str) -> None:
    asks.ask("resources/subscribe", {"uri": uri, "_meta": {SESSION: {"sessionId": session}}})


class OverGet:
    """A session on a connection whose GET stream is opened again and again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = Client(server.port)
        self._client.initialize()
        session = self._client.ask("session/start", {})["sessionId"]
        for number in range(MISSED):
            _subscribe(self._client, session, f"get://{number}")
        self._last: str | None = None
        self._read(0)

    def miss(self, client: Client) -> None:
        """The events."""
        for number in range(MISSED):
            client.call("touch", uri=f"get://{number}")

    def resumed(self) -> float:
        """Seconds of CPU."""
        return self._read(MISSED)

    def _read(self, count: int) -> float:
        before = self._server.cpu()
        stream = self._client.raw("GET", None, last_event_id=self._last)
        with stream:
            stream.settimeout(WITHIN)
            text = b""
            # The priming event, then the events.
            while text.count(b"\nid: ") + text.count(b"\r\nid: ") < 1 or (
                text.count(b"resources/updated") < count or not text.endswith(b"\n\r\n")
            ):
                more = stream.recv(65_536)
                assert more, text
                text += more
            spent = self._server.cpu() - before
        ids = [line[4:].strip() for line in text.splitlines() if line.startswith(b"id: ")]
        self._last = ids[-1].decode()
        return spent


def rows(rounds: int) -> Iterator[Row]:
    """Both, beside each other."""
    server = Server("noisy", "memory://")
    try:
        client = Client(server.port)
        client.initialize()
        over: dict[str, Any] = {"WebSocket": OverWebSocket(server), "GET": OverGet(server)}
        found: dict[str, list[float]] = {way: [] for way in over}
        for _ in range(rounds):
            for way, each in over.items():
                client.wake()
                each.miss(client)
                found[way].append(each.resumed() * 1e6)
    finally:
        server.stop()
    middle = {way: statistics.median(times) for way, times in found.items()}
    yield Row(name=f"GET, {MISSED} missed events", measured=middle["GET"], unit="µs")
    yield Row(
        name=f"WebSocket, {MISSED} missed events",
        measured=middle["WebSocket"],
        unit="µs",
        ratio=middle["WebSocket"] / middle["GET"],
        beside="times the GET",
        most=800,
    )


def main() -> None:
    """Measure, and print."""
    report(rows(int(sys.argv[1]) if len(sys.argv) > 1 else 15))


if __name__ == "__main__":
    main()
