"""The shared connection to Redis, over a connection of this process."""

import asyncio
import gc
from typing import Any, cast

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.redis.redis_connection import Connection, RedisLink, connections_to


class FakeConnection:
    """Connects when it is let, and answers what it is asked to raise."""

    def __init__(self) -> None:
        self.may_connect = asyncio.Event()
        self.fails = asyncio.get_running_loop().create_future()
        self.is_connected = False
        self.takes = asyncio.Event()
        self.takes.set()

    async def connect(self) -> None:
        """Wait to be let."""
        await self.may_connect.wait()
        self.is_connected = True

    async def disconnect(self, nowait: bool = False) -> None:
        self.is_connected = False

    def pack_command(self, *args: object) -> list[bytes]:
        return []

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        """Wait until it is taken."""
        await self.takes.wait()

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Nothing comes but what goes wrong."""
        return await self.fails


def linked() -> tuple[RedisLink, FakeConnection]:
    """A link that has not connected, and what it will connect with."""
    connection = FakeConnection()
    return RedisLink(lambda: cast(Connection, connection), 60.0), connection


async def test_what_connects_while_the_link_is_closed_is_closed_too() -> None:
    """Nothing would read from it, or close it, ever."""
    link, connection = linked()
    calling = asyncio.create_task(link.call("PING"))
    await asyncio.sleep(0)
    await link.close()
    connection.may_connect.set()
    with pytest.raises(StoreUnavailable):
        await calling
    assert not connection.is_connected


async def test_what_the_client_library_raises_is_reported_at_once_to_who_waits() -> None:
    link, connection = linked()
    connection.may_connect.set()
    calling = asyncio.create_task(link.call("PING"))
    await asyncio.sleep(0)
    connection.fails.set_exception(KeyError("a defect"))
    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(5):
            await calling
    await link.close()


async def test_who_left_while_its_command_was_written_is_told_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection breaks then, and nobody takes the failure of that command."""
    link, connection = linked()
    connection.may_connect.set()
    connection.takes.clear()
    calling = asyncio.create_task(link.call("PING"))
    await asyncio.sleep(0.01)
    calling.cancel()
    await asyncio.wait({calling})
    connection.fails.set_exception(ConnectionError())
    await asyncio.sleep(0.01)
    await link.close()
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_a_command_to_a_connection_that_was_closed_just_now_fails_as_redis_is_away() -> None:
    """The event loop of `mcp-sessions serve` raises a RuntimeError for it until the reader had its
    turn. It ended the heartbeats of a replica whose Redis failed over.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(1000):
            writer.write(b"+OK\r\n" * received.count(b"*"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        made: list[Any] = []
        connection_to_it = connections_to(f"redis://127.0.0.1:{port}")

        def make() -> Connection:
            made.append(connection_to_it())
            return cast(Connection, made[-1])

        link = RedisLink(make, 60.0)
        assert await link.call("PING") == b"OK"
        made[-1]._writer.transport.abort()
        with pytest.raises(StoreUnavailable):
            await link.call("PING")
        assert await link.call("PING") == b"OK"
        await link.close()
