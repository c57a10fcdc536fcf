"""Stock clients do what they do every day, against a wrapped server of each class.

"Stock clients work unmodified against wrapped servers of all three classes".
"""

import anyio
import httpx2
import pytest

from tests.interop.clients import ROOT_URI, ToolFailed
from tests.interop.driver import Failed
from tests.interop.harness import ALL, IN_DRIVERS, OVER_WEBSOCKET, Connect, UnderTest, clients
from tests.support import apps

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)


@clients(*ALL, *OVER_WEBSOCKET)
async def test_initialize_names_the_server_and_what_it_can_do(
    under_test: UnderTest, connected: Connect
) -> None:
    async with connected() as client:
        result = client.initialize_result

        assert result["serverInfo"]["name"] == "notes"
        assert result["serverInfo"]["version"] == "1.0"
        assert result["protocolVersion"] == "2025-11-25"
        assert result["capabilities"]["resources"]["subscribe"] is True
        assert "tools" in result["capabilities"]
        assert "prompts" in result["capabilities"]
        if client.kind in OVER_WEBSOCKET:
            assert client.session_id is None
        else:
            assert client.session_id is not None
            assert all(0x21 <= ord(c) <= 0x7E for c in client.session_id)
        assert client.errors == ()


@clients("python-2", *IN_DRIVERS, *OVER_WEBSOCKET)
@pytest.mark.layer_only
async def test_initialize_advertises_sessions(under_test: UnderTest, connected: Connect) -> None:
    """The raw result; the clients' own models drop what they do not know."""
    async with connected() as client:
        capabilities = client.initialize_result["capabilities"]

        assert capabilities["sessions"] == {}
        assert "io.github.mcp-sessions/sessions" in capabilities["extensions"]


@clients(*ALL, *OVER_WEBSOCKET)
async def test_the_lists_are_the_wrapped_servers(under_test: UnderTest, connected: Connect) -> None:
    async with connected() as client:
        assert sorted(await client.list("tools")) == sorted(apps.TOOLS)
        assert await client.list("resources") == ["note://welcome"]
        assert await client.list("templates") == ["note://{n}"]
        assert await client.list("prompts") == ["greet"]
        assert client.errors == ()


@clients(*ALL, *OVER_WEBSOCKET)
async def test_tools_resources_and_prompts_answer(
    under_test: UnderTest, connected: Connect
) -> None:
    async with connected() as client:
        assert await client.call("echo", {"text": "grüß dich \u2028 \U0001f600"}) == (
            "grüß dich \u2028 \U0001f600"
        )
        assert await client.call("add", {"a": 40, "b": 2}) == "42"
        assert await client.read("note://welcome") == under_test.app.read("note://welcome")
        assert await client.read("note://7") == under_test.app.read("note://7")
        assert await client.prompt("greet", {"name": "Ada"}) == "Greet Ada."
        await client.ping()
        assert client.errors == ()


@clients(*ALL, *OVER_WEBSOCKET)
@pytest.mark.layer_only
async def test_a_connection_is_a_session_to_its_handlers(
    under_test: UnderTest, connected: Connect
) -> None:
    """``current_session()`` has ``state``, ``data`` and ``notify()`` for clients that never
    received of sessions; each connection has its own.
    """
    async with connected() as client:
        assert await client.call("remember", {"text": "a"}) == "1 notes: a"
        assert await client.call("remember", {"text": "b"}) == "2 notes: a, b"
        async with connected() as other:
            assert await other.call("remember", {"text": "c"}) == "1 notes: c"
        assert await client.call("remember", {"text": "d"}) == "3 notes: a, b, d"
        notified = ("noted a", "noted b", "noted d")
        await client.until(lambda: client.logs == notified, what="what it was told")


@clients(*ALL, *OVER_WEBSOCKET)
async def test_an_unknown_tool_is_an_error_of_that_call_only(
    under_test: UnderTest, connected: Connect
) -> None:
    async with connected() as client:
        with pytest.raises((ToolFailed, Failed)):
            await client.call("no_such_tool")

        assert await client.call("echo", {"text": "still here"}) == "still here"


