"""The stock WebSocket clients of the SDKs' 1.x lines, against a wrapped server of each class.

"Stock WebSocket clients (``mcp`` 1.x ``websocket_client``, the TypeScript SDK's
``WebSocketClientTransport``) work unmodified".
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from tests.interop.clients import ClientKind, StockClient
from tests.interop.harness import Connect, UnderTest
from tests.support import apps
from tests.support.proxy import ProxiedConnection, Side, TcpProxy

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.full,
    pytest.mark.layer_only,
    # The first of them may install its client.
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(apps.DEPRECATED),
]

Opened = Callable[[], AbstractAsyncContextManager[StockClient]]


@pytest.fixture(params=["python-1", "typescript-1"])
def kind(request: pytest.FixtureRequest) -> ClientKind:
    return request.param


@pytest.fixture
def opened(connected: Connect, proxy: TcpProxy) -> Opened:
    """Connects clients over WebSocket, through the proxy, which the test has entered."""
    return lambda: connected(proxy.url(scheme="ws"), within=30)


async def upgraded(proxy: TcpProxy) -> ProxiedConnection:
    """The connection of the only client, after the server agreed to WebSocket."""
    connection = await proxy.carrying(b"GET /mcp HTTP/1.1")
    await connection.sent(b"HTTP/1.1 101")
    return connection


async def test_initialize_and_lists(under_test: UnderTest, proxy: TcpProxy, opened: Opened) -> None:
    async with proxy, opened() as client:
        result = client.initialize_result
        assert result["serverInfo"] == {**result["serverInfo"], "name": "notes"}
        assert result["protocolVersion"] == "2025-11-25"
        assert result["capabilities"]["resources"]["subscribe"] is True

        assert sorted(await client.list("tools")) == sorted(apps.TOOLS)
        assert await client.list("resources") == ["note://welcome"]
        assert await client.list("templates") == ["note://{n}"]
        assert await client.list("prompts") == ["greet"]
        assert proxy.accepted == 1
        assert client.errors == ()


async def test_the_subprotocol_is_asked_for_and_granted(proxy: TcpProxy, opened: Opened) -> None:
    async with proxy, opened():
        connection = await upgraded(proxy)
        for side in Side:
            assert b"sec-websocket-protocol: mcp\r\n" in connection.sent_by(side).lower()


async def test_calls_reads_and_pings_are_answered(
    under_test: UnderTest, proxy: TcpProxy, opened: Opened
) -> None:
    long = "0123456789" * 20_000
    async with proxy, opened() as client:
        for text in ("grüß dich \u2028 \U0001f600", long):
            assert await client.call("echo", {"text": text}) == text
        assert await client.call("add", {"a": 40, "b": 2}) == "42"
        assert await client.read("note://7") == under_test.app.read("note://7")
        await client.ping()
        assert client.errors == ()


async def test_a_connection_is_a_session_to_its_handlers(proxy: TcpProxy, opened: Opened) -> None:
    async with proxy, opened() as client:
        assert await client.call("remember", {"text": "a"}) == "1 notes: a"
        assert await client.call("remember", {"text": "b"}) == "2 notes: a, b"
        notified = [params["data"] for params in client.notifications("notifications/message")]
        assert notified == ["noted a", "noted b"]


async def test_progress_arrives_while_the_call_runs(
    under_test: UnderTest, proxy: TcpProxy, opened: Opened, gate: str
) -> None:
    steps: list[float] = []
    async with proxy, opened() as client:

        async def release() -> None:
            await client.until(lambda: steps == [1], what="the first step of progress")
            under_test.app.stage.mark(f"{gate}:go")

        arguments = {"steps": 3, "gate": gate}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            assert await client.call("slow", arguments, progress=steps) == "3 steps"

        assert steps == [1, 2, 3]


async def test_a_subscriber_is_notified_of_changes_and_then_no_more(
    under_test: UnderTest, proxy: TcpProxy, opened: Opened, note: str
) -> None:
    other, marker = f"{note}-other", f"{note}-marker"
    async with proxy, opened() as client:
        await client.subscribe(note)
        await client.subscribe(marker)

        # From a call of its own, and from outside any request.
        await client.call("touch", {"uri": other})
        await client.call("touch", {"uri": note})
        await client.updated(note)
        await under_test.publish(note)
        await client.updated(note, times=2)
        assert await client.read(note) == f"{note} version 2"

        await client.unsubscribe(note)
        await under_test.publish(note)
        await under_test.publish(marker)
        await client.updated(marker)

        assert client.updated_uris() == [note, note, marker]
        assert client.errors == ()


async def test_closing_is_answered_by_the_server(proxy: TcpProxy, opened: Opened) -> None:
    """With a close frame of its own, then with the end of the connection."""
    async with proxy:
        async with opened() as client:
            connection = await upgraded(proxy)
            assert await client.call("echo", {"text": "before"}) == "before"
            said = connection.total_sent_by(Side.SERVER)
        await connection.closed()

        farewell = connection.sent_by(Side.SERVER)[said:]
        # 1000, or no code where the client gave none.
        assert farewell in (b"\x88\x02\x03\xe8", b"\x88\x00"), farewell
        assert client.errors == ()

        async with opened() as again:
            assert await again.call("echo", {"text": "after"}) == "after"
