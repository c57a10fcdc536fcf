"""What went over the wire, as the server's side of it saw it.

`Wire` is an ASGI middleware around the app under test. It changes nothing; it keeps each
HTTP exchange, so that a test can wait for one, assert what a client really sent, and show
the conversation when it fails.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.board import Board

_KEPT_BYTES = 1_048_576
_SHOWN_CHARACTERS = 2_000


@dataclass
class Exchange:
    """One HTTP request and as much of its response as was sent so far."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    request_body: bytearray = field(default_factory=bytearray)
    status: int | None = None
    response_headers: dict[str, str] = field(default_factory=dict[str, str])
    response_body: bytearray = field(default_factory=bytearray)
    """At most the first MiB."""
    is_finished: bool = False
    """The app has returned, whether the client read to the end or not."""

    @property
    def sent(self) -> dict[str, Any]:
        """The JSON-RPC message in the request's body, or ``{}`` if there is none."""
        try:
            message: object = json.loads(bytes(self.request_body))
        except ValueError:
            return {}
        return cast("dict[str, Any]", message) if isinstance(message, dict) else {}

    @property
    def sse_events(self) -> list[dict[str, str]]:
        """The whole events of an SSE response so far: its fields by name."""
        text = self.response_body.decode(errors="replace").replace("\r\n", "\n")
        events: list[dict[str, str]] = []
        for block in text.split("\n\n")[:-1]:
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            fields = {n: v.removeprefix(" ") for n, _, v in (line.partition(":") for line in lines)}
            if fields:
                events.append(fields)
        return events

    @property
    def session_id(self) -> str | None:
        return self.headers.get("mcp-session-id")

    def __str__(self) -> str:
        interesting = ("mcp-session-id", "mcp-protocol-version", "last-event-id", "accept")
        named = {n: v for n, v in self.headers.items() if n in interesting}
        lines = [f"#{self.number} {self.method} {self.path} {named}"]
        if self.request_body:
            lines.append(f"  > {self.request_body.decode(errors='replace')[:_SHOWN_CHARACTERS]}")
        kind = self.response_headers.get("content-type", "")
        lines.append(f"  < {self.status} {kind}{' (finished)' if self.is_finished else ''}")
        body = self.response_body.decode(errors="replace")[:_SHOWN_CHARACTERS]
        lines += [f"  < {line}" for line in body.splitlines() if line]
        return "\n".join(lines)


class Wire:
    """Keeps every HTTP exchange of the app it wraps."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._board = Board()
        self._exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(
            number=len(self._exchanges) + 1,
            method=scope["method"],
            path=scope["path"],
            headers={n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]},
        )
        self._exchanges.append(exchange)
        self._board.announce()

        async def kept_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                exchange.request_body += message.get("body", b"")
                self._board.announce()
            return message

        async def kept_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.response_headers = {
                    n.decode("latin-1"): v.decode("latin-1") for n, v in message.get("headers", [])
                }
            elif len(exchange.response_body) < _KEPT_BYTES:
                exchange.response_body += message.get("body", b"")
            await send(message)
            self._board.announce()

        try:
            await self._app(scope, kept_receive, kept_send)
        finally:
            exchange.is_finished = True
            self._board.announce()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return tuple(self._exchanges)

    def since(self, number: int) -> tuple[Exchange, ...]:
        """The exchanges after the first ``number``; ``len(wire.exchanges)`` is now."""
        return tuple(self._exchanges[number:])

    def matching(
        self,
        *,
        method: str | None = None,
        session_id: str | None = None,
        rpc: str | None = None,
        since: int = 0,
    ) -> Iterator[Exchange]:
        """The exchanges with this HTTP method, session id header and JSON-RPC method."""
        for exchange in self.since(since):
            if method is not None and exchange.method != method:
                continue
            if session_id is not None and exchange.session_id != session_id:
                continue
            if rpc is not None and exchange.sent.get("method") != rpc:
                continue
            yield exchange

    async def saw(
        self,
        is_meant: Callable[[Exchange], bool] = lambda exchange: True,
        *,
        method: str | None = None,
        session_id: str | None = None,
        rpc: str | None = None,
        since: int = 0,
        within: float = 30.0,
    ) -> Exchange:
        """The first exchange as described, once there is one.

        Raises:
            AssertionError: There is none within ``within`` seconds; it shows the wire.
        """
        return await self._board.until(
            lambda: next(
                (
                    e
                    for e in self.matching(
                        method=method, session_id=session_id, rpc=rpc, since=since
                    )
                    if is_meant(e)
                ),
                None,
            ),
            what=lambda: (
                f"an HTTP exchange with {method=}, {session_id=}, {rpc=}; the wire:\n"
                + self.transcript(since=since)
            ),
            within=within,
        )

    def transcript(self, *, since: int = 0) -> str:
        """The conversation after the first ``since`` exchanges, to be read by people."""
        return "\n".join(str(exchange) for exchange in self.since(since))
