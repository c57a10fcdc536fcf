"""The resuming client against the real server, over real sockets that break."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import mcp_types as types
import pytest
from mcp import Client, MCPError
from mcp.server import MCPServer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client_transport import resumable
from mcp_sessions.errors import LIMIT_REACHED
from tests.support.apps import make_app
from tests.support.proxy import Side, TcpProxy
from tests.support.raw import RawClient, SocketCarrier
from tests.support.resuming import (
    MODES,
    QUICK,
    Received,
    app_of,
    connected,
    serving,
    subscribe,
    text_of,
)
from tests.support.servers import RunningServer, serve


@pytest.mark.parametrize("mode", MODES)
async def test_one_changed_line_gives_a_session_to_every_request(mode: str) -> None:
    async with connected(mode) as it:
        first = await it.call("session_id")

        assert len(first) >= 43
        assert await it.call("session_id") == first
        assert [tool.name for tool in (await it.client.list_tools()).tools]
        assert it.received.outcomes == []


@asynccontextmanager
async def another_client(server: RunningServer) -> AsyncGenerator[RawClient]:
    carrier = SocketCarrier(server.host, server.port)
    try:
        yield RawClient(carrier)
    finally:
        await carrier.aclose()


@pytest.mark.parametrize("mode", MODES)
async def test_the_session_ends_with_the_transport_if_there_is_no_jar(mode: str) -> None:
    with serving() as (_, _, server), anyio.fail_after(20):
        async with Client(resumable(server.url(), policy=QUICK), mode=mode) as client:
            session_id = text_of(await client.call_tool("session_id", {}))
        async with another_client(server) as other:
            error = await other.error("session/resume", {"sessionId": session_id})
            assert error["code"] == -32043


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_runs_while_the_connection_is_cut_is_answered_and_ran_once(
    mode: str,
) -> None:
    """REQ4, KEY3."""
    answers: list[str] = []
    async with connected(mode) as it, anyio.create_task_group() as tasks:

        async def call() -> None:
            answers.append(await it.call("slow", steps=3, gate="g"))

        tasks.start_soon(call)
        await it.app.stage.reached("g:started")
        it.proxy.cut_all()
        it.app.stage.mark("g:go")
        await it.app.stage.reached("g:done")
        assert await it.call("echo", text="and on") == "and on"

    assert answers == ["3 steps"]
    assert it.app.stage.count("g:started") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_was_cut_before_the_server_read_it_runs_once(mode: str) -> None:
    async with connected(mode) as it, anyio.create_task_group() as tasks:
        await it.call("echo", text="warm")
        it.proxy.stall_all(Side.CLIENT)
        it.app.stage.mark("g:go")
        tasks.start_soon(lambda: it.call("slow", steps=1, gate="g"))
        # Written into the connection, and no further.
        await anyio.wait_all_tasks_blocked()
        assert it.app.stage.count("g:started") == 0
        it.proxy.cut_all()
        await it.app.stage.reached("g:done")

    assert it.app.stage.count("g:started") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_was_written_into_a_dead_connection_comes_again(mode: str) -> None:
    """HTL10: and nothing runs for it."""
    answers: list[str] = []
    async with connected(mode) as it, anyio.create_task_group() as tasks:

        async def call() -> None:
            answers.append(await it.call("slow", steps=1, gate="g"))

        tasks.start_soon(call)
        await it.app.stage.reached("g:started")
        it.proxy.stall_all(Side.SERVER)
        it.app.stage.mark("g:go")
        await it.app.stage.reached("g:done")
        it.proxy.cut_all()

    assert answers == ["1 steps"]
    assert it.app.stage.count("g:started") == 1


async def test_events_of_a_cut_connection_come_once_and_in_order() -> None:
    async with connected("legacy") as it:
        await subscribe(it.client, "note://1")
        await subscribe(it.client, "note://2")
        await it.change_from_another("note://1")
        await it.received.has(lambda: it.received.updates == ["note://1"], "the first event")
        with it.proxy.offline():
            await it.change_from_another("note://2", "note://1")

        await it.received.has(lambda: len(it.received.updates) >= 3, "what was missed")
        await it.change_from_another("note://2")
        await it.received.has(lambda: len(it.received.updates) >= 4, "what came after")
        assert it.received.updates == ["note://1", "note://2", "note://1", "note://2"]


class FirstGetIsLost:
    """An app whose first GET is served, and whose client never sees a byte of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._is_first = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not self._is_first:
            await self.app(scope, receive, send)
            return
        self._is_first = False
        began = anyio.Event()

        async def swallow(message: Message) -> None:
            began.set()

        async def run() -> None:
            await self.app(scope, receive, swallow)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await began.wait()
            tasks.cancel_scope.cancel()
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body"})


