"""Stock clients come back by themselves after their TCP connection was cut.

Handshake-era Streamable HTTP (2025-11-25): a POST stream and the GET stream are resumed with
``Last-Event-ID``; a session that is gone answers 404. The connections are really cut, by a
proxy between client and server.
"""

import re
from contextlib import ExitStack

import anyio
import httpx2
import pytest

from tests.interop.clients import ClientKind, StockClient
from tests.interop.driver import Failed
from tests.interop.harness import ALL, Connect, UnderTest, clients
from tests.support import apps
from tests.support.proxy import TcpProxy
from tests.support.wire import Exchange

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)


def _id_line(event_id: str) -> re.Pattern[bytes]:
    """The line of an SSE stream that carries this id."""
    return re.compile(rb"(?m)^id: ?" + re.escape(event_id.encode()) + rb"\r?$")


async def resumed(client: StockClient, under_test: UnderTest, *, since: int) -> Exchange:
    """The client's next GET with ``Last-Event-ID``."""
    return await under_test.server.wire.saw(
        lambda e: "last-event-id" in e.headers,
        method="GET",
        session_id=client.session_id,
        since=since,
    )


@clients(*ALL)
@pytest.mark.parametrize("finishes", ["while the client is away", "after it is back"])
@pytest.mark.reconnects(("fastmcp", "fastmcp-4"))
async def test_a_call_survives_the_cut_of_its_response_stream(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, gate: str, finishes: str
) -> None:
    """HTL10: the answer is there for the client that comes back; nothing arrives twice."""
    stage, wire = under_test.app.stage, under_test.server.wire
    steps: list[float] = []
    async with proxy, connected(proxy.url()) as client:

        async def cut() -> None:
            await client.until(lambda: steps == [1], what="the first step of progress")
            before = len(wire.exchanges)
            (await proxy.carrying(gate.encode())).cut()
            if finishes == "after it is back":
                await resumed(client, under_test, since=before)
            stage.mark(f"{gate}:go")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut)
            answer = await client.call("slow", {"steps": 3, "gate": gate}, progress=steps)
            assert answer == "3 steps"

        assert steps == [1, 2, 3]
        assert stage.count(f"{gate}:started") == 1


@clients(*ALL)
@pytest.mark.reconnects
async def test_a_call_survives_a_cut_before_its_first_message(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, gate: str
) -> None:
    """STA3: the priming event is enough to come back with."""
    stage, wire = under_test.app.stage, under_test.server.wire
    async with proxy, connected(proxy.url()) as client:

        async def cut() -> None:
            call = await wire.saw(lambda e: gate.encode() in e.request_body and bool(e.sse_events))
            assert call.sse_events[0].get("data", "") == ""
            connection = await proxy.carrying(gate.encode())
            await connection.sent(_id_line(call.sse_events[0]["id"]))
            before = len(wire.exchanges)
            connection.cut(reset=False)
            await resumed(client, under_test, since=before)
            stage.mark(f"{gate}:go")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut)
            assert await client.call("slow", {"steps": 1, "gate": gate}) == "1 steps"

        assert stage.count(f"{gate}:started") == 1


@clients(*ALL)
@pytest.mark.parametrize("finishes", ["while the client is away", "after it is back"])
@pytest.mark.reconnects
async def test_a_call_survives_the_end_of_its_stream_by_the_server(
    under_test: UnderTest, connected: Connect, gate: str, finishes: str
) -> None:
    """``ctx.close_sse_stream()``: the client polls, and gets its answer."""
    stage, wire = under_test.app.stage, under_test.server.wire
    async with connected() as client:
        before = len(wire.exchanges)

        async def release() -> None:
            await stage.reached(f"{gate}:started")
            if finishes == "after it is back":
                await resumed(client, under_test, since=before)
            stage.mark(f"{gate}:go")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            answer = await client.call("close_stream", {"gate": gate})
            assert answer == "answered after the stream was closed"


@clients(*ALL)
@pytest.mark.reconnects(("fastmcp", "fastmcp-4"))
async def test_the_get_stream_is_resumed_and_brings_what_was_missed(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, note: str
) -> None:
    """ATT6, EVT10: once and in order, then live again."""
    uris = [f"{note}-{n}" for n in range(5)]
    async with proxy, connected(proxy.url()) as client:
        for uri in uris:
            await client.subscribe(uri)
        await under_test.server.wire.saw(method="GET", session_id=client.session_id)
        await under_test.publish(uris[0])
        await client.updated(uris[0])

        before = len(under_test.server.wire.exchanges)
        (await proxy.carrying(b"GET /mcp")).cut()
        for uri in uris[1:4]:
            await under_test.publish(uri)
        await resumed(client, under_test, since=before)
        await client.updated(uris[3])
        await under_test.publish(uris[4])
        await client.updated(uris[4])

        assert client.updated_uris() == uris


