"""A scripted host that behaves as Claude Code does: it asks ``server/discover`` first, has no
session id in the 2026 era, declares tasks, exits, and resumes its conversation.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp_sessions import Conversations
from mcp_sessions.policy import TaskPolicy
from tests.house.source import ROOT
from tests.server.requests.test_tasks import CAPABILITIES, ENDED, text_of, until
from tests.support.children import child
from tests.support.modern import ModernClient, envelope
from tests.support.raw import Json, RawClient, call_params, result_of
from tests.support.replicas import user
from tests.support.world import world

LONG: Json = {"text": "long", "seconds": 1}
SERVER = """
import asyncio

from mcp.server import MCPServer
from mcp_sessions import current_session

mcp = MCPServer("notes")


@mcp.tool()
async def count() -> str:
    state = current_session().state
    state["n"] = state.get("n", 0) + 1
    return f"{current_session().source} {state['n']}"


@mcp.tool()
async def long() -> str:
    await asyncio.sleep(1)
    return "waited"
"""


async def test_over_http_before_a_stateful_command_its_user_has_a_session_and_its_task_ends() -> (
    None
):
    settings: Any = {
        "conversations": Conversations(per_principal=True),
        "tasks": TaskPolicy(after=0.05),
    }
    async with world(server=child(), **settings) as w:

        async def host(name: str) -> ModernClient:
            client = ModernClient(await w.carrier_of(user(name)), capabilities=CAPABILITIES)
            assert "extensions" in (await client.send("server/discover").result())["capabilities"]
            return client

        first = await host("ann")
        assert [await first.text("count") for _ in range(2)] == ["1", "2"]
        task = await first.call("mark_and_wait", LONG).result()
        assert task["resultType"] == "task"
        # It exits. A later run of it follows the task, and goes on with the conversation.
        resumed = await host("ann")
        assert text_of(await until(resumed, task, *ENDED)) == "waited"
        assert await resumed.text("count") == "4"
        assert await (await host("bob")).text("count") == "1"


async def test_over_http_with_the_handshake_alone_each_conversation_has_its_process() -> None:
    async with world(server=child(), eras="2025", tasks=TaskPolicy(after=0.05)) as w:

        async def conversation() -> RawClient:
            asked = ModernClient(w.carrier, capabilities=CAPABILITIES).send("server/discover")
            assert (await asked.error())["code"] == -32601
            client = RawClient(w.carrier)
            await client.initialize()
            return client

        first, other = await conversation(), await conversation()
        assert [await first.text("count"), await other.text("count")] == ["1", "1"]
        assert await first.text("mark_and_wait", **LONG) == "waited"
        resumed = RawClient(w.carrier)
        resumed.session_id = first.session_id
        assert await resumed.text("count") == "3"


class StdioHost:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._last = process, 0

    async def result(self, method: str, params: Json) -> Json:
        self._last += 1
        params = {**params, "_meta": envelope(capabilities=CAPABILITIES)}
        message = {"jsonrpc": "2.0", "id": self._last, "method": method, "params": params}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        async with asyncio.timeout(60):
            while (answer := json.loads(await self._process.stdout.readline())).get(
                "id"
            ) != self._last:
                pass
        return result_of(answer)

    async def call(self, tool: str) -> Json:
        return await self.result("tools/call", call_params(tool, {}))


@asynccontextmanager
async def stdio_host(here: Path, *options: str, conversation: str) -> AsyncGenerator[StdioHost]:
    """One run of the host, which starts the server itself."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mcp_sessions.cli", "serve", "--stdio", str(here / "notes.py")),
        *options,
        cwd=ROOT,
        env=os.environ | {"CLAUDE_CODE_SESSION_ID": conversation, "MCP_SESSIONS_KEYS": "k" * 32},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    host = StdioHost(process)
    try:
        assert (await host.result("server/discover", {}))["supportedVersions"] == ["2026-07-28"]
        yield host
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_over_stdio_its_conversation_has_state_and_its_long_call_ends(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(SERVER)

    def run(conversation: str) -> Any:
        named = ("--conversations", "--conversation-key", "env:CLAUDE_CODE_SESSION_ID")
        store = f"sqlite:///{tmp_path / 'notes.db'}"
        options = ("--store", store, *named, "--tasks", "--task-after", "0.1")
        return stdio_host(tmp_path, *options, conversation=conversation)

    async with run("one") as host:
        said = [(await host.call("count"))["content"][0]["text"] for _ in range(2)]
        assert said == ["conversation 1", "conversation 2"]
        task = await host.call("long")
        assert task["resultType"] == "task"
        async with asyncio.timeout(30):
            named = {"taskId": task["taskId"]}
            while (await host.result("tasks/get", named))["status"] == "working":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    async with run("one") as resumed:
        assert text_of(await resumed.result("tasks/get", named)) == "waited"
        assert (await resumed.call("count"))["content"][0]["text"] == "conversation 3"
    async with run("two") as other:
        assert (await other.call("count"))["content"][0]["text"] == "conversation 1"
