"""The network of a campaign: TCP through proxies of each client's own, one for each replica."""

import asyncio
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage
from websockets.typing import Subprotocol

from tests.simulation.network import Link
from tests.support.duplex import DuplexPeer
from tests.support.proxy import TcpProxy
from tests.support.raw import Reply, SocketCarrier

_OPENED_WITHIN = 10.0
"""Seconds in which a WebSocket opens, or is given up."""


class ProxiedLink(Link):
    """The way of one client to the replicas."""

    def __init__(self, proxies: list[TcpProxy]) -> None:
        super().__init__("127.0.0.1")
        self.proxies = proxies

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut_all()


class HttpCarrier:
    """A carrier of `tests.support.raw`. Each request is a connection of its own.

    Args:
        choose: The proxy that a request goes to.
    """

    def __init__(self, choose: Callable[[], TcpProxy]) -> None:
        self._choose = choose
        self._carriers: dict[int, SocketCarrier] = {}

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        proxy = self._choose()
        carrier = self._carriers.setdefault(proxy.port, SocketCarrier(proxy.host, proxy.port))
        return carrier.send(method, path, headers, body)


class WebSocket(DuplexPeer):
    """A client's WebSocket. It has ended when ``ended`` says so, whoever ended it."""

    def __init__(self, proxy: TcpProxy, **options: Any) -> None:
        super().__init__(**options)
        self._proxy = proxy
        self._connection: ClientConnection | None = None

    async def open(self) -> None:
        """Shake hands; return when the server has accepted or refused, or is not there."""
        try:
            self._connection = await connect(
                self._proxy.url(scheme="ws"), subprotocols=[Subprotocol("mcp")], compression=None,
                max_size=None, ping_interval=None, open_timeout=_OPENED_WITHIN, close_timeout=1,
                proxy=None,
            )  # fmt: skip
        except (OSError, EOFError, TimeoutError, InvalidHandshake, InvalidMessage):
            self._broke()
            return
        self._reader = asyncio.create_task(self._read(self._connection))

    async def _read(self, connection: ClientConnection) -> None:
        try:
            async for message in connection:
                self.took(message)
        except ConnectionClosed:
            # It broke, and did not close.
            pass
        finally:
            self._broke()

    def _broke(self) -> None:
        self.ended = True
        self.board.announce()

    async def put(self, text: str) -> None:
        assert self._connection is not None
        try:
            await self._connection.send(text)
        except ConnectionClosed:
            self._broke()

    def cut_by_client(self) -> None:
        if self._connection is not None:
            self._connection.transport.abort()
        self._broke()

    async def leave(self) -> None:
        """See `DuplexPeer`: the network breaks."""
        self.cut_by_client()
