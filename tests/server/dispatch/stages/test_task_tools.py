"""Tasks of clients that know none: a text with an id, and two plain tools."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.layer import SessionLayer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.testing import connect
from tests.server.requests.test_tasks import CAPABILITIES, Box, client_of
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient
from tests.support.replicas import user
from tests.support.world import World, world

ERAS = ["handshake", "modern"]
NEEDS_A_TASK = {"wait", "ask", "fail", "large", "work"}


@asynccontextmanager
async def with_tools(era: str, **more: Any) -> AsyncGenerator[tuple[World, Any]]:
    policy = TaskPolicy(tools=True, always=NEEDS_A_TASK, **more.pop("policy", {}))
    async with world(tasks=policy, box=Box(), **more) as w:
        yield w, await plain(w, era)


async def plain(w: World, era: str, carrier: Any = None) -> Any:
    """A client without tasks, which can be asked."""
    carrier = carrier or w.carrier
    if era == "modern":
        return ModernClient(carrier, capabilities={"elicitation": {}})
    client = RawClient(carrier, capabilities={"elicitation": {}})
    await client.initialize()
    return client


async def answer(client: Any, tool: str, arguments: Json | None = None) -> Json:
    params: Json = {"name": tool, "arguments": arguments or {}}
    return await client.send("tools/call", params).result()


def text_of(result: Json) -> str:
    [part] = result["content"]
    return str(part["text"])


async def begun(client: Any, tool: str, arguments: Json | None = None) -> str:
    """Call a tool. Return the id of the task that its answer names."""
    told = await answer(client, tool, arguments)
    assert "taskId" not in told and not told["isError"]
    found = re.search(r"as task ([\w-]{43})\. Call task_status", text_of(told))
    assert found is not None, told
    return found[1]


async def status(client: Any, task_id: str) -> Json:
    return await answer(client, "task_status", {"task_id": task_id})


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_that_runs_long_is_answered_with_a_text_and_fetched_by_a_tool(
    era: str,
) -> None:
    async with with_tools(era) as (w, client):
        task_id = await begun(client, "wait", {"gate": "g"})
        before = asyncio.get_running_loop().time()
        runs = await status(client, task_id)
        assert text_of(runs).startswith("The task still runs.")
        assert asyncio.get_running_loop().time() - before == pytest.approx(10, abs=0.5)
        asked = asyncio.create_task(status(client, task_id))
        await asyncio.sleep(1)
        w.box.gate("g").go.set()
        ended = await asked
        assert text_of(ended) == "through g"
        assert text_of(await status(client, task_id)) == "through g"
        assert w.box.calls == ["wait"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_fast_call_is_answered_as_before(era: str) -> None:
    async with with_tools(era, policy={"after": 60}) as (_, client):
        assert text_of(await answer(client, "echo", {"text": "hi"})) == "hi"


@pytest.mark.parametrize("era", ERAS)
async def test_a_task_is_cancelled_by_a_tool(era: str) -> None:
    async with with_tools(era) as (w, client):
        task_id = await begun(client, "wait", {"gate": "g"})
        for _ in range(2):
            said = await answer(client, "task_cancel", {"task_id": task_id})
            assert text_of(said) == "The task is asked to stop."
        ended = await status(client, task_id)
        assert (text_of(ended), ended["isError"]) == ("The task was cancelled.", True)
        assert w.box.gate("g").cancelled.is_set()


@pytest.mark.parametrize("era", ERAS)
async def test_a_task_that_failed_is_an_error_of_the_tool(era: str) -> None:
    async with with_tools(era) as (_, client):
        ended = await status(client, await begun(client, "fail"))
        assert (text_of(ended), ended["isError"]) == ("The task failed: a wrong argument", True)


@pytest.mark.parametrize("era", ERAS)
async def test_unknown_and_foreign_tasks_are_one_and_the_same(era: str) -> None:
    async with with_tools(era) as (w, _):
        alice, bob = [
            await plain(w, era, await w.carrier_of(user(name))) for name in ("alice", "bob")
        ]
        task_id = await begun(alice, "wait", {"gate": "g"})
        said = [
            await answer(bob, tool, arguments)
            for tool in ("task_status", "task_cancel")
            for arguments in ({"task_id": task_id}, {"task_id": "x" * 43}, {"task_id": 7}, {}, None)
        ]
        assert said == [said[0]] * 10
        assert (text_of(said[0]), said[0]["isError"]) == ("There is no such task.", True)
        w.box.gate("g").go.set()
        assert text_of(await status(alice, task_id)) == "through g"


@pytest.mark.parametrize("era", ERAS)
async def test_the_tools_are_listed_for_clients_without_tasks_alone(era: str) -> None:
    async with with_tools(era) as (w, client):
        names = [tool["name"] for tool in (await client.send("tools/list").result())["tools"]]
        assert names == [*w.box.tools, "task_status", "task_cancel"]
        knows = client_of(w, CAPABILITIES)
        names = [tool["name"] for tool in (await knows.send("tools/list").result())["tools"]]
        assert names == [*w.box.tools]
        assert (await knows.call("wait", {"gate": "g"}).result())["resultType"] == "task"


@pytest.mark.parametrize("era", ERAS)
async def test_the_tools_are_off_by_default(era: str) -> None:
    async with world(tasks=TaskPolicy(always={"wait"}), box=Box()) as w:
        client = await plain(w, era)
        listed = (await client.send("tools/list").result())["tools"]
        assert [tool["name"] for tool in listed] == [*w.box.tools]
        w.box.gate("g").go.set()
        assert text_of(await answer(client, "wait", {"gate": "g"})) == "through g"


async def test_a_client_that_checks_what_a_tool_answers_takes_the_text() -> None:
    """The SDK's client refuses a result without the structure that the list promised."""
    server = MCPServer("structured")

    @server.tool()
    async def build() -> dict[str, int]:
        return {"built": 1}

    @server.tool()
    async def task_status() -> str:
        return "the server's own"

    del build, task_status
    policy = TaskPolicy(tools=True, always={"build"})
    async with connect(SessionLayer(server, tasks=policy), session=False) as client:
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == ["build", "task_status", "task_cancel"]
        assert [tool.output_schema for tool in listed] == [None] * 3
        told = await client.call_tool("build", {})
        found = re.search(r"as task ([\w-]{43})", text_of(told.model_dump()))
        assert found is not None
        ended = await client.call_tool("task_status", {"task_id": found[1]})
        assert ended.structured_content == {"built": 1}


