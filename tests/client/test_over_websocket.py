"""The resuming client over WebSocket: against the real server, and against one that misbehaves."""

import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client, MCPError
from websockets.asyncio.server import ServerConnection, serve

from mcp_sessions.client.application import Callbacks
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.resuming import ResumingClient
from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client.state import Runtime
from mcp_sessions.client_transport import dial_with, resumable
from mcp_sessions.errors import ConfigurationError
from mcp_sessions_transports.websocket.websocket_client import DROPPED
from tests.support.board import Board
from tests.support.resuming import MODES, QUICK, Received, connected, text_of
from tests.support.scripted import OURS, Exchange, ScriptedServer, tool_result

Json = dict[str, Any]
SAID: Json = {"said": "already"}
"""The result of a function that has answered itself."""

Answerer = Callable[["Scripted", ServerConnection, Json], Awaitable[Json | None]]


class Scripted:
    """A WebSocket server that answers as it should, unless the test's function for the method
    does; for messages without a method, it has an empty name.
    """

    def __init__(self, script: dict[str, Answerer]) -> None:
        self.script = script
        self.asked: list[str] = []
        self.connections = 0
        self.offered: list[Any] = []
        self.extensions = OURS

    async def serve(self, socket: ServerConnection) -> None:
        self.connections += 1
        self.offered.append(socket.request.headers if socket.request else None)
        async for frame in socket:
            message = json.loads(frame)
            method = message.get("method", "")
            self.asked.append(method)
            result: Json | None = None
            if method in self.script:
                result = await self.script[method](self, socket, message)
            if result is None:
                result = self.as_it_should(message)
            if result is not None and result is not SAID and "id" in message:
                answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
                await socket.send(json.dumps(answer))

    def as_it_should(self, message: Json) -> Json | None:
        match message.get("method"):
            case "initialize":
                return {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {}, "sessions": {}, "extensions": self.extensions},
                    "serverInfo": {"name": "scripted", "version": "1"},
                }
            case "session/start":
                return {"sessionId": "s-1", "sessionEventId": "0"}
            case "session/resume":
                return {"resumed": True, "catchup": True}
            case "tools/call":
                return tool_result("fine")
            case "tools/list":
                return {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
            case _:
                return {}


@asynccontextmanager
async def client_of(
    script: dict[str, Answerer] | None = None,
    *,
    policy: ReconnectPolicy = QUICK,
    takes: int | None = None,
    roots: Any = None,
    extensions: Json = OURS,
    **options: Any,
) -> AsyncGenerator[tuple[Client, Received, Scripted]]:
    """A client of a server that does as the test says.

    Args:
        takes: Bytes of a message that it takes at the most; a larger one closes with 1009.
    """
    scripted, received = Scripted(script or {}), Received()
    scripted.extensions = extensions
    subprotocols: Any = ["mcp"]
    async with serve(
        scripted.serve, "127.0.0.1", 0, subprotocols=subprotocols, max_size=takes
    ) as server:
        port = list(server.sockets)[0].getsockname()[1]
        url = f"ws://127.0.0.1:{port}/mcp"
        transport = resumable(url, on_resume=received.on_resume, policy=policy, **options)
        with anyio.fail_after(30):
            notified = received.on_message
            async with Client(
                transport, mode="legacy", message_handler=notified, list_roots_callback=roots
            ) as client:
                yield client, received, scripted


def closing(code: int, *, connections: int = 1_000) -> Answerer:
    """Closes, on so many connections."""

    async def close(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        if scripted.connections <= connections:
            await socket.close(code)

    return close


async def not_answered(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
    """Not on the first connection."""
    return SAID if scripted.connections == 1 else None


async def echo(client: Client, **arguments: Any) -> str:
    return text_of(await client.call_tool("echo", arguments))


async def expect_unknown(client: Client, **arguments: Any) -> types.ErrorData:
    """A call fails, and its caller learns that nobody knows whether it ran."""
    with pytest.raises(MCPError) as unknown:
        await client.call_tool("echo", arguments)
    assert is_outcome_unknown(unknown.value)
    return unknown.value.error


async def failure_of(call: Awaitable[Any]) -> types.ErrorData:
    with pytest.raises(MCPError) as failed:
        await call
    return failed.value.error


@pytest.mark.parametrize("mode", MODES)
async def test_the_session_moves_from_http_to_websocket_and_back(mode: str) -> None:
    async with connected(mode, "http") as it:
        first = await it.call("session_id")
        for scheme in ("ws", "http", "ws"):
            outcome = await it.transport.move_to(it.proxy.url(scheme=scheme))
            assert outcome.recovered
            assert outcome.connected_to == it.proxy.url(scheme=scheme)
            assert await it.call("session_id") == first
        # Each move took the session from a connection of its own: that is no takeover.
        assert [outcome.reason for outcome in it.received.outcomes] == [None] * 3


async def test_a_move_that_fails_leaves_the_session_where_it_is() -> None:
    async with connected("legacy", "http") as it:
        first = await it.call("session_id")
        with pytest.raises(ConnectionError):
            await it.transport.move_to("ws://127.0.0.1:1/mcp")

        assert await it.call("session_id") == first


async def test_a_move_that_the_application_gives_up_leaves_the_session_where_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with connected("legacy", "http") as it:
            first = await it.call("session_id")
            with anyio.move_on_after(0.1) as moving:
                await it.transport.move_to(f"http://127.0.0.1:{mute.getsockname()[1]}/mcp")
            assert moving.cancelled_caught

            assert await it.call("session_id") == first


async def test_a_normal_close_is_the_end() -> None:
    """1000 says: do not come back."""
    async with client_of({"tools/call": closing(1000)}) as (client, received, scripted):
        await expect_unknown(client)
        assert (await received.outcome()).has_ended
        assert scripted.connections == 1


@pytest.mark.parametrize("code", [1001, 1011, 1012, 1013, 4999])
async def test_after_any_other_close_it_comes_back_and_asks_again(code: int) -> None:
    async with client_of({"tools/call": closing(code, connections=1)}) as (
        client,
        received,
        scripted,
    ):
        assert await echo(client) == "fine"

        assert (await received.outcome()).recovered
        assert scripted.asked.count("tools/call") == 2
        assert scripted.connections == 2


async def test_a_server_that_accepts_and_dies_is_not_asked_without_a_pause() -> None:
    """CLI2: a connection that opens is no progress."""

    async def die(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        if scripted.connections > 1 or message["method"] == "tools/call":
            await socket.close(1011)

    policy = ReconnectPolicy(backoff_base=0.02, backoff_cap=10, give_up_after=1)
    async with client_of({"initialize": die, "tools/call": die}, policy=policy) as (
        client,
        _,
        scripted,
    ):
        with pytest.raises(MCPError):
            await client.call_tool("echo", {})

        # Without back-off there would be hundreds.
        assert scripted.connections < 20


def taken_over(**more: str) -> str:
    params = {"sessionId": "s-1", "reason": "taken_over", **more}
    method = "notifications/sessions/detached"
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params})


async def test_whoever_is_taken_over_does_not_come_back() -> None:
    """TKO7, also when the connection closes after it."""

    async def take(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        await socket.send(taken_over())
        await socket.close(1001)

    async with client_of({"tools/call": take}) as (client, received, scripted):
        await expect_unknown(client)
        assert [outcome.reason for outcome in received.outcomes] == ["taken_over"]
        assert scripted.connections == 1


async def test_a_takeover_that_is_reported_right_after_the_resume_is_received() -> None:
    """TKO7: the client is still running on the result when it comes."""

    async def take(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        result = {"jsonrpc": "2.0", "id": message["id"], "result": {"resumed": True}}
        for sent in (json.dumps(result), taken_over(instance="somebody-else")):
            await socket.send(sent)

    async with client_of({"tools/call": closing(1001), "session/resume": take}) as (
        client,
        received,
        _,
    ):
        with pytest.raises(MCPError):
            await client.call_tool("echo", {})
        await received.has(lambda: received.outcomes[-1].has_ended, "the takeover")


DRAINING: Json = {"reason": "draining", "started": False}
AWAY: Json = {"reason": "store_unavailable", "started": False}


async def refuses(socket: ServerConnection, message: Json, data: Json = DRAINING) -> Json:
    """Answer as a server that shuts down."""
    error = {"code": -32603, "message": "the server is shutting down", "data": data}
    await socket.send(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}))
    return SAID


@pytest.mark.parametrize("extensions", [OURS, {}], ids=["keys", "no-keys"])
@pytest.mark.parametrize("data", [DRAINING, AWAY], ids=["draining", "store away"])
async def test_a_call_that_did_not_begin_is_served_at_another_replica(
    extensions: Json, data: Json
) -> None:
    """ERR15, ERR17: it did not begin, so that it may be sent without a key as well."""
    ran: list[str] = []

    async def drains(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.connections == 1:
            return await refuses(socket, message, data)
        ran.append(message["params"]["_meta"]["io.modelcontextprotocol/session"]["sessionId"])
        return None

    async with client_of({"tools/call": drains}, extensions=extensions) as (
        client,
        received,
        scripted,
    ):
        assert await echo(client) == "fine"

        assert (await received.outcome()).recovered
        assert (scripted.connections, ran) == (2, ["s-1"])


async def test_a_refusal_of_the_second_sending_says_nothing_of_the_first() -> None:
    """ERR15: that it did not begin is known of the sending that was refused alone."""

    async def runs_once(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.connections > 1:
            return await refuses(socket, message)
        await socket.close(1012)
        return SAID

    policy = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.1, give_up_after=1)
    async with client_of({"tools/call": runs_once}, policy=policy) as (client, _, _):
        await expect_unknown(client)


async def test_a_call_that_is_cancelled_without_a_connection_is_cancelled_on_the_next() -> None:
    """REQ7: by its key. It may be running."""
    sent: list[Json] = []
    is_resuming, may_resume = anyio.Event(), anyio.Event()

    async def runs_on(scripted: Scripted, socket: ServerConnection, message: Json) -> Json:
        sent.append(message)
        await socket.close(1012)
        return SAID

    async def resumes(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        is_resuming.set()
        await may_resume.wait()

    async def cancels(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        sent.append(message)

    script = {"tools/call": runs_on, "session/resume": resumes}
    async with client_of({**script, "notifications/cancelled": cancels}) as (client, received, _):
        async with anyio.create_task_group() as calling:
            calling.start_soon(echo, client)
            await is_resuming.wait()
            calling.cancel_scope.cancel()
        may_resume.set()
        await received.outcome()
        await client.list_tools()

    (call, cancel), named = sent, "io.github.mcp-sessions/requestKey"
    assert cancel["method"] == "notifications/cancelled"
    assert cancel["params"]["_meta"][named] == call["params"]["_meta"][named]


async def test_a_connection_that_closes_before_the_resume_is_answered_is_left_at_once() -> None:
    """It is not waited for until the time for an answer is over."""

    async def closes(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.connections > 2:
            return None
        await socket.close(1011)
        return SAID

    script: dict[str, Answerer] = {
        "tools/call": closing(1011, connections=1),
        "session/resume": closes,
    }
    policy = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.1, connect_timeout=300)
    async with client_of(script, policy=policy) as (client, _, scripted):
        assert await echo(client) == "fine"
        assert scripted.connections == 3


async def test_an_event_before_the_answer_to_the_resume_does_not_keep_that_answer_away() -> None:
    """On one connection the answer is behind it. It is a session of the application."""
    got: list[Json] = []
    board = Board()
    named = {"io.modelcontextprotocol/session": {"sessionId": "s-1"}}

    async def deliver(message: Json) -> None:
        got.append(message)
        board.announce()

    async def hang_up() -> None:
        raise AssertionError("the connection ended")

    async def evicts(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        params = {"sessionId": "s-1", "reason": "evicted"}
        detached = {"jsonrpc": "2.0", "method": "notifications/sessions/detached"}
        await socket.send(json.dumps({**detached, "params": params}))

    async def resumes(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        params = {"level": "info", "data": "news", "sessionEventId": "1", "_meta": named}
        event = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        await socket.send(json.dumps(event))

    scripted = Scripted({"tools/list": evicts, "session/resume": resumes})
    policy = ReconnectPolicy(backoff_base=0.02, connect_timeout=300)
    subprotocols: Any = ["mcp"]
    with anyio.fail_after(30):
        async with (
            serve(scripted.serve, "127.0.0.1", 0, subprotocols=subprotocols) as server,
            anyio.create_task_group() as tasks,
        ):
            port = list(server.sockets)[0].getsockname()[1]
            dialer = dial_with(policy=policy)(f"ws://127.0.0.1:{port}/mcp")
            client = ResumingClient([dialer], Runtime(policy, tasks), Callbacks(deliver, hang_up))

            async def ask(number: int, method: str, **params: Any) -> None:
                request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
                await client.take(request, {})
                await client.until_answered(number)

            await client.start()
            known: Json = {"capabilities": {}, "clientInfo": {"name": "app", "version": "1"}}
            await ask(1, "initialize", protocolVersion="2025-11-25", **known)
            await ask(2, "session/start")
            await ask(3, "tools/list")
            await board.until(
                lambda: any(each.get("method") == "notifications/message" for each in got),
                what="the event",
            )
            await ask(4, "tools/call", name="echo")
            assert scripted.connections == 1 and scripted.asked.count("session/resume") == 1
            await client.close()
            tasks.cancel_scope.cancel()


UNKNOWN: Json = {
    "code": -31012,
    "message": "Outcome unknown",
    "data": {"reason": "store_unavailable"},
}


@pytest.mark.parametrize("method", ["session/start", "session/resume"])
@pytest.mark.parametrize("error", [None, UNKNOWN], ids=["draining", "store away"])
async def test_a_session_is_not_given_up_since_a_server_is_away(
    method: str, error: Json | None
) -> None:
    """ERR15, ERR17: it may be started, or is still there, at the next connection."""

    async def drains(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.asked.count(method) > 1:
            return None
        if error is None:
            return await refuses(socket, message)
        await socket.send(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}))
        return SAID

    async def restarts(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        if "session/resume" not in scripted.asked:
            await socket.close(1012)

    async with client_of({method: drains, "tools/call": restarts}) as (client, received, scripted):
        assert await echo(client) == "fine"
        assert await echo(client) == "fine"
        assert received.outcomes[-1].recovered
        assert scripted.asked.count("session/start") == (2 if method == "session/start" else 1)


async def test_a_server_that_never_stops_draining_is_not_asked_for_ever() -> None:
    async def drains(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        return await refuses(socket, message)

    policy = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.1, give_up_after=1)
    async with client_of({"tools/call": drains}, policy=policy) as (client, _, _):
        assert "safe to send it again" in (await failure_of(client.call_tool("echo", {}))).message


async def test_an_error_of_that_code_that_says_nothing_of_it_is_the_answer() -> None:
    async def fails(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        return await refuses(socket, message, {"reason": "draining"})

    async with client_of({"tools/call": fails}) as (client, _, scripted):
        with pytest.raises(MCPError):
            await client.call_tool("echo", {})
        assert scripted.asked.count("tools/call") == 1


async def test_an_address_where_nothing_listens_is_named_with_the_cause() -> None:
    """And without the credentials that it holds."""
    transport = resumable("ws://user:secret@127.0.0.1:1/mcp?token=secret", policy=QUICK)
    named = "ws://127.0.0.1:1/mcp: no WebSocket: connection refused"
    with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=named), flatten_subgroups=True):
        async with Client(transport, mode="legacy"):
            raise AssertionError("it connected")


UNUSABLE: dict[str, Json] = {
    "a result that is no object": {"result": "fine"},
    "an error without a message": {"error": {"code": 5}},
    "a method that is null": {"method": None, "result": {}},
    "neither": {},
    "no version": {"jsonrpc": "1.0", "result": {}},
}


@pytest.mark.parametrize("answer", UNUSABLE.values(), ids=UNUSABLE)
async def test_a_call_whose_answer_cannot_be_used_fails_at_once(answer: Json) -> None:
    """Nothing better comes: its caller need not wait for `answer_timeout`."""

    async def mumbles(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.asked.count("tools/call") > 1:
            return None
        await socket.send(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}))
        return SAID

    with anyio.fail_after(10):
        async with client_of({"tools/call": mumbles}) as (client, _, scripted):
            with pytest.raises(MCPError):
                await client.call_tool("echo", {})

            assert await echo(client) == "fine"
            assert scripted.connections == 1


SMALL = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.2, give_up_after=5, max_message=20_000)


async def test_an_answer_that_is_too_large_is_an_unknown_outcome_and_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """KEY11: asked for again under its key it would be as large, at each connection."""

    async def brags(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        return tool_result("x" * 50_000) if scripted.asked.count("tools/call") == 1 else None

    async with client_of({"tools/call": brags}, policy=SMALL) as (client, received, scripted):
        data = (await expect_unknown(client)).data
        assert (data["reason"], data["limit"]) == ("too_large", 20_000)
        assert await echo(client) == "fine"
        assert (scripted.asked.count("tools/call"), scripted.connections) == (2, 1)
        assert received.outcomes == []
    assert "bytes was dropped: ReconnectPolicy.max_message is 20000" in caplog.text


async def test_an_answer_that_is_far_too_large_ends_its_connection_and_its_call() -> None:
    """More than `DROPPED` limits are not read."""

    async def brags(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        return tool_result("x" * DROPPED * SMALL.max_message)

    async with client_of({"tools/call": brags}, policy=SMALL) as (client, _, scripted):
        assert (await expect_unknown(client)).code == -31012
        assert scripted.asked.count("tools/call") == 1


async def test_an_event_that_is_too_large_is_passed_over_and_reported_as_a_gap() -> None:
    async def shouts(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        params = {"level": "info", "data": "x" * 50_000, "sessionEventId": "1"}
        event = {"jsonrpc": "2.0", "method": "notifications/message", "params": params}
        await socket.send(json.dumps(event))
        return None

    async with client_of({"tools/call": shouts}, policy=SMALL) as (client, received, scripted):
        assert await echo(client) == "fine"

        outcome = await received.outcome()
        assert (outcome.recovered, outcome.reason) == (False, "too_large")
        assert "notifications/tools/list_changed" in received.methods
        assert scripted.connections == 1


@pytest.mark.parametrize(
    ("takes", "size", "code"),
    [(20_000, 30_000, -31012), (100_000, 130_000, -32600), (100_000, 30_000_000, -32600)],
)
async def test_a_request_that_is_too_large_for_the_server_fails_and_costs_nothing_else(
    takes: int, size: int, code: int
) -> None:
    """WSS5, WSS15: doing the same again is of no use; whatever else is asked is asked again. That
    it did not run is said of what is so large that nothing else can have been meant.
    """
    async with client_of({"tools/call": not_answered}, takes=takes) as (client, received, scripted):
        answers: list[str] = []
        errors: list[types.ErrorData] = []

        async def small() -> None:
            answers.append(await echo(client, text="x" * 15_000))

        async def large() -> None:
            while "tools/call" not in scripted.asked:
                await anyio.lowlevel.checkpoint()
            call = client.call_tool("echo", {"text": "x" * size})
            errors.append(await failure_of(call))

        async with anyio.create_task_group() as both:
            both.start_soon(small)
            both.start_soon(large)
        assert answers == ["fine"]
        assert errors[0].code == code
        data = errors[0].data
        assert data["reason"] == "too_large" and size < data["size"] < size + 1_000
        assert (await received.outcome()).recovered
        assert scripted.connections == 2


async def test_an_answer_that_is_too_large_for_the_server_is_an_error_instead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is given on the next connection; else the session would be cut there again."""
    answers: list[Json] = []

    async def asks(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.connections > 1:
            return None
        question: Json = {"jsonrpc": "2.0", "method": "roots/list", "id": "q"}
        await socket.send(json.dumps(question))
        return SAID

    async def receives(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        answers.append(message)

    async def roots(context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri="file:///" + "x" * 130_000)])  # pyright: ignore[reportArgumentType]

    async with client_of({"tools/call": asks, "": receives}, takes=100_000, roots=roots) as (
        client,
        received,
        it,
    ):
        assert await echo(client) == "fine"
        assert (await received.outcome()).recovered
        assert it.connections == 2

    assert [(a["id"], a["error"]["code"]) for a in answers] == [("q", -32603)]
    assert "an answer is too large for the server" in caplog.text


async def test_a_notification_that_is_too_large_for_the_server_is_left_out() -> None:
    """Requests that run meanwhile are repeated."""
    async with client_of({"tools/call": not_answered}, takes=100_000) as (
        client,
        received,
        scripted,
    ):
        answers: list[str] = []

        async def call() -> None:
            answers.append(await echo(client))

        async with anyio.create_task_group() as both:
            both.start_soon(call)
            while "tools/call" not in scripted.asked:
                await anyio.lowlevel.checkpoint()
            await client.session.send_progress_notification(  # pyright: ignore[reportDeprecated]
                "p", 0.5, message="x" * 130_000
            )
        assert answers == ["fine"]
        assert (await received.outcome()).recovered
        assert scripted.connections == 2


@pytest.mark.parametrize("size", [300, 130_000])
async def test_what_the_server_can_take_is_not_what_was_too_large_for_it(size: int) -> None:
    """Something between the two may close for an answer: the call may have run, and nobody knows
    what would be another one next time.
    """

    async def closes(scripted: Scripted, socket: ServerConnection, message: Json) -> Json | None:
        if scripted.asked.count("tools/call") == 1:
            return None
        await socket.close(1009)
        return SAID

    async with client_of({"tools/call": closes}) as (client, received, scripted):
        assert await echo(client, text="x" * 140_000) == "fine"
        await expect_unknown(client, text="x" * size)
        assert (await received.outcome()).has_ended
        assert scripted.connections == 1


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_listen_that_is_too_large_for_the_server_fails_and_another_continues(
    scheme: str,
) -> None:
    """Asked for again and again it would cut the connection each time."""
    uris = [f"note://{number}/" + "x" * 80_000 for number in range(60)]
    async with connected("2026-07-28", scheme) as it:
        said: list[str] = []

        async def large() -> None:
            with pytest.raises(MCPError) as refused:
                async with it.client.listen(resource_subscriptions=uris):
                    raise AssertionError("it was not refused")
            said.append(str(refused.value))

        async with anyio.create_task_group() as both:
            both.start_soon(large)
            # At the same time, so that one request asks for both.
            async with it.client.listen(tools_list_changed=True):
                assert await it.call("session_id")
        assert "413" in said[0] or "too large" in said[0]


@pytest.mark.parametrize(
    "params", [{"pad": "x" * 50_000}, []], ids=["too large", "refused by the SDK"]
)
async def test_a_question_that_cannot_be_asked_is_answered_with_an_error(params: Any) -> None:
    """Otherwise the server's handler would wait until its timeout."""
    answers: list[Json] = []

    async def asks(scripted: Scripted, socket: ServerConnection, message: Json) -> None:
        question = {"jsonrpc": "2.0", "id": "q", "method": "roots/list", "params": params}
        await socket.send(json.dumps(question))
        answers.append(json.loads(await socket.recv()))

    async with client_of({"tools/call": asks}, policy=SMALL) as (client, _, _):
        assert await echo(client) == "fine"

    assert [(a["id"], a["error"]["code"]) for a in answers] == [("q", -32600)]


async def test_it_offers_the_subprotocol_and_sends_its_headers() -> None:
    headers = {"Authorization": "Bearer t"}
    async with client_of(headers=headers) as (_, _, scripted):
        [sent] = scripted.offered

        assert sent["Sec-WebSocket-Protocol"] == "mcp"
        assert sent["Authorization"] == "Bearer t"
        assert "Sec-WebSocket-Extensions" not in sent


async def test_a_redirect_is_not_followed() -> None:
    """It may lead to another server, and the credentials were meant for this one."""
    async with ScriptedServer() as other:
        location = {"Location": other.url().replace("http", "ws")}

        def redirect(exchange: Exchange) -> None:
            exchange.respond(307, headers=location)

        async with ScriptedServer({"*": redirect}) as server:
            for url in (server.url(), server.url().replace("http", "ws")):
                transport = resumable(url, headers={"Authorization": "Bearer t"}, policy=QUICK)
                with anyio.fail_after(20), pytest.RaisesGroup(MCPError, flatten_subgroups=True):
                    async with Client(transport, mode="legacy"):
                        raise AssertionError("it connected")
            assert len(server.requests) == 2
        assert other.requests == []


async def test_a_url_of_another_kind_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="http://, https://, ws:// or wss://"):
        resumable("ftp://host/mcp")
