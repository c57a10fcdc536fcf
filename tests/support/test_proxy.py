"""The proxy of the fault tests does exactly what a test asks for, and nothing else."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.support.proxy import ProxiedConnection, Side, TcpProxy


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, count: int) -> bytes:
        with anyio.fail_after(5):
            return await self.reader.readexactly(count)

    async def receive_all(self) -> bytes:
        with anyio.fail_after(5):
            return await self.reader.read()


@asynccontextmanager
async def line(
    *, piece_bytes: int | None = None
) -> AsyncGenerator[tuple[TcpProxy, Peer, Peer, ProxiedConnection]]:
    """A proxy, the client's end, the server's end, and the connection that joins them."""
    arrived: asyncio.Queue[Peer] = asyncio.Queue()
    peers: list[Peer] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(Peer(reader, writer))
        arrived.put_nowait(peers[-1])

    target = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = target.sockets[0].getsockname()
    async with TcpProxy(host, port, piece_bytes=piece_bytes) as proxy:
        client = Peer(*await asyncio.open_connection(proxy.host, proxy.port))
        peers.append(client)
        with anyio.fail_after(5):
            server = await arrived.get()
        await proxy.accepted_total(1)
        try:
            yield proxy, client, server, proxy.connections[-1]
        finally:
            target.close()
            for peer in peers:
                peer.writer.transport.abort()
            await asyncio.sleep(0)


@pytest.mark.parametrize("piece_bytes", [None, 1, 7])
async def test_bytes_pass_unchanged_in_both_directions(piece_bytes: int | None) -> None:
    data = bytes(range(256)) * 20
    async with line(piece_bytes=piece_bytes) as (_, client, server, connection):
        await client.send(data)
        assert await server.receive(len(data)) == data
        await server.send(data[::-1])
        assert await client.receive(len(data)) == data[::-1]

        assert connection.sent_by(Side.CLIENT) == data
        assert connection.total_sent_by(Side.SERVER) == len(data)


async def test_an_end_of_one_direction_is_passed_on() -> None:
    async with line() as (_, client, server, _connection):
        client.writer.write_eof()
        assert await server.receive_all() == b""
        await server.send(b"still here")
        assert await client.receive(10) == b"still here"


async def test_a_cut_resets_both_ends() -> None:
    async with line() as (proxy, client, server, connection):
        await client.send(b"before")
        assert await server.receive(6) == b"before"
        connection.cut()

        for peer in (client, server):
            with pytest.raises(ConnectionResetError):
                await peer.receive_all()
        assert not connection.is_open
        assert proxy.connections == ()
        await connection.closed()


async def test_a_cut_with_fin_looks_like_an_end() -> None:
    async with line() as (_, client, _server, connection):
        connection.cut(reset=False)
        assert await client.receive_all() == b""


async def test_a_cut_after_so_many_bytes_is_exact() -> None:
    async with line() as (_, client, server, connection):
        connection.cut_after(5)
        await server.send(b"0123456789")
        assert await client.receive_all() == b"01234"


async def test_the_next_connection_can_be_cut_after_so_many_bytes() -> None:
    async with line() as (proxy, _client, _server, _connection):
        proxy.cut_next_after(3, sent_by=Side.CLIENT)
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        second = Peer(reader, writer)
        await second.send(b"abcdef")
        assert await second.receive_all() == b""
        assert proxy.accepted == 2
        writer.transport.abort()


async def test_a_stall_keeps_bytes_until_it_ends() -> None:
    async with line() as (_, client, server, connection):
        connection.stall(Side.SERVER)
        await server.send(b"late")
        await client.send(b"other direction")
        assert await server.receive(15) == b"other direction"
        assert connection.total_sent_by(Side.SERVER) == 0

        connection.unstall()
        assert await client.receive(4) == b"late"


async def test_a_stall_of_all_holds_a_connection_that_opens_during_it() -> None:
    async with line() as (proxy, client, server, _connection):
        proxy.stall_all(Side.CLIENT)
        _reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        await proxy.accepted_total(2)
        (second,) = (each for each in proxy.connections if each.number == 2)
        await client.send(b"first")
        writer.write(b"second")
        await anyio.wait_all_tasks_blocked()
        assert [each.total_sent_by(Side.CLIENT) for each in proxy.connections] == [0, 0]

        proxy.unstall_all()
        assert await server.receive(5) == b"first"
        await second.sent(b"second", by=Side.CLIENT)
        writer.transport.abort()


async def test_a_half_close_ends_one_direction_only() -> None:
    async with line() as (_, client, server, connection):
        connection.half_close(Side.CLIENT)
        assert await client.receive_all() == b""
        await client.send(b"up")
        assert await server.receive(2) == b"up"


async def test_offline_cuts_what_is_there_and_refuses_what_comes() -> None:
    async with line() as (proxy, client, _server, _connection):
        with proxy.offline():
            with pytest.raises(ConnectionResetError):
                await client.receive_all()
            with pytest.raises(OSError):
                reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
                try:
                    assert await reader.read() != b"", "accepted"
                finally:
                    writer.transport.abort()
        assert proxy.accepted == 1

        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        await proxy.accepted_total(2)
        writer.transport.abort()


async def test_a_connection_is_found_by_what_it_carries() -> None:
    async with line() as (proxy, client, server, connection):
        await client.send(b"GET /needle HTTP/1.1")
        assert await proxy.carrying(b"needle") is connection
        await server.send(b"id: 17\r\n")
        await connection.sent(b"id: 17")
        with pytest.raises(AssertionError, match="an open connection"):
            await proxy.carrying(b"haystack", within=0.01)


async def test_new_connections_go_to_the_new_target() -> None:
    async with line() as (one, *_), line() as (two, *_):
        one.retarget(two.host, two.port)
        _, writer = await asyncio.open_connection(one.host, one.port)
        await two.accepted_total(2)
        assert (one.accepted, two.accepted) == (2, 2)
        writer.transport.abort()


async def test_a_client_may_be_lost_and_the_server_does_not_notice() -> None:
    """What the server sends meanwhile goes nowhere. Its own close still ends the connection."""
    async with line() as (_proxy, client, server, connection):
        connection.lose_client()
        with pytest.raises(ConnectionResetError):
            await client.receive_all()
        await server.send(b"nobody reads this")
        assert connection.is_open
        server.writer.close()
        await connection.closed()
