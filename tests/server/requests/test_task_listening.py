"""Changes of tasks on listens, and in the logs of sessions (SEP-2663)."""

import asyncio
from typing import Any

import anyio
import pytest
from mcp import types
from mcp.server import MCPServer
from mcp.server.lowlevel.server import Server

from tests.server.requests.test_tasks import (
    AT_ONCE,
    CAPABILITIES,
    ENDED,
    Box,
    FailingStore,
    client_of,
    got,
    named,
    text_of,
    until,
)
from tests.support.modern import ACKNOWLEDGED, SUBSCRIPTION_ID, ModernClient, Received, wanted
from tests.support.raw import Json
from tests.support.replicas import cluster, lost, user
from tests.support.world import Toolbox, world

CHANGED = "notifications/tasks"
ANSWER: Json = {"action": "accept", "content": {"answer": "me"}}


def listen_to(
    client: ModernClient, *task_ids: Any, session: str | None = None, **more: Any
) -> Received:
    filters = {"taskIds": list(task_ids), **wanted(**more)}
    return client.send("subscriptions/listen", {"notifications": filters}, session=session)


async def agreed(received: Received) -> Json:
    first = (await received.has(1))[0]
    assert first["method"] == ACKNOWLEDGED
    return dict(first["params"]["notifications"])


async def told(received: Received, *statuses: str) -> Json:
    """The first message that says one of these statuses."""

    def found() -> list[Json]:
        said = [each["params"] for each in received.events if each["method"] == CHANGED]
        return [each for each in said if each["status"] in statuses]

    with anyio.fail_after(30):
        await received.until(lambda: bool(found()), f"a task that is {statuses}")
    return found()[0]


async def test_a_listen_says_what_a_task_is_and_what_it_becomes() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("ask", {"question": "who?"}).result()
        shown = await until(client, task, "input_required")
        listen = listen_to(client, task["taskId"])
        assert await agreed(listen) == {"taskIds": [task["taskId"]]}
        asked = await told(listen, "input_required")
        about = {SUBSCRIPTION_ID: listen.id}
        assert {**asked, "resultType": "complete"} == {**shown, "_meta": about}
        [key] = asked["inputRequests"]
        await client.send("tasks/update", named(task, inputResponses={key: ANSWER})).result()
        ended = await told(listen, *ENDED)
        assert text_of(ended) == "accept: me"
        assert {**ended, "resultType": "complete"} == {**await got(client, task), "_meta": about}


async def test_a_task_that_has_ended_is_said_once() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("echo", {"text": "hi"}).result()
        await until(client, task, *ENDED)
        listen = listen_to(client, task["taskId"])
        assert text_of(await told(listen, *ENDED)) == "hi"
        w.clock.now += 4_000
        await asyncio.sleep(60)
        assert len(listen.events) == 1


async def test_a_listen_to_tasks_needs_the_extension() -> None:
    async with world(tasks=AT_ONCE) as w:
        plain = client_of(w, {})
        session = (await plain.start())["sessionId"]
        for named_session in (None, session):
            refused = listen_to(plain, "x" * 43, session=named_session)
            assert (await refused.error())["code"] == -32021
            assert refused.status == 400


@pytest.mark.parametrize("task_ids", ["t", [1], {}, ["t", None]])
async def test_what_is_no_list_of_ids_is_refused(task_ids: Any) -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        for named_session in (None, session):
            params: Json = {"notifications": {"taskIds": task_ids}}
            sent = client.send("subscriptions/listen", params, session=named_session)
            assert (await sent.error())["code"] == -32602


async def test_a_listen_names_so_many_tasks_and_no_more() -> None:
    async with world(tasks=AT_ONCE, max_subscriptions=2) as w:
        refused = await listen_to(client_of(w), "a", "b", "c").error()
        assert refused["code"] == -31011
        assert refused["data"]["limit"] == "max_subscriptions"


async def test_foreign_and_unknown_tasks_are_not_agreed_to() -> None:
    async with world(tasks=AT_ONCE) as w:
        alice, bob = [
            ModernClient(await w.carrier_of(user(name)), capabilities=CAPABILITIES)
            for name in ("alice", "bob")
        ]
        task = await alice.call("wait", {"gate": "g"}).result()
        session = (await bob.start())["sessionId"]
        for named_session in (None, session):
            listen = listen_to(bob, task["taskId"], "x" * 43, session=named_session)
            assert await agreed(listen) == {}
            w.box.gate("g").go.set()
            await until(alice, task, *ENDED)
            await asyncio.sleep(60)
            assert listen.events == []


