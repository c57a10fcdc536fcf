"""The stock WebSocket clients of the SDKs' 1.x lines, byte by byte; `test_ordinary_use` is over
WebSocket as well.

"Stock WebSocket clients (``mcp`` 1.x ``websocket_client``, the TypeScript SDK's
``WebSocketClientTransport``) work unmodified".
"""

import pytest

from tests.interop.harness import OVER_WEBSOCKET, Connect, clients
from tests.support import apps
from tests.support.proxy import ProxiedConnection, Side, TcpProxy

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)


async def upgraded(proxy: TcpProxy) -> ProxiedConnection:
    """The connection of the only client, after the server agreed to WebSocket."""
    connection = await proxy.carrying(b"GET /mcp HTTP/1.1")
    await connection.sent(b"HTTP/1.1 101")
    return connection


@clients(*OVER_WEBSOCKET)
async def test_the_subprotocol_is_asked_for_and_granted(
    proxy: TcpProxy, connected: Connect
) -> None:
    """There is one connection, for everything."""
    async with proxy, connected(proxy.url(scheme="ws")) as client:
        connection = await upgraded(proxy)
        for side in Side:
            assert b"sec-websocket-protocol: mcp\r\n" in connection.sent_by(side).lower()
        assert sorted(await client.list("tools")) == sorted(apps.TOOLS)
        assert proxy.accepted == 1


@clients(*OVER_WEBSOCKET)
async def test_closing_is_answered_by_the_server(proxy: TcpProxy, connected: Connect) -> None:
    """With a close frame of its own, then with the end of the connection."""
    async with proxy:
        async with connected(proxy.url(scheme="ws")) as client:
            connection = await upgraded(proxy)
            assert await client.call("echo", {"text": "before"}) == "before"
            said = connection.total_sent_by(Side.SERVER)
        await connection.closed()

        farewell = connection.sent_by(Side.SERVER)[said:]
        # 1000, or no code where the client gave none.
        assert farewell in (b"\x88\x02\x03\xe8", b"\x88\x00"), farewell
        assert client.errors == ()

        async with connected(proxy.url(scheme="ws")) as again:
            assert await again.call("echo", {"text": "after"}) == "after"