async def test_a_call_that_asks_its_user_is_no_task() -> None:
    """With its answer its client could not answer the question any more."""
    policy: Json = {"after": 0.1}
    async with world(tasks=TaskPolicy(tools=True, **policy), box=Box()) as w:
        client = await plain(w, "handshake")
        call = client.call("ask", question="who?")
        question = (await call.reply.has(1))[0]
        await asyncio.sleep(5)
        await client.respond(question, {"action": "accept", "content": {"answer": "me"}})
        assert text_of(await call.result()) == "accept: me"


@pytest.mark.parametrize("era", ERAS)
async def test_a_task_that_asks_gets_no_answer_and_does_not_wait(era: str) -> None:
    async with with_tools(era) as (_, client):
        with anyio.fail_after(30):
            ended = await status(client, await begun(client, "ask", {"question": "who?"}))
        assert text_of(ended).startswith("The task failed:")


async def test_in_a_session_the_answers_carry_its_metadata() -> None:
    async with with_tools("modern") as (_, client):
        session = (await client.start())["sessionId"]
        params: Json = {"name": "task_status", "arguments": {"task_id": "x"}}
        result = await client.send("tools/call", params, session=session).result()
        meta = result["_meta"]["io.modelcontextprotocol/session"]
        assert (meta["sessionId"], result["resultType"]) == (session, "complete")


async def test_a_store_that_is_away_is_said_so() -> None:
    class Away(MemoryStore):
        is_away = False

        async def load(self, *args: Any, **more: Any) -> Any:
            if self.is_away:
                raise StoreUnavailable("away")
            return await super().load(*args, **more)

    store = Away()
    async with with_tools("modern", store=store) as (_, client):
        store.is_away = True
        params: Json = {"name": "task_status", "arguments": {"task_id": "x" * 43}}
        assert (await client.send("tools/call", params).done()).status == 503
