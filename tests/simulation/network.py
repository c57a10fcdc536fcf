"""The network between clients and replicas: HTTP exchanges and WebSockets in one process.

The application is called as an ASGI server calls it, as a part of its replica's host. TCP neither
loses nor repeats within a connection. So a connection is slow, stands still, or breaks, and at its
break the client may lack what the server has already written.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from starlette.types import ASGIApp
from starlette.types import Message as AsgiMessage

from tests.simulation.scheduler import Host
from tests.support.duplex import DuplexPeer
from tests.support.raw import Reply

LATENCY: Final = 0.002
"""Seconds that a message takes at the least."""


class Link:
    """The way of one client to the replicas. What goes wrong on it is the plan's."""

    def __init__(self, address: str) -> None:
        self.address = (address, 50_000)
        self.delay = LATENCY
        """Seconds that each message takes."""

        self.stands_still = False
        """Nothing gets through, and nobody notices."""

        self.pipes: dict[Pipe, None] = {}
        """In the order in which they were opened: a set would have them by their addresses."""

    def cut(self) -> None:
        """Break every connection. What is under way is lost."""
        for pipe in list(self.pipes):
            pipe.cut()

    def flows_again(self) -> None:
        self.stands_still = False
        for pipe in list(self.pipes):
            pipe.pump()


