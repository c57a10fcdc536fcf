"""Tasks that a program leaves behind: its next run asks for their outcomes."""

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from mcp import Client, MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ElicitResult

from mcp_sessions.client.jar import FileJar, OpenTask
from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client_transport import resumable
from mcp_sessions.layer import SessionLayer
from mcp_sessions.policy import TaskPolicy
from tests.support.asking import Answer
from tests.support.resuming import QUICK, text_of
from tests.support.servers import RunningServer, serve

PROGRAM = """
import sys, anyio
from mcp import Client
from mcp_sessions import FileJar, resumable

async def answer(context, params):
    await anyio.sleep_forever()

async def main():
    transport = resumable(sys.argv[1], jar=FileJar(sys.argv[2]))
    asked = Client(transport, elicitation_callback=answer)
    async with asked as client, anyio.create_task_group() as group:
        group.start_soon(client.call_tool, sys.argv[3], {"text": "hi"})
        while not transport._calls.open_tasks._saved:
            await anyio.sleep(0.01)
        print("left", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


class Work:
    """What the server's tools wait for, over its restarts."""

    def __init__(self, path: Path) -> None:
        self.store = f"sqlite:///{path}/sessions.db"
        self.may_end = threading.Event()
        self.runs = 0

    def layer(self) -> SessionLayer:
        mcp = MCPServer("work")

        @mcp.tool()
        async def build(text: str) -> str:
            self.runs += 1
            await anyio.to_thread.run_sync(self.may_end.wait, abandon_on_cancel=True)
            return f"built {text}"

        @mcp.tool()
        async def ask(ctx: Context[Any], text: str) -> str:
            answer = await ctx.elicit("who?", Answer)
            return f"{text} {getattr(answer, 'data', Answer(answer='-')).answer}"

        del build, ask
        policy = TaskPolicy(always={"build", "ask"}, poll_interval=0.02)
        return SessionLayer(mcp, store=self.store, tasks=policy)


@contextmanager
def left_behind(server: RunningServer, path: Path, tool: str = "build") -> Generator[FileJar]:
    """A program calls a tool, which becomes a task, and is killed."""
    jar = FileJar(path / "jar.json")
    command = [sys.executable, "-c", PROGRAM, server.url(), str(jar.path), tool]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"left\n"
        program.kill()
    yield jar


async def test_a_later_run_has_the_result_after_a_restart_of_both(tmp_path: Path) -> None:
    work = Work(tmp_path)
    with serve(work.layer().asgi_app()) as server, left_behind(server, tmp_path) as jar:
        work.may_end.set()
        transport = resumable(server.url(), jar=jar, policy=QUICK)
        async with Client(transport):
            (task,) = transport.tasks()
        # Its end is stored before it shows. It stays in the jar: nobody asked for it there.
        other = resumable(server.url(), policy=QUICK)
        async with Client(other):
            with anyio.fail_after(10):
                assert text_of(await other.task(task.task_id)) == "built hi"
    with serve(work.layer().asgi_app(), port=server.port) as again:
        transport = resumable(again.url(), jar=jar, policy=QUICK)
        async with Client(transport):
            assert transport.tasks() == (OpenTask(task.task_id, "build", {"text": "hi"}),)
            assert text_of(await transport.task(task.task_id)) == "built hi"
            assert transport.tasks() == ()
        async with Client(resumable(again.url(), jar=jar, policy=QUICK)) as client:
            assert client is not None
            assert FileJar(jar.path).read("tasks") == {}
    assert work.runs == 1


async def test_a_task_that_ran_when_its_server_stopped_has_an_unknown_outcome(
    tmp_path: Path,
) -> None:
    work = Work(tmp_path)
    with serve(work.layer().asgi_app()) as server, left_behind(server, tmp_path) as jar:
        port = server.port
        assert jar.read("tasks")
    with serve(work.layer().asgi_app(), port=port) as again:
        transport = resumable(again.url(), jar=jar, policy=QUICK)
        async with Client(transport):
            (task,) = transport.tasks()
            with pytest.raises(MCPError) as failed:
                await transport.task(task.task_id)
            assert is_outcome_unknown(failed.value)
            assert transport.tasks() == ()
    work.may_end.set()
    assert work.runs == 1


async def test_a_later_run_answers_the_question_of_a_task(tmp_path: Path) -> None:
    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"answer": params.message})

    work = Work(tmp_path)
    with serve(work.layer().asgi_app()) as server, left_behind(server, tmp_path, "ask") as jar:
        transport = resumable(server.url(), jar=jar, policy=QUICK)
        async with Client(transport, elicitation_callback=answer) as client:
            (task,) = transport.tasks()
            with pytest.raises(RuntimeError, match="request_state"):
                await transport.task(task.task_id)
            state = task.request_state
            result = await client.call_tool(task.tool, task.arguments, request_state=state)
            assert text_of(result) == "hi who?"
            assert transport.tasks() == ()


async def test_a_transport_that_is_not_in_use_has_no_tasks() -> None:
    transport = resumable("http://127.0.0.1:9/mcp")
    assert transport.tasks() == ()
    with pytest.raises(RuntimeError, match="not in use"):
        await transport.task("t")