async def test_events_are_received_although_the_first_stream_died_before_its_first_byte() -> None:
    """HTL7: to the server the second stream is a later one, and takes the session off."""
    app, layer = app_of()
    received = Received()
    with serve(FirstGetIsLost(layer.asgi_app())) as server, anyio.fail_after(20):
        transport = resumable(server.url(), on_resume=received.on_resume, policy=QUICK)
        async with Client(transport, mode="legacy", message_handler=received.on_message) as client:
            await subscribe(client, "note://1")
            assert (await received.outcome()).recovered
            await server.call(layer.notify_resource_updated, "note://1")
            await received.has(lambda: received.updates == ["note://1"], "the event")
    assert app


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_only_listens_goes_to_its_other_address(mode: str) -> None:
    received = Received()
    async with AsyncExitStack() as stack:
        app, layer, server = stack.enter_context(serving())
        stack.enter_context(anyio.fail_after(20))
        first = await stack.enter_async_context(TcpProxy(server.host, server.port))
        second = await stack.enter_async_context(TcpProxy(server.host, server.port))
        transport = resumable(first.url(), second.url(), on_resume=received.on_resume, policy=QUICK)
        client = await stack.enter_async_context(
            Client(transport, mode=mode, message_handler=received.on_message)
        )
        changes = None
        if mode == "legacy":
            await subscribe(client, "note://1")
        else:
            listening = client.listen(resource_subscriptions=["note://1"])
            changes = await stack.enter_async_context(listening)
        stack.enter_context(first.offline())

        outcome = await received.outcome()
        assert (outcome.recovered, outcome.connected_to) == (True, second.url())
        await server.call(layer.notify_resource_updated, "note://1")
        if changes is None:
            await received.has(lambda: received.updates == ["note://1"], "the event")
        else:
            assert getattr(await anext(changes), "uri", None) == "note://1"
        assert app


async def test_the_application_learns_that_a_lost_stream_continues() -> None:
    """``on_resume``: after each loss, also where no ``session/resume`` was needed."""
    async with connected("legacy") as it:
        await subscribe(it.client, "note://1")
        await it.change_from_another("note://1")
        await it.received.has(lambda: it.received.updates == ["note://1"], "the first event")
        it.proxy.cut_all()

        assert (await it.received.outcome()).recovered


async def test_events_of_a_cut_listen_stream_come_once_and_in_order() -> None:
    async with connected("auto") as it:
        async with it.client.listen(resource_subscriptions=["note://1", "note://2"]) as changes:
            await it.change_from_another("note://1")
            first = await anext(changes)
            with it.proxy.offline():
                await it.change_from_another("note://2", "note://1")

            missed = [await anext(changes), await anext(changes)]
            await it.change_from_another("note://2")
            live = await anext(changes)

        uris = [getattr(change, "uri", None) for change in (first, *missed, live)]
        assert uris == ["note://1", "note://2", "note://1", "note://2"]
        assert (await it.received.outcome()).recovered


