"""The TypeScript v2 client, unmodified, against wrapped servers in both eras.

"the TypeScript v2 client in the modern era work[s] unmodified". It is pinned to
2026-07-28, finds it out by itself (``auto``), or shakes hands (``legacy``: 2025-11-25).
"""

import json
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import anyio
import pytest

from tests.interop.clients import UPDATED, ClientKind, Message, ToolFailed
from tests.interop.driver import Driver, Failed
from tests.interop.harness import IS_BARE, UnderTest
from tests.interop.modern import Mode, TypeScript2
from tests.support import apps
from tests.support.everything import ODD, Everything, EverythingKind, make_everything
from tests.support.modern import ACKNOWLEDGED, EVENT_ID, MODERN, SUBSCRIPTION_ID
from tests.support.raw import EXTENSION, SESSION
from tests.support.servers import RunningServer, serve

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(apps.DEPRECATED),
]

UNKNOWN_ID = "A" * 43
HANDSHAKE = "2025-11-25"

in_every_mode = pytest.mark.parametrize("mode", ["auto", "2026-07-28", "legacy"])
in_the_modern_era = pytest.mark.parametrize("mode", ["auto", "2026-07-28"])


class Open(Protocol):
    """Opens the client in the driver's process."""

    def __call__(self, url: str, mode: Mode) -> AbstractAsyncContextManager[TypeScript2]: ...


@pytest.fixture
def opened(driver_of: Callable[[ClientKind], Driver]) -> Open:
    # Now, since it may have to be installed: within a test the time is short.
    driver_of("typescript-2")

    @asynccontextmanager
    async def of_this_driver(url: str, mode: Mode) -> AsyncGenerator[TypeScript2]:
        with anyio.fail_after(30):
            async with TypeScript2.open(driver_of("typescript-2"), url, mode) as client:
                yield client

    return of_this_driver


class RichServer:
    """One of the servers of `tests.support.everything`, running."""

    def __init__(self, kind: EverythingKind, rich: Everything, server: RunningServer) -> None:
        self.kind = kind
        self.rich = rich
        self.server = server


# FastMCP 4 has neither listen nor rounds.
@pytest.fixture(scope="module", params=["mcpserver", "lowlevel"])
def rich(request: pytest.FixtureRequest) -> Generator[RichServer]:
    """One server of each class that listens and asks in rounds."""
    made = make_everything(request.param)
    if IS_BARE:
        app = made.server.streamable_http_app()
    else:
        from mcp_sessions import SessionLayer

        app = SessionLayer(made.server).asgi_app(path="/mcp")
    with serve(app) as server:
        yield RichServer(request.param, made, server)


def asked_for(server: RunningServer, since: int) -> list[str]:
    return [str(exchange.sent.get("method")) for exchange in server.wire.since(since)]


def in_session(session_id: str, **params: Any) -> dict[str, Any]:
    return {**params, "_meta": {SESSION: {"sessionId": session_id}}}


# --- ordinary use --------------------------------------------------------------------------


@in_every_mode
async def test_it_negotiates(under_test: UnderTest, opened: Open, mode: Mode) -> None:
    """Modern: ``server/discover`` and no handshake. Legacy: a handshake and no probe."""
    before = len(under_test.server.wire.exchanges)
    async with opened(under_test.server.url(), mode) as client:
        assert client.opened["server"]["name"] == "notes"
        if mode == "legacy":
            assert (client.opened["era"], client.opened["version"]) == ("legacy", HANDSHAKE)
            assert client.session_id is not None
        else:
            assert (client.opened["era"], client.opened["version"]) == ("modern", MODERN)
            assert client.session_id is None
            assert MODERN in (await client.discover())["supportedVersions"]
        if not IS_BARE:
            assert EXTENSION in client.opened["capabilities"]["extensions"]
        assert client.errors == ()
    asked = asked_for(under_test.server, before)
    assert ("initialize" in asked) == (mode == "legacy")
    assert ("server/discover" in asked) == (mode != "legacy")
    if mode != "legacy":
        for exchange in under_test.server.wire.since(before):
            assert exchange.method == "POST" and exchange.status == 200, exchange
            assert "mcp-session-id" not in exchange.response_headers, exchange


@in_every_mode
async def test_it_works_unmodified(under_test: UnderTest, opened: Open, mode: Mode) -> None:
    """Lists, calls, progress, resources, prompts."""
    progress: list[float] = []
    async with opened(under_test.server.url(), mode) as client:
        assert sorted(await client.list("tools")) == sorted(apps.TOOLS)
        assert await client.list("resources") == ["note://welcome"]
        assert await client.list("templates") == ["note://{n}"]
        assert await client.list("prompts") == ["greet"]
        assert await client.call("echo", {"text": ODD}) == ODD
        assert await client.call("slow", {"steps": 3}, progress=progress) == "3 steps"
        assert progress == [1, 2, 3]
        assert (await client.read("note://welcome")).startswith("note://welcome version ")
        assert (await client.read("note://of mine")).endswith(" version 0")
        assert await client.prompt("greet", {"name": ODD}) == f"Greet {ODD}."
        assert client.errors == ()