@clients(*ALL, *OVER_WEBSOCKET)
async def test_an_answer_of_many_packets_arrives_whole(
    under_test: UnderTest, connected: Connect
) -> None:
    """Some servers say it twice, and the Python client takes 1 MiB in one event."""
    text = "0123456789" * 40_000
    async with connected() as client:
        assert await client.call("echo", {"text": text}) == text


@clients(*ALL, *OVER_WEBSOCKET)
async def test_progress_arrives_in_order_and_before_the_answer(
    under_test: UnderTest, connected: Connect
) -> None:
    steps: list[float] = []
    async with connected() as client:
        assert await client.call("slow", {"steps": 5}, progress=steps) == "5 steps"

        assert steps == [1, 2, 3, 4, 5]


@clients(*ALL, *OVER_WEBSOCKET)
async def test_progress_arrives_while_the_call_runs(
    under_test: UnderTest, connected: Connect, gate: str
) -> None:
    steps: list[float] = []
    async with connected() as client:

        async def release() -> None:
            await client.until(lambda: steps == [1], what="the first step of progress")
            under_test.app.stage.mark(f"{gate}:go")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            await client.call("slow", {"steps": 2, "gate": gate}, progress=steps)

        assert steps == [1, 2]


@clients(*ALL, *OVER_WEBSOCKET)
async def test_log_messages_arrive(under_test: UnderTest, connected: Connect) -> None:
    async with connected() as client:
        assert await client.call("log", {"text": "the weather is fine"}) == "logged"

        await client.until(lambda: len(client.logs) == 1, what="a log message")
        assert "the weather is fine" in str(client.logs[0])


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_tool_asks_the_user(under_test: UnderTest, connected: Connect) -> None:
    async with connected() as client:
        answer = await client.call("ask", {"question": "which way?"})

        assert answer == "accept: answer to which way?"


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_tool_asks_the_model(under_test: UnderTest, connected: Connect) -> None:
    async with connected() as client:
        assert await client.call("sample", {"prompt": "a haiku"}) == "sampled a haiku"


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_tool_asks_for_the_roots(under_test: UnderTest, connected: Connect) -> None:
    """The SDK asks for roots on the standalone channel: over HTTP, the GET stream."""
    async with connected() as client:
        # The SDK alone loses what it sends before that stream is open.
        await under_test.listens(client)

        assert await client.call("roots") == ROOT_URI


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_subscriber_is_notified_of_changes_on_its_get_stream(
    under_test: UnderTest, connected: Connect, note: str
) -> None:
    async with connected() as client:
        await under_test.listens(client)
        await client.subscribe(note)

        await client.call("touch", {"uri": note})
        await client.updated(note)

        assert await client.read(note) == f"{note} version 1"
        assert client.updated_uris() == [note]


@clients(*ALL, *OVER_WEBSOCKET)
async def test_only_what_is_subscribed_is_reported(
    under_test: UnderTest, connected: Connect, note: str
) -> None:
    other, marker = f"{note}-other", f"{note}-marker"
    async with connected() as client:
        await under_test.listens(client)
        await client.subscribe(note)
        await client.subscribe(marker)
        await client.call("touch", {"uri": other})
        await client.call("touch", {"uri": note})
        await client.updated(note)

        await client.unsubscribe(note)
        await client.call("touch", {"uri": note})
        await client.call("touch", {"uri": marker})
        await client.updated(marker)

        assert client.updated_uris() == [note, marker]
        assert client.errors == ()


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_change_published_outside_any_request_is_reported(
    under_test: UnderTest, connected: Connect, note: str
) -> None:
    async with connected() as client:
        await under_test.listens(client)
        await client.subscribe(note)

        await under_test.publish(note)
        await client.updated(note)

        assert client.updated_uris() == [note]