async def test_several_listen_streams_of_an_application_share_the_sessions_one() -> None:
    async with connected("auto") as it:
        async with (
            it.client.listen(resource_subscriptions=["note://1"]) as one,
            it.client.listen(resource_subscriptions=["note://2"]) as two,
        ):
            await it.change_from_another("note://1", "note://2", "note://1")

            assert getattr(await anext(one), "uri", None) == "note://1"
            assert getattr(await anext(two), "uri", None) == "note://2"
        async with it.client.listen(resource_subscriptions=["note://1"]) as three:
            await it.change_from_another("note://1")
            assert getattr(await anext(three), "uri", None) == "note://1"


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_listen_stream_that_the_server_refuses_has_its_error(scheme: str) -> None:
    """As with the SDK's own transport. The application waited for ever, and the server was asked
    for ever. What was open before stays.
    """
    app = make_app("mcpserver")
    layer = SessionLayer(app.server, policy=SessionPolicy(max_subscriptions=1))
    async with connected("auto", scheme, made=(app, layer)) as it:
        async with it.client.listen(resource_subscriptions=["note://1"]) as one:
            with pytest.raises(MCPError) as refused:
                async with it.client.listen(resource_subscriptions=["note://2"]):
                    raise AssertionError("there is no room for it")
            assert refused.value.error.code == LIMIT_REACHED
            await it.change_from_another("note://1")
            assert getattr(await anext(one), "uri", None) == "note://1"