@in_every_mode
async def test_many_calls_at_once_are_each_answered(
    under_test: UnderTest, opened: Open, mode: Mode
) -> None:
    answers: dict[int, str] = {}

    async def call(client: TypeScript2, number: int) -> None:
        answers[number] = await client.call("echo", {"text": str(number)})

    async with opened(under_test.server.url(), mode) as client:
        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(call, client, number)
        assert client.errors == ()
    assert answers == {number: str(number) for number in range(30)}


@in_the_modern_era
async def test_logs_come_to_whom_opts_in(under_test: UnderTest, opened: Open, mode: Mode) -> None:
    async with opened(under_test.server.url(), mode) as client:
        await client.call_whole("log", {"text": "unasked"})
        await client.call_whole("log", {"text": "too little"}, log_level="error")
        await client.call_whole("log", {"text": "what was wanted"}, log_level="info")
        await client.until(lambda: bool(client.logs), what="a log message")
        assert len(client.logs) == 1
        assert "what was wanted" in str(client.logs[0])


@in_the_modern_era
async def test_a_call_that_is_cancelled_is_cancelled_on_the_server(
    under_test: UnderTest, opened: Open, gate: str, mode: Mode
) -> None:
    """Its stream is closed: that is this era's cancellation."""
    stage = under_test.app.stage
    async with opened(under_test.server.url(), mode) as client:
        with pytest.raises(Failed):
            await client.call(
                "slow",
                {"steps": 2, "gate": gate},
                cancel_when=lambda: stage.reached(f"{gate}:started"),
            )
        await stage.reached(f"{gate}:cancelled")
        assert await client.call("echo", {"text": "still there"}) == "still there"


# --- errors --------------------------------------------------------------------------------


@in_every_mode
async def test_errors_reach_it(under_test: UnderTest, opened: Open, mode: Mode) -> None:
    """Of a tool, of the server, and for a method that there is not.

    That has HTTP status 404 in the modern era, and the client raises HTTP's error for it,
    with the JSON-RPC error as text.
    """
    async with opened(under_test.server.url(), mode) as client:
        with pytest.raises(ToolFailed):
            await client.call("unknown")
        if under_test.kind != "lowlevel":
            with pytest.raises(Failed) as failed:
                await client.read("nowhere://at/all")
            assert failed.value.code == -32602
        with pytest.raises(Failed) as failed:
            await client.request("x/unknown")
        if mode == "legacy":
            assert failed.value.code == -32601
        else:
            assert failed.value.data["status"] == 404
            body = json.loads(failed.value.data["text"])
            assert body["error"]["code"] == -32601
        assert await client.call("echo", {"text": "still there"}) == "still there"


@in_every_mode
async def test_a_servers_own_error_comes_with_its_data(
    rich: RichServer, opened: Open, mode: Mode
) -> None:
    tool, arguments = ("fail", {"how": "mcp"}) if rich.kind == "mcpserver" else ("mcp", {})
    async with opened(rich.server.url(), mode) as client:
        with pytest.raises(Failed) as failed:
            await client.call(tool, arguments)
        assert failed.value.code == -32050
        assert ODD in failed.value.message
        assert "none" in failed.value.data
        assert client.errors == ()


@in_every_mode
async def test_structured_content_and_header_arguments(
    rich: RichServer, opened: Open, mode: Mode
) -> None:
    """It checks the one against the schema and repeats the others in ``Mcp-Param-*``."""
    if rich.kind == "lowlevel":
        return
    before = len(rich.server.wire.exchanges)
    async with opened(rich.server.url(), mode) as client:
        await client.list("tools")
        weather = await client.call_whole("weather", {"city": ODD})
        assert weather["structured"]["city"] == ODD
        assert await client.call("header", {"region": ODD, "count": 3}) == f"{ODD} 3"
        assert client.errors == ()
    if mode != "legacy":
        named = [e.headers for e in rich.server.wire.since(before) if b"header" in e.request_body]
        assert named[-1]["mcp-param-count"] == "3"


# --- the server asks, the server tells -----------------------------------------------------


@in_every_mode
async def test_it_is_asked_in_rounds(rich: RichServer, opened: Open, mode: Mode) -> None:
    """It answers an ``input_required`` result by itself and calls again.

    In the handshake era the SDK's ``MCPServer`` asks in the middle of the call instead; the
    lowlevel server leaves that to its handlers.
    """
    if rich.kind == "lowlevel" and mode == "legacy":
        return
    tool = {"mcpserver": "order", "lowlevel": "ask"}[rich.kind]
    before = len(rich.server.wire.exchanges)
    async with opened(rich.server.url(), mode) as client:
        text = await client.call(tool, {"item": "tea"})
        assert len(client.asked) == 1 and ODD in client.asked[0]
        assert client.errors == ()
    if rich.kind == "mcpserver":
        assert text.startswith("tea: 4 answer to How large?")
    else:
        assert text == "plain state: ['q']"
    assert asked_for(rich.server, before).count("tools/call") == (1 if mode == "legacy" else 2)