@clients(*ALL)
@pytest.mark.layer_only
@pytest.mark.reconnects
async def test_the_get_stream_is_resumed_from_before_its_first_message(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, note: str
) -> None:
    """STA3: the GET stream is primed too. The SDK alone does not, and loses what was missed."""
    wire = under_test.server.wire
    async with proxy, connected(proxy.url()) as client:
        await client.subscribe(note)
        primed = await wire.saw(
            lambda e: bool(e.sse_events), method="GET", session_id=client.session_id
        )
        stream = await proxy.carrying(b"GET /mcp")
        await stream.sent(_id_line(primed.sse_events[0]["id"]))

        before = len(wire.exchanges)
        stream.cut(reset=False)
        await under_test.publish(note)
        again = await resumed(client, under_test, since=before)
        await client.updated(note)

        assert again.headers["last-event-id"] == primed.sse_events[0]["id"]
        assert client.updated_uris() == [note]


@clients("python-2", "python-1", "typescript-1", "typescript-2")
async def test_another_client_of_the_session_resumes_the_call_of_a_dead_one(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, gate: str
) -> None:
    """``Last-Event-ID`` on a POST stream, handed on as a resumption token."""
    stage = under_test.app.stage
    steps: list[float] = []
    tokens: list[str] = []
    async with proxy:
        with ExitStack() as network:
            async with connected(proxy.url(), terminate=False) as first:
                session_id = first.session_id

                async def call() -> None:
                    await first.call(
                        "slow", {"steps": 3, "gate": gate}, progress=steps, tokens=tokens
                    )

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    await first.until(
                        lambda: steps == [1] and len(tokens) >= 1, what="progress and a token"
                    )
                    network.enter_context(proxy.offline())
                    tasks.cancel_scope.cancel()
        stage.mark(f"{gate}:go")
        await stage.reached(f"{gate}:done")

        async with connected(
            proxy.url(), session_id=session_id, protocol_version="2025-11-25"
        ) as second:
            answer = await second.call("slow", {"steps": 3, "gate": gate}, resume_from=tokens[-1])

        assert answer == "3 steps"
        assert stage.count(f"{gate}:started") == 1


# Not typescript-2: it lists nothing of a server whose capabilities it does not know.
@clients("python-2", "python-1", "typescript-1")
async def test_a_client_given_a_session_id_needs_no_initialize_and_may_count_from_zero(
    under_test: UnderTest, connected: Connect, proxy: TcpProxy, gate: str
) -> None:
    """A request whose stream was cut no longer counts, so its id may come again."""
    stage, wire = under_test.app.stage, under_test.server.wire
    steps: list[float] = []
    async with proxy:
        with ExitStack() as network:
            async with connected(proxy.url(), terminate=False) as first:
                session_id = first.session_id

                async def call() -> None:
                    await first.call("slow", {"steps": 1, "gate": gate}, progress=steps)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    # Not earlier: the Python client does not outlive a request that is
                    # cut before its response has begun.
                    await first.until(lambda: steps == [1], what="the first step")
                    network.enter_context(proxy.offline())
                    tasks.cancel_scope.cancel()
        unanswered = await wire.saw(
            lambda e: gate.encode() in e.request_body and e.is_finished, rpc="tools/call"
        )

        before = len(wire.exchanges)
        async with connected(
            proxy.url(), session_id=session_id, protocol_version="2025-11-25", terminate=False
        ) as second:
            for number in range(4):
                assert await second.call("echo", {"text": str(number)}) == str(number)
            assert sorted(await second.list("tools")) == sorted(apps.TOOLS)

        sent = [e.sent for e in wire.matching(method="POST", since=before)]
        assert "initialize" not in {message["method"] for message in sent}
        assert unanswered.sent["id"] in {message.get("id") for message in sent}
        stage.mark(f"{gate}:go")


@clients(*ALL)
async def test_a_session_ended_at_another_replica_is_an_error_that_says_so(
    under_test: UnderTest, connected: Connect, kind: ClientKind
) -> None:
    """404, and the GET stream ends."""
    # FastMCP's client cannot be sent not to send DELETE, and takes its 404 calmly; the
    # TypeScript client does not.
    terminate = kind == "fastmcp-4"
    wire = under_test.server.wire
    async with connected(terminate=terminate) as client:
        await wire.saw(method="GET", session_id=client.session_id)
        assert client.session_id is not None
        async with httpx2.AsyncClient() as http:
            response = await http.delete(
                under_test.server.url(), headers={"mcp-session-id": client.session_id}
            )
        assert response.status_code in (200, 204)

        await wire.saw(lambda e: e.is_finished, method="GET", session_id=client.session_id)
        before = len(wire.exchanges)
        with pytest.raises(Failed) as failed:
            await client.call("echo", {"text": "anybody there?"})

        assert "session" in failed.value.message.lower()
        call = await wire.saw(rpc="tools/call", session_id=client.session_id, since=before)
        assert call.status == 404


@clients("python-2", "python-1", "typescript-1", "typescript-2")
async def test_an_unknown_session_id_is_an_error_that_says_so(
    under_test: UnderTest, connected: Connect
) -> None:
    async with connected(
        under_test.server.url(),
        session_id="never-issued",
        protocol_version="2025-11-25",
        terminate=False,
    ) as client:
        with pytest.raises(Failed) as failed:
            await client.call("echo", {"text": "anybody there?"})

        assert "session" in failed.value.message.lower()
        call = await under_test.server.wire.saw(rpc="tools/call", session_id="never-issued")
        assert call.status == 404
