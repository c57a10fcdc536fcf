"""A tool of a command or a URL asks while its call is a task: in each era, in real processes."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import HTTPServer, StdioServer
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.protocol_versions import Eras
from tests.faults.test_host_keys import running
from tests.server.requests.test_tasks import (
    CAPABILITIES,
    ENDED,
    client_of,
    got,
    named,
    text_of,
    until,
)
from tests.support.modern import ModernClient
from tests.support.processes import free_port
from tests.support.raw import Json
from tests.support.replicas import user
from tests.support.world import world

pytestmark = [pytest.mark.on_network, pytest.mark.timeout(120)]

PROGRAM = """
import asyncio
import sys

import anyio
import mcp_types as types
import uvicorn
from mcp.server import Server
from mcp.server.stdio import stdio_server

SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}


def said(answer):
    return f"{answer.action} {(answer.content or {}).get('answer')}"


def question(text):
    form = types.ElicitRequestFormParams(message=text, requested_schema=SCHEMA)
    return types.ElicitRequest(params=form)


async def call(ctx, params):
    given = params.input_responses or {}
    if params.name == "asks":
        # As in the era before: each question is a request, two at once.
        pair = await asyncio.gather(
            *(ctx.session.elicit_form(text, SCHEMA, related_request_id=ctx.request_id)
              for text in ("one?", "two?"))
        )
        third = await ctx.session.elicit_form(
            "three?", SCHEMA, related_request_id=ctx.request_id
        )
        text = " ".join(map(said, [*pair, third]))
    elif not given:
        asked = {"one": question("one?"), "two": question("two?")}
        return types.InputRequiredResult(input_requests=asked, request_state="first")
    elif params.request_state == "first":
        state = " ".join(said(given[name]) for name in ("one", "two"))
        return types.InputRequiredResult(
            input_requests={"one": question("three?")}, request_state=state
        )
    else:
        text = f"{params.request_state} {said(given['one'])}"
    return types.CallToolResult(content=[types.TextContent(text=text)])


async def tools(ctx, params):
    schema = {"type": "object"}
    named = [types.Tool(name=name, input_schema=schema) for name in ("asks", "returns")]
    return types.ListToolsResult(tools=named)


server = Server("asking", on_call_tool=call, on_list_tools=tools)


async def on_stdio():
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if len(sys.argv) > 1:
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
else:
    anyio.run(on_stdio)
"""
PAIRS = [
    ("command", "both", "asks"),
    ("url", "2026", "returns"),
    pytest.param("url", "both", "asks", marks=pytest.mark.full),
    pytest.param("command", "2026", "returns", marks=pytest.mark.full),
]
"""Each process imports the SDK. By default each kind and each era is in one case."""


@asynccontextmanager
async def server_of(kind: str, here: Path) -> AsyncGenerator[ExternalServer]:
    program = here / "asking.py"
    program.write_text(PROGRAM)
    if kind == "command":
        yield StdioServer(sys.executable, str(program))
        return
    port = free_port()
    with running(str(program), str(port), port=port):
        yield HTTPServer(f"http://127.0.0.1:{port}/mcp")


async def answer(client: ModernClient, task: Json, key: str, text: str) -> None:
    given: Json = {key: {"action": "accept", "content": {"answer": text}}}
    await client.send("tasks/update", named(task, inputResponses=given)).result()


async def asked(client: ModernClient, task: Json, questions: int = 1) -> Json:
    # The first call waits for the start of a process.
    statuses = "input_required", *ENDED
    return await until(client, task, *statuses, questions=questions, within=60)


def messages(shown: Json) -> dict[str, str]:
    """Message → key of the open questions."""
    requests: Json = shown["inputRequests"]
    return {each["params"]["message"]: key for key, each in requests.items()}


@pytest.mark.parametrize(("kind", "eras", "tool"), PAIRS)
async def test_questions_of_a_task_are_answered_one_by_one(
    kind: str, eras: Eras, tool: str, tmp_path: Path
) -> None:
    policy = TaskPolicy(always={tool})
    async with server_of(kind, tmp_path) as server:
        async with world(server=server, eras=eras, tasks=policy) as w:
            client = client_of(w)
            task = await client.call(tool).result()
            shown = await asked(client, task, questions=2)
            keys = messages(shown)
            assert sorted(keys) == ["one?", "two?"]
            # In parts, and not in their order.
            await answer(client, task, keys["two?"], "second")
            left = await got(client, task)
            assert (left["status"], list(messages(left))) == ("input_required", ["one?"])
            await answer(client, task, keys["two?"], "again")
            await answer(client, task, keys["one?"], "first")
            last = await asked(client, task)
            [(message, key)] = messages(last).items()
            assert message == "three?"
            # A key names one question for the whole life of the task.
            assert key not in keys.values()
            await answer(client, task, key, "third")
            ended = await until(client, task, *ENDED)
            assert text_of(ended) == "accept first accept second accept third"


@pytest.mark.parametrize(("kind", "eras", "tool"), PAIRS)
async def test_two_tasks_ask_at_once_and_each_has_its_own_answers(
    kind: str, eras: Eras, tool: str, tmp_path: Path
) -> None:
    policy: Any = TaskPolicy(always={tool})
    async with server_of(kind, tmp_path) as server:
        async with world(server=server, eras=eras, tasks=policy) as w:
            clients = [
                ModernClient(await w.carrier_of(user(name)), capabilities=CAPABILITIES)
                for name in ("alice", "bob")
            ]
            tasks = [await client.call(tool).result() for client in clients]
            for count in (2, 1):
                for client, task, name in zip(clients, tasks, "ab", strict=True):
                    shown = await asked(client, task, questions=count)
                    for key in messages(shown).values():
                        await answer(client, task, key, name)
            for client, task, name in zip(clients, tasks, "ab", strict=True):
                ended = await until(client, task, *ENDED)
                assert text_of(ended) == " ".join([f"accept {name}"] * 3)