@in_the_modern_era
async def test_it_listens(rich: RichServer, opened: Open, mode: Mode) -> None:
    """``subscriptions/listen`` without a session: the SDK's own stream."""
    async with opened(rich.server.url(), mode) as client:
        wanted = {"resourceSubscriptions": ["note://a"], "toolsListChanged": True}
        assert await client.listen(**wanted) == wanted
        await client.call("touch", {"uri": "note://b"})
        await client.call("touch", {"uri": "note://a"})
        await client.until(lambda: bool(client.updates), what="an update")
        assert client.updates == ("note://a",)
        [update] = client.notifications(UPDATED)
        assert set(update["_meta"]) == {SUBSCRIPTION_ID}
        assert await client.unlisten() == "local"
        assert client.errors == ()


@in_the_modern_era
async def test_a_server_that_serves_no_listen_says_so(
    under_test: UnderTest, opened: Open, mode: Mode
) -> None:
    """FastMCP, and a lowlevel server without a handler for it: as without the layer."""
    if under_test.kind == "mcpserver":
        return
    async with opened(under_test.server.url(), mode) as client:
        with pytest.raises(Failed) as failed:
            await client.listen(resourceSubscriptions=["note://a"])
        assert failed.value.data["status"] == 404
        assert json.loads(failed.value.data["text"])["error"]["code"] == -32601


async def test_subscriptions_of_the_handshake_era(
    under_test: UnderTest, opened: Open, note: str
) -> None:
    async with opened(under_test.server.url(), "legacy") as client:
        await under_test.server.wire.saw(method="GET", session_id=client.session_id)
        await client.subscribe(note)
        await under_test.publish(note)
        await client.until(lambda: note in client.updates, what="an update")
        assert await client.call("ask", {"question": "q"}) == "accept: answer to q"
        assert client.errors == ()


# --- sessions, by its own request method ---------------------------------------------------


@pytest.mark.layer_only
@in_every_mode
async def test_it_sends_session_methods_itself(
    under_test: UnderTest, opened: Open, mode: Mode
) -> None:
    """``sessions/create``, a call that names the session, ``sessions/delete``; raw."""
    async with opened(under_test.server.url(), mode) as client:
        await client.request("sessions/create")
        made = client.response()["result"]
        assert set(made["session"]) == {"sessionId", "expiresAt", "state"}
        assert EVENT_ID in made["_meta"]
        session_id = made["session"]["sessionId"]

        call = in_session(session_id, name="session_id", arguments={})
        await client.request("tools/call", call)
        result = client.response()["result"]
        assert result["content"][0]["text"] == session_id
        stamp = result["_meta"][SESSION]
        assert set(stamp) == {"sessionId", "expiresAt", "state"}
        assert stamp["sessionId"] == session_id

        assert await client.call("session_id") != session_id
        assert SESSION not in client.response()["result"].get("_meta", {})

        await client.request("sessions/delete", in_session(session_id))
        for unknown in (session_id, UNKNOWN_ID):
            call = in_session(unknown, name="echo", arguments={"text": "x"})
            with pytest.raises(Failed) as failed:
                await client.request("tools/call", call)
            assert failed.value.code == -32043
            assert failed.value.data == {"sessionId": unknown}
        assert client.errors == ()


@pytest.mark.layer_only
@in_the_modern_era
async def test_a_listen_that_names_a_session_catches_up(
    under_test: UnderTest, opened: Open, note: str, mode: Mode
) -> None:
    """Live events, then a cut, then those missed, on every class of server."""
    one, two = f"{note}-one", f"{note}-two"
    async with opened(under_test.server.url(), mode) as client:
        session_id = (await client.request("session/start"))["sessionId"]
        wanted = {"resourceSubscriptions": [one, two]}
        listen = in_session(session_id, notifications=wanted)

        async def live() -> None:
            await acknowledged(client, 1)
            await under_test.publish(one)
            await client.updated(one)

        await client.request_until("subscriptions/listen", listen, live)
        await under_test.publish(two)
        [seen] = client.notifications(UPDATED)
        assert seen["_meta"][SESSION] == {"sessionId": session_id}

        params = {"sessionId": session_id, "lastSessionEventId": seen["sessionEventId"]}
        await client.request("session/resume", params)

        async def replayed() -> None:
            await acknowledged(client, 2)
            await client.updated(two)

        await client.request_until("subscriptions/listen", listen, replayed)
        assert client.updated_uris() == [one, two]
        assert list(client.updates) == [one, two]
        ids = [update["sessionEventId"] for update in client.notifications(UPDATED)]
        assert ids == sorted(set(ids))


async def acknowledged(client: TypeScript2, times: int) -> list[Message]:
    await client.until(
        lambda: len(client.notifications(ACKNOWLEDGED)) >= times, what="an acknowledgement"
    )
    return client.notifications(ACKNOWLEDGED)
