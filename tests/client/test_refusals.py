"""What proves to a client that a call did not run (KEY3, KEY17), status by status.

Each case counts the calls that the server got, and looks at what the application was told.
"""

from typing import Any

import anyio
import pytest
from mcp import Client, MCPError

from mcp_sessions import SessionLayer, is_outcome_unknown
from mcp_sessions.client.application import Callbacks
from mcp_sessions.client.messages import SUBSCRIPTION_ID
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.resuming import ResumingClient
from mcp_sessions.client.state import Runtime
from mcp_sessions.client_transport import dial_with, resumable
from mcp_sessions.core.messages import Json
from mcp_sessions.errors import INTERNAL_ERROR, SESSION_NOT_FOUND
from mcp_sessions.method_names import ACKNOWLEDGED
from tests.client.test_misbehaving_servers import (
    FOREIGN,
    KEY,
    call,
    client_of,
    facing,
    first,
    on_the_first_connection,
)
from tests.support.scripted import Entry, Exchange, ScriptedServer, named, status
from tests.support.servers import serve
from tests.support.world import Ctx, Toolbox

QUICK = ReconnectPolicy(backoff_base=0.01, backoff_cap=0.02, give_up_after=1, closing_timeout=0.2)
STATUSES = (
    *(400, 401, 402, 403, 405, 406, 408, 409, 410, 413, 415, 421, 422, 425, 429, 431, 451, 499),
    *(500, 501, 502, 503, 504, 520, 301, 302, 303, 307, 308),
)
TEXTS = (b"", b"no valid session ID: the request was not started")
WITHOUT_SESSIONS: dict[str, Any] = {"tools": {}}


def refuses(code: int, text: bytes) -> Any:
    headers = {"Retry-After": "0"} if code in (429, 503) else {}
    if 300 <= code < 400:
        headers = {"Location": "http://elsewhere.example/mcp"}
    return status(code, text, **headers)


async def failed_call(client: Any) -> str:
    with pytest.raises(MCPError) as failed:
        await call(client)
    assert "started" not in str(failed.value.error.data)
    return str(failed.value)