@pytest.mark.parametrize("code", [401, 403])
async def test_a_listen_stream_without_a_credential_has_an_error(code: int) -> None:
    _, layer = app_of()
    endpoint = layer.asgi_app()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        fields = dict(scope["headers"]) if scope["type"] == "http" else {}
        if fields.get(b"mcp-method") == b"subscriptions/listen":
            await send({"type": "http.response.start", "status": code, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await endpoint(scope, receive, send)

    with serve(guarded) as server, anyio.fail_after(30):
        async with Client(resumable(server.url(), policy=QUICK), mode="auto") as client:
            with pytest.raises(MCPError, match=f"HTTP status {code}"):
                async with client.listen(resource_subscriptions=["note://1"]):
                    raise AssertionError("nobody may listen")
            assert text_of(await client.call_tool("remember", {"text": "a"})) == "1 notes: a"


async def test_a_notification_stream_that_is_only_silent_is_opened_anew() -> None:
    """CLI10: the peer is gone and nobody says so, while POSTs still pass."""
    policy = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.2, stream_silence=0.3)
    async with connected("legacy", policy=policy) as it:
        await subscribe(it.client, "note://1")
        stream = await it.proxy.carrying(b"GET /mcp")
        await it.change_from_another("note://1")
        await it.received.has(lambda: len(it.received.updates) == 1, "the first event")
        stream.stall()

        assert await it.call("touch", uri="note://1") == "note://1 version 1"

        await it.received.has(lambda: len(it.received.updates) == 2, "the event of the dead stream")


@asynccontextmanager
async def over_a_restart(mode: str) -> AsyncGenerator[tuple[Client, Received, TcpProxy]]:
    """A client of a server that is gone; `TcpProxy.retarget` leads to the next one."""
    received = Received()
    with serving() as (_, _, first):
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(TcpProxy(first.host, first.port))
            transport = resumable(proxy.url(), on_resume=received.on_resume, policy=QUICK)
            stack.enter_context(anyio.fail_after(30))
            client = await stack.enter_async_context(
                Client(transport, mode=mode, message_handler=received.on_message)
            )
            yield client, received, proxy


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_lost_the_session_gets_another_one_once(mode: str) -> None:
    """CLI5, CLI4: started over, in one go, and the lists are read again."""
    with serving() as (_, _, second):
        async with over_a_restart(mode) as (client, received, proxy):
            old = text_of(await client.call_tool("session_id", {}))
            proxy.retarget(second.host, second.port)
            proxy.cut_all()
            found: list[str] = []

            async def call() -> None:
                found.append(text_of(await client.call_tool("session_id", {})))

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(call)

            assert len(set(found)) == 1
            assert found[0] != old
            outcome = await received.outcome()
            assert (outcome.recovered, outcome.is_new_session) == (False, True)
            assert outcome.reason == "session_lost"
            assert len(received.outcomes) == 1
            if mode == "legacy":
                await received.has(
                    lambda: "notifications/tools/list_changed" in received.methods,
                    "the word that lists changed",
                )


async def test_what_was_subscribed_is_subscribed_again_in_the_next_session() -> None:
    """CLI10: after every new session."""
    with serving() as (_, layer, second):
        async with over_a_restart("legacy") as (client, received, proxy):
            await subscribe(client, "note://1")
            proxy.retarget(second.host, second.port)
            proxy.cut_all()

            assert (await received.outcome()).is_new_session
            # The application is asked to read again what it may have missed.
            await received.has(lambda: received.updates == ["note://1"], "the update after the gap")
            await second.call(layer.notify_resource_updated, "note://1")
            await received.has(lambda: len(received.updates) == 2, "a live update")


async def test_what_is_listened_to_is_listened_to_in_the_next_session() -> None:
    """CLI10, CLI4, modern era."""
    with serving() as (_, layer, second):
        async with over_a_restart("auto") as (client, received, proxy):
            async with client.listen(resource_subscriptions=["note://1"]) as changes:
                proxy.retarget(second.host, second.port)
                proxy.cut_all()

                assert getattr(await anext(changes), "uri", None) == "note://1"
                assert (await received.outcome()).is_new_session
                await client.call_tool("echo", {"text": "listening by now"})
                await second.call(layer.notify_resource_updated, "note://1")
                assert getattr(await anext(changes), "uri", None) == "note://1"


async def test_whoever_is_taken_over_stops_and_says_so() -> None:
    """TKO7: it does not come back to fight."""
    async with connected("legacy") as it:
        session_id = await it.call("session_id")
        async with another_client(it.server) as other:
            await other.initialize()
            await other.result("session/resume", {"sessionId": session_id})

            outcome = await it.received.outcome()
            assert (outcome.reason, outcome.has_ended) == ("taken_over", True)
            with pytest.raises(MCPError) as refused:
                await it.call("echo", text="mine?")
            assert refused.value.code == -31010
        assert len(it.received.outcomes) == 1


async def test_a_question_of_the_server_is_asked_once_and_answered_across_a_cut() -> None:
    """ASK2."""
    async with connected("legacy") as it:
        answered = anyio.Event()

        async def cut_and_answer(
            context: object, params: types.ElicitRequestParams
        ) -> types.ElicitResult:
            it.received.questions.append(params.message)
            it.proxy.cut_all()
            answered.set()
            return types.ElicitResult(action="accept", content={"answer": "yes"})

        session = it.client.session
        session._elicitation_callback = cut_and_answer  # pyright: ignore[reportPrivateUsage]
        assert await it.call("ask", question="Really?") == "accept: yes"
        assert it.received.questions == ["Really?"]


@pytest.mark.parametrize("mode", MODES)
async def test_what_the_application_cancels_is_cancelled_at_the_server(mode: str) -> None:
    async with connected(mode) as it:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: it.call("slow", steps=3, gate="g"))
                await it.app.stage.reached("g:started")
                scope.cancel()

        await it.app.stage.reached("g:cancelled")
        assert await it.call("echo", text="on") == "on"


@pytest.mark.parametrize("mode", MODES)
async def test_the_other_address_of_a_server_is_tried(mode: str) -> None:
    with serving() as (_, _, server):
        async with (
            TcpProxy(server.host, server.port) as one,
            TcpProxy(server.host, server.port) as two,
        ):
            received = Received()
            transport = resumable(one.url(), two.url(), on_resume=received.on_resume, policy=QUICK)
            with anyio.fail_after(30):
                async with Client(transport, mode=mode) as client:
                    old = text_of(await client.call_tool("session_id", {}))
                    with one.offline():
                        assert text_of(await client.call_tool("session_id", {})) == old
                    assert (await received.outcome()).recovered
                    assert two.accepted