class Pipe:
    """One direction of one connection: hands over what was put in, in order and later.

    Args:
        takes: Gets each item at the other end.
        broken: Called once when the connection breaks.
    """

    def __init__(
        self, link: Link, takes: Callable[[Any], None], broken: Callable[[], None]
    ) -> None:
        self._link = link
        self._takes = takes
        self._broken = broken
        self._items: deque[tuple[float, Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.is_cut = False
        link.pipes[self] = None

    def put(self, item: Any) -> None:
        if not self.is_cut:
            self._items.append((asyncio.get_running_loop().time() + self._link.delay, item))
            self.pump()

    def pump(self) -> None:
        """Hand over what is due, and come back for the rest."""
        loop = asyncio.get_running_loop()
        while self._items and not self.is_cut and not self._link.stands_still:
            due, item = self._items[0]
            if due > loop.time():
                if self._timer is None:
                    self._timer = _OUTSIDE.enters(loop.call_at, due, self._due)
                return
            self._items.popleft()
            self._takes(item)

    def _due(self) -> None:
        self._timer = None
        self.pump()

    def cut(self) -> None:
        if not self.is_cut:
            self.close()
            self._broken()

    def close(self) -> None:
        self.is_cut = True
        self._items.clear()
        self._link.pipes.pop(self, None)


_OUTSIDE: Final = Host("the network")
"""It is neither killed nor paused."""


class Arriving(Protocol):
    """A response, as its client gets it."""

    error: BaseException | None
    is_whole: bool
    """The server ended it."""

    leave: Callable[[], None]
    """Break it off."""

    def begin(self, status: int, headers: list[tuple[str, str]]) -> None: ...

    def feed(self, chunk: bytes) -> None: ...

    def end(self) -> None:
        """It is over, whole or broken."""
        ...


class HttpLink:
    """A `Carrier` of `tests.support.raw`: each request is a connection of its own.

    Args:
        choose: The application that a request goes to, and its host. None: nobody listens.
        user: What an authentication middleware would have left in the scope.
    """

    def __init__(
        self, link: Link, choose: Callable[[], tuple[ASGIApp, Host] | None], user: object
    ) -> None:
        self._link = link
        self._choose = choose
        self._user = user

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        reply = Reply(f"{method} {path}")
        self.begin(reply, method, path, headers, body)
        return reply

    def begin(
        self,
        reply: Arriving,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: bytes,
    ) -> None:
        """Send a request whose response arrives at ``reply``."""
        chosen = self._choose()
        if chosen is None:
            reply.end()
            return
        app, host = chosen
        encoded = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers]
        scope = _scope("http", self._link, encoded, method=method, path=path, scheme="http")
        if self._user is not None:
            scope["user"] = self._user
        _Exchange(self._link, reply, host).begin(app, scope, body)


class _Exchange:
    """One HTTP request and its response."""

    def __init__(self, link: Link, reply: Arriving, host: Host) -> None:
        self._reply = reply
        self._host = host
        self._gone = asyncio.Event()
        self._up = Pipe(link, self._arrived, self._broke)
        self._down = Pipe(link, self._take, self._broke)
        self._request: asyncio.Queue[bytes] = asyncio.Queue()
        reply.leave = self._broke

    def begin(self, app: ASGIApp, scope: dict[str, Any], body: bytes) -> None:
        self._app, self._scope = app, scope
        self._host.at_death[self] = self._broke
        self._up.put(body)

    def _arrived(self, body: bytes) -> None:
        if not self._host.is_dead:
            self._request.put_nowait(body)
            self._task = self._host.starts(self._serve())
        else:
            self._broke()

    def _broke(self) -> None:
        for pipe in (self._up, self._down):
            pipe.close()
        self._host.at_death.pop(self, None)
        self._gone.set()
        self._reply.end()

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:
            self._reply.error = error
        finally:
            self._down.put(None)

    async def _receive(self) -> AsgiMessage:
        if not self._request.empty():
            body = self._request.get_nowait()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        self._down.put(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._gone.set()

    def _take(self, message: AsgiMessage | None) -> None:
        if message is None:
            self._broke()
        elif message["type"] == "http.response.start":
            headers = [
                (n.decode("latin-1").lower(), v.decode("latin-1"))
                for n, v in message.get("headers", [])
            ]
            self._reply.begin(message["status"], headers)
        else:
            self._reply.feed(message.get("body", b""))
            if not message.get("more_body", False):
                self._reply.is_whole = True
                self._broke()


class SocketLink(DuplexPeer):
    """A client's WebSocket. It has ended when ``ended`` says so, whoever ended it."""

    def __init__(
        self,
        link: Link,
        chosen: tuple[ASGIApp, Host] | None,
        user: object,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._chosen = chosen
        self._link = link
        self._user = user
        self._incoming: asyncio.Queue[AsgiMessage] = asyncio.Queue()
        self._up = Pipe(link, self._incoming.put_nowait, self._broke)
        self._down = Pipe(link, self._take, self._broke)
        self._accepted = asyncio.Event()
        self.refused: int | None = None
        self.raised: BaseException | None = None

    async def open(self) -> None:
        """Shake hands; return when the server has accepted or refused, or is not there."""
        if self._chosen is None:
            self._broke()
            return
        app, host = self._chosen
        host.at_death[self] = self._broke
        self._up.put({"type": "websocket.connect"})
        self._task = host.starts(self._serve(app))
        await self._accepted.wait()

    def _scope(self) -> dict[str, Any]:
        headers = [(b"host", b"127.0.0.1:8000"), (b"sec-websocket-protocol", b"mcp")]
        scope = _scope("websocket", self._link, headers, path="/mcp", scheme="ws")
        user = {"user": self._user} if self._user is not None else {}
        extensions: dict[str, Any] = {"websocket.http.response": {}}
        return {**scope, **user, "subprotocols": ["mcp"], "extensions": extensions}

    async def _serve(self, app: ASGIApp) -> None:
        try:
            # A server keeps the scope to itself: whoever has one is taken for an application.
            await app(self._scope(), self._incoming.get, self._send)
        except OSError:
            # The server wrote to a client that is gone.
            pass
        except Exception as error:
            self.raised = error
        finally:
            self._down.put(None)

    async def _send(self, message: AsgiMessage) -> None:
        if self.ended:
            raise OSError("the client is gone")
        self._down.put(message)

    def _take(self, message: AsgiMessage | None) -> None:
        match message["type"] if message is not None else None:
            case "websocket.accept":
                self._accepted.set()
            case "websocket.send":
                assert message is not None
                self.took(message["text"])
            case "websocket.http.response.start":
                assert message is not None
                self.refused = message["status"]
                self._broke()
            case "websocket.http.response.body":
                pass
            case _:
                self._broke()

    def _broke(self) -> None:
        for pipe in (self._up, self._down):
            pipe.close()
        if self._chosen is not None:
            self._chosen[1].at_death.pop(self, None)
        if not self.ended:
            self.ended = True
            self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
        self._accepted.set()
        self.board.announce()

    async def put(self, text: str) -> None:
        self._up.put({"type": "websocket.receive", "text": text})

    def cut_by_client(self) -> None:
        self._broke()

    async def leave(self) -> None:
        """See `DuplexPeer`: the network breaks."""
        self._broke()


def _scope(
    kind: str, link: Link, headers: list[tuple[bytes, bytes]], path: str, **more: Any
) -> dict[str, Any]:
    return {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": link.address,
        "server": ("127.0.0.1", 8_000),
        **more,
    }