@clients(*ALL, *OVER_WEBSOCKET)
async def test_every_subscriber_is_notified_once(
    under_test: UnderTest, connected: Connect, note: str
) -> None:
    url = under_test.server.url()
    async with connected(url) as one, connected(url) as two, connected(url) as three:
        for client in (one, two, three):
            await under_test.listens(client)
        if under_test.layer is not None:
            # The bare server of this harness knows one subscriber per resource.
            await one.subscribe(note)
        await two.subscribe(note)
        await three.subscribe(f"{note}-other")

        await three.call("touch", {"uri": note})
        await two.updated(note)
        if under_test.layer is not None:
            await one.updated(note)

        assert two.updated_uris() == [note]
        assert three.updated_uris() == []


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_kept_session_object_still_reaches_the_client_after_the_call(
    under_test: UnderTest, connected: Connect, note: str, gate: str
) -> None:
    """``ctx.session.send_resource_updated`` is delivered, subscribed or not."""
    async with connected() as client:
        await under_test.listens(client)
        assert await client.call("background", {"uri": note, "gate": gate}) == "later"

        under_test.app.stage.mark(f"{gate}:go")
        await client.updated(note)

        assert client.updated_uris() == [note]


@clients(*ALL, *OVER_WEBSOCKET)
@pytest.mark.layer_only
async def test_a_changed_list_is_reported(under_test: UnderTest, connected: Connect) -> None:
    async with connected() as client:
        await under_test.listens(client)
        for what, notify in (
            ("tools", under_test.layer.notify_tools_changed),
            ("prompts", under_test.layer.notify_prompts_changed),
            ("resources", under_test.layer.notify_resources_changed),
        ):
            await under_test.server.call(notify)
            method = f"notifications/{what}/list_changed"
            await client.until(
                lambda method=method: bool(client.notifications(method)), what=method
            )
            assert len(client.notifications(method)) == 1


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_slow_call_holds_up_no_other(
    under_test: UnderTest, connected: Connect, gate: str
) -> None:
    stage = under_test.app.stage
    answers: list[str] = []
    async with connected() as client:

        async def slow_call() -> None:
            answers.append(await client.call("slow", {"steps": 1, "gate": gate}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow_call)
            await stage.reached(f"{gate}:started")
            for number in range(5):
                answers.append(await client.call("echo", {"text": str(number)}))
            stage.mark(f"{gate}:go")

        assert answers == ["0", "1", "2", "3", "4", "1 steps"]


@clients(*ALL, *OVER_WEBSOCKET)
async def test_a_cancelled_call_is_cancelled_in_the_server(
    under_test: UnderTest, connected: Connect, gate: str
) -> None:
    stage = under_test.app.stage
    async with connected() as client:
        with pytest.raises(Failed):
            await client.call(
                "slow",
                {"steps": 2, "gate": gate},
                cancel_when=lambda: stage.reached(f"{gate}:started"),
            )
        await stage.reached(f"{gate}:cancelled")

        assert stage.count(f"{gate}:done") == 0
        assert await client.call("echo", {"text": "still here"}) == "still here"


@clients(*ALL)
async def test_closing_sends_delete_and_the_session_is_gone(
    under_test: UnderTest, connected: Connect
) -> None:
    """A later request with its id gets 404."""
    wire = under_test.server.wire
    async with connected() as client:
        session_id = client.session_id
        await client.ping()

    deleted = await wire.saw(lambda e: e.is_finished, method="DELETE", session_id=session_id)
    assert deleted.status in (200, 204)
    assert session_id is not None
    assert await _status_of_ping(under_test, session_id) == 404


async def _status_of_ping(under_test: UnderTest, session_id: str) -> int:
    async with httpx2.AsyncClient() as http:
        response = await http.post(
            under_test.server.url(),
            json={"jsonrpc": "2.0", "id": 1, "method": "ping"},
            headers={
                "accept": "application/json, text/event-stream",
                "mcp-session-id": session_id,
                "mcp-protocol-version": "2025-11-25",
            },
        )
    return response.status_code
