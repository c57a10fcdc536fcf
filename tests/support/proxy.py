"""A TCP proxy that breaks connections on command.

It stands between a real client and a real server, in the test's own event loop, and knows
nothing of HTTP::

    async with TcpProxy(server.host, server.port) as proxy:
        client = connect(proxy.url("/mcp"))
        connection = await proxy.carrying(b'"method":"tools/call"')
        connection.cut()

Rules:

1. Bytes pass unchanged, in order and at once, until the test says otherwise.
2. What the test says (cut, stall, half-close) is done when the call returns.
3. Every wait is bounded and fails with a sentence that says what did not come.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Self

import anyio

from tests.support.board import Board

_READ_BYTES = 65_536
_KEPT_BYTES = 4_194_304
"""Of what one side sent, the newest bytes kept for the test to look at."""


class Side(Enum):
    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> "Side":
        return Side.SERVER if self is Side.CLIENT else Side.CLIENT


class ProxiedConnection:
    """One TCP connection through the proxy. The test gets these from `TcpProxy`."""

    def __init__(
        self,
        number: int,
        streams: dict[Side, tuple[asyncio.StreamReader, asyncio.StreamWriter]],
        *,
        board: Board,
        piece_bytes: int | None,
    ) -> None:
        self.number = number
        """1 for the first connection the proxy accepted."""
        self._streams = streams
        self._board = board
        self._piece_bytes = piece_bytes
        self._sent: dict[Side, bytearray] = {Side.CLIENT: bytearray(), Side.SERVER: bytearray()}
        self._total: dict[Side, int] = {Side.CLIENT: 0, Side.SERVER: 0}
        self._budget: dict[Side, int | None] = {Side.CLIENT: None, Side.SERVER: None}
        self._flowing: dict[Side, asyncio.Event] = {}
        for side in Side:
            self._flowing[side] = asyncio.Event()
            self._flowing[side].set()
        self._is_open = True
        self._is_half_open = False

    @property
    def is_open(self) -> bool:
        """Whether the connection still exists, be it stalled or half closed."""
        return self._is_open

    def sent_by(self, side: Side) -> bytes:
        """The bytes ``side`` sent and the proxy passed on (the newest 4 MiB)."""
        return bytes(self._sent[side])

    def total_sent_by(self, side: Side) -> int:
        """How many bytes ``side`` sent and the proxy passed on."""
        return self._total[side]

    def cut(self, *, reset: bool = True) -> None:
        """Close both ends now. What is still on its way is lost.

        Args:
            reset: With RST, as a dead network or a killed process looks. False: with FIN,
                after what was already passed on.
        """
        if not self._is_open:
            return
        self._is_open = False
        for _, writer in self._streams.values():
            if reset:
                _reset_on_close(writer.get_extra_info("socket"))
                writer.transport.abort()
            else:
                writer.close()
        for flowing in self._flowing.values():
            flowing.set()
        self._board.announce()

    def cut_after(self, count: int, *, sent_by: Side = Side.SERVER) -> None:
        """Cut (with FIN) when ``count`` more bytes of ``sent_by`` have been passed on."""
        self._budget[sent_by] = count
        if count == 0:
            self.cut(reset=False)

    def stall(self, *sides: Side) -> None:
        """Pass on nothing more of what ``sides`` (default: both) send; keep it for later.

        TCP's own flow control then reaches the sender, as with a peer that stopped reading.
        """
        for side in sides or tuple(Side):
            self._flowing[side].clear()

    def unstall(self, *sides: Side) -> None:
        """Pass on what was held back, and all that follows."""
        for side in sides or tuple(Side):
            self._flowing[side].set()

    def half_close(self, side: Side) -> None:
        """Tell ``side`` (with FIN) that the other end will send nothing more."""
        _, writer = self._streams[side]
        if self._is_open and writer.can_write_eof():
            writer.write_eof()

    def lose_client(self) -> None:
        """Reset the client's end. The server's end stays open, and nobody tells the server."""
        if not self._is_open or self._is_half_open:
            return
        self._is_half_open = True
        _, writer = self._streams[Side.CLIENT]
        _reset_on_close(writer.get_extra_info("socket"))
        writer.transport.abort()

    async def sent(
        self, needle: bytes | re.Pattern[bytes], *, by: Side = Side.SERVER, within: float = 30.0
    ) -> None:
        """Return once ``by`` sent ``needle`` and it was passed on.

        Raises:
            AssertionError: It was not, within ``within`` seconds.
        """
        pattern = re.compile(re.escape(needle)) if isinstance(needle, bytes) else needle
        await self._board.until(
            lambda: pattern.search(self._sent[by]) is not None,
            what=lambda: (
                f"{needle!r} from the {by.value} on connection {self.number}"
                f" (so far: {self.sent_by(by)[-2000:]!r})"
            ),
            within=within,
        )

    async def closed(self, *, within: float = 30.0) -> None:
        """Return once the connection is gone, whoever ended it.

        Raises:
            AssertionError: It is still there after ``within`` seconds.
        """
        await self._board.until(
            lambda: not self._is_open,
            what=f"the end of connection {self.number}",
            within=within,
        )

    def abandon(self) -> None:
        """Give up what a close with FIN still waits to pass on. For the proxy, not for tests."""
        for _, writer in self._streams.values():
            writer.transport.abort()

    async def run(self) -> None:
        """Pass bytes on until both ends are closed. For the proxy, not for tests."""
        try:
            async with asyncio.TaskGroup() as group:
                for side in Side:
                    group.create_task(self._pump(side))
        finally:
            self.cut(reset=False)

    async def _pump(self, side: Side) -> None:
        reader, _ = self._streams[side]
        _, writer = self._streams[side.other]
        try:
            while data := await reader.read(_READ_BYTES):
                for piece in self._pieces(data):
                    await self._flowing[side].wait()
                    if not self._is_open:
                        return
                    if self._is_half_open:
                        continue
                    budget = self._budget[side]
                    passed = piece if budget is None else piece[:budget]
                    writer.write(passed)
                    self._note(side, passed)
                    if budget is not None:
                        self._budget[side] = budget - len(passed)
                        if budget == len(passed):
                            self.cut(reset=False)
                            return
                    await writer.drain()
            if not self._is_half_open and writer.can_write_eof():
                writer.write_eof()
        except OSError:
            # One end vanished; a connection has no half that outlives a reset.
            if not self._is_half_open or side is Side.SERVER:
                self.cut()

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        step = self._piece_bytes or len(data)
        for start in range(0, len(data), step):
            yield data[start : start + step]

    def _note(self, side: Side, data: bytes) -> None:
        kept = self._sent[side]
        kept += data
        del kept[:-_KEPT_BYTES]
        self._total[side] += len(data)
        self._board.announce()


class TcpProxy:
    """Listens on a free port of 127.0.0.1 and joins each connection to the target.

    Args:
        host: The target's host.
        port: The target's port.
        piece_bytes: Pass bytes on in pieces of at most this many, each its own write.
            ``None``: as they come.
    """

    def __init__(self, host: str, port: int, *, piece_bytes: int | None = None) -> None:
        self._target = (host, port)
        self._piece_bytes = piece_bytes
        self.patience = 0.0
        """Seconds for which a server that is not there is asked again, while its client waits:
        as what hands connections to a service does, until that has started."""
        self._board = Board()
        self._connections: list[ProxiedConnection] = []
        self._is_refusing = False
        self._stalled: set[Side] = set()
        self._cut_next_after: tuple[int, Side] | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        # Inherited by what it accepts: bytes are passed on at once.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Not asyncio.start_server: a connection it has accepted but not yet announced when
        # it is closed is nobody's to close.
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._is_refusing = True
        self.cut_all()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.abandon()
        # The transports close their sockets one cycle later.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        assert self._listener is not None, "the proxy is used before it was entered"
        return int(self._listener.getsockname()[1])

    def url(self, path: str = "/mcp", *, scheme: str = "http") -> str:
        return f"{scheme}://{self.host}:{self.port}{path}"

    @property
    def accepted(self) -> int:
        """How many connections were accepted and joined to the target, ever."""
        return len(self._connections)

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        return tuple(c for c in self._connections if c.is_open)

    def cut_all(self, *, reset: bool = True) -> int:
        """Cut every open connection and return how many there were; what comes next flows."""
        self._stalled.clear()
        cut = self.connections
        for connection in cut:
            connection.cut(reset=reset)
        return len(cut)

    def cut_next_after(self, count: int, *, sent_by: Side = Side.SERVER) -> None:
        """Cut the next new connection when ``count`` bytes of ``sent_by`` were passed on."""
        self._cut_next_after = (count, sent_by)

    def stall_all(self, *sides: Side) -> None:
        """`ProxiedConnection.stall` for every open connection, and for those that come.

        A client's pool may open one more for what it sends next, so that those that are open
        now would not be all. `unstall_all` and `cut_all` end it.
        """
        self._stalled.update(sides or tuple(Side))
        for connection in self.connections:
            connection.stall(*sides)

    def unstall_all(self, *sides: Side) -> None:
        """`ProxiedConnection.unstall` for every open connection, and for those that come."""
        self._stalled.difference_update(sides or tuple(Side))
        for connection in self.connections:
            connection.unstall(*sides)

    @contextmanager
    def offline(self, *, reset: bool = True) -> Generator[None]:
        """Inside, the network is gone: all connections are cut, new ones are refused."""
        self._is_refusing = True
        self.cut_all(reset=reset)
        try:
            yield
        finally:
            self._is_refusing = False

    def retarget(self, host: str, port: int) -> None:
        """Join new connections to another server; open ones stay where they are."""
        self._target = (host, port)

    async def carrying(
        self, needle: bytes, *, sent_by: Side = Side.CLIENT, within: float = 30.0
    ) -> ProxiedConnection:
        """The open connection on which ``sent_by`` sent ``needle`` (the newest such one).

        Raises:
            AssertionError: There is none within ``within`` seconds.
        """
        return await self.found(
            lambda c: needle in c.sent_by(sent_by),
            what=f"an open connection on which the {sent_by.value} sent {needle!r}",
            within=within,
        )

    async def found(
        self,
        is_meant: Callable[[ProxiedConnection], bool],
        *,
        what: str = "an open connection as described",
        within: float = 30.0,
    ) -> ProxiedConnection:
        """The newest open connection for which ``is_meant`` holds.

        Raises:
            AssertionError: There is none within ``within`` seconds.
        """
        return await self._board.until(
            lambda: next((c for c in reversed(self.connections) if is_meant(c)), None),
            what=lambda: f"{what}; {len(self.connections)} open of {self.accepted}",
            within=within,
        )

    async def accepted_total(self, count: int, *, within: float = 30.0) -> None:
        """Return once ``count`` connections were accepted, counted from the start.

        Raises:
            AssertionError: They were not, within ``within`` seconds.
        """
        await self._board.until(
            lambda: self.accepted >= count,
            what=lambda: f"{count} connections through the proxy, not {self.accepted}",
            within=within,
        )

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # It gave up before we came.
        if self._is_refusing:
            _reset_on_close(client)
            client.close()
            return
        task = asyncio.create_task(self._join(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reached(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with anyio.fail_after(5 + self.patience):
            until = anyio.current_time() + self.patience
            while True:
                try:
                    return await asyncio.open_connection(*self._target)
                except ConnectionRefusedError:
                    if anyio.current_time() > until:
                        raise
                await asyncio.sleep(0.02)

    async def _join(self, client: socket.socket) -> None:
        client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            try:
                target = await self._reached()
            except (OSError, TimeoutError):
                # The client sees what it would see without a proxy: no connection.
                return
            connection = ProxiedConnection(
                len(self._connections) + 1,
                {Side.CLIENT: (reader, writer), Side.SERVER: target},
                board=self._board,
                piece_bytes=self._piece_bytes,
            )
            if self._stalled:
                connection.stall(*self._stalled)
            if self._cut_next_after is not None:
                count, side = self._cut_next_after
                self._cut_next_after = None
                connection.cut_after(count, sent_by=side)
            self._connections.append(connection)
            self._board.announce()
            if self._is_refusing:
                # The network went away while the target was being reached.
                connection.cut()
            await connection.run()
        finally:
            if not writer.is_closing():
                _reset_on_close(client)
                writer.transport.abort()


def _reset_on_close(sock: socket.socket) -> None:
    """Make the next close send RST (linger for zero seconds)."""
    if sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