async def test_a_server_without_changes_of_its_own_reports_tasks() -> None:
    async def call(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text="done")])

    server = Server("bare", on_call_tool=call)
    async with world(server=server, tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("echo").result()
        listen = listen_to(client, task["taskId"])
        assert await agreed(listen) == {"taskIds": [task["taskId"]]}
        assert text_of(await told(listen, *ENDED)) == "done"
        listen.leave()
        assert await agreed(listen_to(client, "x" * 43)) == {}


async def test_changes_of_the_server_come_on_the_same_listen() -> None:
    server = MCPServer("changes")

    @server.tool()
    async def wait() -> str:
        await asyncio.sleep(10)
        return "done"

    async with world(server=server, tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait").result()
        listen = listen_to(client, task["taskId"], lists=("tools",))
        assert await agreed(listen) == {"taskIds": [task["taskId"]], "toolsListChanged": True}
        await told(listen, "working")
        await w.layer.notify_tools_changed()
        await told(listen, "completed")
        said = [each["method"] for each in listen.events]
        assert said == [CHANGED, "notifications/tools/list_changed", CHANGED]
        assert {each["params"]["_meta"][SUBSCRIPTION_ID] for each in listen.events} == {listen.id}


# --- in a session --------------------------------------------------------------------------------


async def test_a_session_hears_of_its_tasks_also_after_it_was_away() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        listen = await client.listening(session)
        task = await client.call("ask", {"question": "who?"}, session=session).result()
        asked = await told(listen, "input_required")
        position = asked["sessionEventId"]
        listen.leave()
        await listen.gone()
        [key] = asked["inputRequests"]
        answers = named(task, inputResponses={key: ANSWER})
        await client.send("tasks/update", answers).result()
        await until(client, task, *ENDED)
        await client.resume(session, position)
        again = listen_to(client, task["taskId"], session=session)
        assert await agreed(again) == {"taskIds": [task["taskId"]]}
        assert text_of(await told(again, *ENDED)) == "accept: me"
        # Of what changed while nobody listened the last is left.
        assert [each["params"]["status"] for each in again.events] == ["completed"]


async def test_the_log_of_a_session_has_its_own_tasks_alone() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        session, other = [(await client.start())["sessionId"] for _ in range(2)]
        tasks = [
            await client.call("wait", {"gate": "g"}, session=each).result()
            for each in (session, other, None)
        ]
        ids = [each["taskId"] for each in tasks]
        listen = listen_to(client, *ids, session=session)
        assert await agreed(listen) == {"taskIds": ids[:1]}
        w.box.gate("g").go.set()
        await told(listen, "completed")
        for task in tasks:
            await until(client, task, *ENDED)
        await asyncio.sleep(60)
        assert {each["params"]["taskId"] for each in listen.events} == {ids[0]}


async def test_a_weaker_credential_does_not_read_an_outcome_in_the_log() -> None:
    """The session was made with it. Its owner's stronger one made the task (SEC3)."""
    async with world(tasks=AT_ONCE) as w:
        weak, strong = [
            ModernClient(await w.carrier_of(user("alice", *scopes)), capabilities=CAPABILITIES)
            for scopes in ((), ("admin",))
        ]
        session = (await weak.start())["sessionId"]
        listen = await weak.listening(session)
        task = await strong.call("echo", {"text": "secret"}, session=session).result()
        await until(strong, task, *ENDED)
        await asyncio.sleep(60)
        assert listen.events == []
        assert await agreed(listen_to(weak, task["taskId"])) == {}


# --- other replicas, and failures ----------------------------------------------------------------


def boxes() -> tuple[Toolbox, object]:
    return Box(), None


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_listen_at_another_replica_hears_of_a_task(is_lost: bool) -> None:
    async with cluster(2, server=boxes, tasks=AT_ONCE) as replicas:
        client = client_of(replicas[0])
        elsewhere = client_of(replicas[1])
        task = await client.call("wait", {"gate": "g"}).result()
        listen = listen_to(elsewhere, task["taskId"])
        await told(listen, "working")
        if is_lost:
            replicas.backplane.loses = lost("task_changed")
        replicas[0].box.gate("g").go.set()
        assert text_of(await told(listen, "completed")) == "through g"


@pytest.mark.parametrize("in_session", [False, True])
async def test_a_listen_hears_that_the_runner_of_a_task_is_gone(in_session: bool) -> None:
    async with cluster(2, server=boxes, tasks=AT_ONCE) as replicas:
        client, elsewhere = client_of(replicas[0]), client_of(replicas[1])
        session = (await client.start())["sessionId"] if in_session else None
        task = await client.call("wait", {"gate": "g"}, session=session).result()
        listen = listen_to(elsewhere, task["taskId"], session=session)
        await agreed(listen)
        replicas.kill(0)
        ended = await told(listen, *ENDED)
        assert (ended["status"], ended["error"]["code"]) == ("failed", -31012)


async def test_an_end_is_not_said_before_it_is_stored() -> None:
    """If the process died in between, the task would end in another way."""
    store = FailingStore("")
    async with world(store=store, tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        listen = listen_to(client, task["taskId"])
        await told(listen, "working")
        store.fails = "replace_data"
        w.box.gate("g").go.set()
        await asyncio.sleep(5)
        assert (await client.send("tasks/get", named(task)).done()).status == 503
        assert [each["params"]["status"] for each in listen.events] == ["working"]
        store.fails = ""
        assert text_of(await told(listen, "completed")) == "through g"
        assert text_of(await got(client, task)) == "through g"


async def test_nothing_is_left_of_a_listen_that_ended() -> None:
    async with world(tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        listen = listen_to(client, task["taskId"])
        await told(listen, "working")
        tasks: Any = w.inside.runner.tasks
        assert len(tasks._listeners._listens) == 1
        listen.leave()
        await listen.gone()
        await asyncio.sleep(1)
        assert tasks._listeners._listens == {}
        assert not [each for each in tasks.background.tasks if "listen" in each.get_name()]