async def test_a_first_address_that_is_dead_is_passed_over() -> None:
    with serving() as (_, _, server):
        async with TcpProxy(server.host, server.port) as dead:
            with dead.offline(), anyio.fail_after(20):
                transport = resumable(dead.url(), server.url(), policy=QUICK)
                async with Client(transport, mode="legacy") as client:
                    assert text_of(await client.call_tool("echo", {"text": "a"})) == "a"


async def test_a_server_that_cannot_be_reached_fails_the_first_request() -> None:
    with serving() as (_, _, server):
        async with TcpProxy(server.host, server.port) as dead:
            with dead.offline(), anyio.fail_after(20):
                # In groups, as whatever comes out of the SDK's own transports.
                with pytest.RaisesGroup(MCPError, flatten_subgroups=True):
                    async with Client(resumable(dead.url(), policy=QUICK), mode="legacy"):
                        raise AssertionError("it connected")


@pytest.mark.parametrize("mode", MODES)
async def test_an_address_where_nothing_listens_is_named_with_the_cause(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By the error and by the log, and without the credentials that the URL holds."""
    transport = resumable("http://user:secret@127.0.0.1:1/mcp?token=secret", policy=QUICK)
    named = "http://127.0.0.1:1/mcp: connection refused: nothing listens there"
    with anyio.fail_after(20):
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=named), flatten_subgroups=True):
            async with Client(transport, mode=mode):
                raise AssertionError("it connected")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("mcp_")]
    assert named in ours
    assert not any("secret" in line for line in ours)


async def test_a_name_that_is_none_is_named() -> None:
    transport = resumable("http://no-such-host.invalid/mcp", policy=QUICK)
    named = "http://no-such-host.invalid/mcp: its name cannot be resolved"
    with anyio.fail_after(20):
        with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match=named), flatten_subgroups=True):
            async with Client(transport, mode="legacy"):
                raise AssertionError("it connected")


@pytest.mark.parametrize("mode", MODES)
async def test_nothing_waits_for_ever_for_a_server_that_is_gone(mode: str) -> None:
    """CLI1: outcome unknown to who was sent, a closed connection to who was not."""
    policy = ReconnectPolicy(
        backoff_base=0.02, backoff_cap=0.05, give_up_after=0.4, connect_timeout=1
    )
    async with connected(mode, policy=policy) as it:
        errors: dict[str, MCPError] = {}

        async def call(tool: str, **arguments: object) -> None:
            try:
                await it.call(tool, **arguments)
            except MCPError as error:
                errors[tool] = error
                it.received.board.announce()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: call("slow", steps=1, gate="g"))
            await it.app.stage.reached("g:started")
            with it.proxy.offline():
                tasks.start_soon(lambda: call("echo", text="never"))
                await it.received.has(lambda: len(errors) == 2, "both errors")

        assert is_outcome_unknown(errors["slow"])
        # Whether the other one was read there can be known or not.
        assert is_outcome_unknown(errors["echo"]) or errors["echo"].code == -32000
        it.app.stage.mark("g:go")
        assert await it.call("echo", text="back") == "back"


@pytest.mark.parametrize("mode", MODES)
async def test_against_a_server_without_sessions_it_is_the_stock_transport(mode: str) -> None:
    bare = make_app("mcpserver").server
    assert isinstance(bare, MCPServer)
    with serve(bare.streamable_http_app()) as server, anyio.fail_after(30):
        results: list[object] = []
        for transport in (resumable(server.url(), policy=QUICK), server.url()):
            received = Received()
            async with Client(transport, mode=mode, message_handler=received.on_message) as client:
                with pytest.raises(MCPError) as unknown:
                    await client.read_resource("nothing://here")
                results.append(
                    (
                        client.protocol_version,
                        client.server_capabilities,
                        text_of(await client.call_tool("echo", {"text": "a"})),
                        text_of(await client.call_tool("session_id", {})),
                        (await client.list_tools()).tools,
                        unknown.value.error,
                    )
                )
        assert results[0] == results[1]