@pytest.mark.parametrize("capabilities", [FOREIGN, WITHOUT_SESSIONS], ids=["foreign", "without"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("code", STATUSES)
async def test_a_status_or_a_text_after_the_call_sends_it_once(
    code: int, text: bytes, capabilities: dict[str, Any]
) -> None:
    script = {"tools/call": first(1, refuses(code, text))}
    async with facing(script, capabilities, policy=QUICK) as (server, client, _):
        said = await failed_call(client)
        assert len(server.asked("tools/call")) == 1
        assert "safe to send" not in said and "was not sent" not in said
        await call(client)
        assert len(server.asked("tools/call")) == 2


@pytest.mark.parametrize("code", [429, 502, 503, 504])
async def test_a_call_that_is_sent_again_has_the_key_that_it_had(code: int) -> None:
    """A proxy answers so, too, after it passed the call on. Another key would run it again."""
    script = {"tools/call": first(1, refuses(code, b""))}
    async with facing(script, policy=QUICK) as (server, client, _):
        assert await call(client) == "s-1"
        one, two = server.asked("tools/call")
        assert one.meta[KEY] == two.meta[KEY]


def without_a_session(exchange: Exchange) -> None:
    version = exchange.params["protocolVersion"]
    info = {"name": "stateless", "version": "1"}
    exchange.result({"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})


async def test_404_of_a_server_that_issued_no_session_is_no_proof() -> None:
    script = {"initialize": without_a_session, "tools/call": first(1, status(404))}
    async with facing(script, policy=QUICK) as (server, client, _):
        assert "safe to send" not in await failed_call(client)
        assert len(server.asked("tools/call")) == 1


async def test_404_for_the_session_that_the_server_issued_is_one() -> None:
    """CLI10: also where there is nothing but that session, and no key."""
    script: dict[str, Entry] = dict.fromkeys(
        ("tools/call", "ping"), on_the_first_connection(status(404))
    )
    async with facing(script, WITHOUT_SESSIONS, policy=QUICK) as (server, client, _):
        assert await call(client) == "none"
        assert (server.transports, len(server.asked("tools/call"))) == (2, 2)


@pytest.mark.parametrize("capabilities", [FOREIGN, WITHOUT_SESSIONS], ids=["sessions", "none"])
async def test_404_of_a_handler_in_a_session_that_the_server_knows_is_no_proof(
    capabilities: Json,
) -> None:
    """KEY17: a ``ping`` in the same session is answered. The call ran, and runs once."""
    script = {"tools/call": first(1, status(404))}
    async with facing(script, capabilities, policy=QUICK) as (server, client, _):
        assert "safe to send" not in await failed_call(client)
        assert len(server.asked("tools/call")) == 1
        await call(client)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_server_that_says_that_a_call_had_begun_is_believed_each_time(
    is_late: bool,
) -> None:
    """END6: however often its session was not found before."""

    def entry(exchange: Exchange) -> None:
        exchange.error(SESSION_NOT_FOUND, "Session not found", data={"started": True})

    async with ScriptedServer({"tools/call": entry}) as server:
        async with client_of(server, policy=QUICK) as (client, _):
            for _ in range(4 if is_late else 1):
                assert "safe to send" not in await failed_call(client)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize(
    ("code", "data"),
    [
        (-32043, None),
        (-31010, None),
        (-32603, {"reason": "draining", "started": False}),
        (-32602, {"reason": "invalid_state"}),
        (-31011, {"limit": "request_key_bytes"}),
        (-31012, None),
    ],
)
async def test_an_error_of_a_handler_sends_no_call_again_and_ends_no_session(
    code: int, data: Any, mode: Any
) -> None:
    """ERR16: it looks like one by which the layer says that a call did not begin."""
    box = Toolbox()

    async def fails(ctx: Ctx, arguments: dict[str, Any]) -> str:
        raise MCPError(code, "no", data)

    box.tools["fails"] = fails
    lost: list[object] = []
    with serve(SessionLayer(box.server).asgi_app()) as server, anyio.fail_after(30):
        transport = resumable(server.url(), on_lost=lost.append)
        async with Client(transport, mode=mode) as client:
            for number in (1, 2):
                with pytest.raises(MCPError):
                    await client.call_tool("fails", {})
                assert len(box.calls) == number
    assert lost == []


async def test_a_server_that_starts_no_session_any_more_is_not_asked_over_and_over() -> None:
    """Its client had a listen stream open. It once asked for a session in a loop, without a pause,
    for as long as the stream was wanted.
    """
    envelope: Json = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    is_gone = False

    def serve(exchange: Exchange) -> None:
        if exchange.method == "server/discover":
            exchange.result({"resultType": "complete", "capabilities": server.capabilities})
        elif exchange.method == "subscriptions/listen":
            params = {"notifications": {}, "_meta": {SUBSCRIPTION_ID: exchange.message["id"]}}
            exchange.event({"jsonrpc": "2.0", "method": ACKNOWLEDGED, "params": params})
        elif is_gone and exchange.method in ("session/start", "sessions/create"):
            exchange.error(INTERNAL_ERROR, "no room")
        elif is_gone and named(exchange):
            exchange.error(SESSION_NOT_FOUND, "Session not found")

    async def take(client: ResumingClient, number: int, method: str, **params: Any) -> None:
        params["_meta"] = envelope
        await client.take({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, {})

    async def deliver(message: Json) -> None:
        assert "error" not in message

    async def hang_up() -> None:
        raise AssertionError("the client goes on")

    server = ScriptedServer({"*": serve})
    with anyio.fail_after(30):
        async with server, anyio.create_task_group() as tasks:
            dialer = dial_with(policy=QUICK)(server.url())
            client = ResumingClient([dialer], Runtime(QUICK, tasks), Callbacks(deliver, hang_up))
            await client.start()
            await take(client, 1, "subscriptions/listen", notifications={"toolsListChanged": True})
            await server.has(lambda: server.asked("subscriptions/listen"), "the listen")
            is_gone = True
            for number in range(2, 30):
                await take(client, number, "tools/list")
                await client.until_answered(number)
            assert len(server.asked("session/start")) <= 3
            await client.close()
            tasks.cancel_scope.cancel()


async def test_a_call_of_a_safe_tool_that_is_not_sent_again_may_have_run_all_the_same() -> None:
    """KEY3: its first sending may have run. That the next was not sent does not undo it."""
    has_run: list[Exchange] = []

    def runs(exchange: Exchange) -> None:
        has_run.append(exchange)
        exchange.reset()

    def is_safe(exchange: Exchange) -> None:
        tool = {"name": "echo", "inputSchema": {"type": "object"}}
        exchange.result({"tools": [{**tool, "annotations": {"readOnlyHint": True}}]})

    def is_away(exchange: Exchange) -> None:
        if has_run:
            exchange.reset()

    away = dict.fromkeys(("initialize", "session/resume", "session/start"), is_away)
    script: dict[str, Entry] = {"tools/list": is_safe, "tools/call": runs, **away}
    async with facing(script, FOREIGN, policy=QUICK) as (_, client, _):
        await client.list_tools()
        with pytest.raises(MCPError) as failed:
            await call(client)
        assert is_outcome_unknown(failed.value)
        assert len(has_run) == 1
