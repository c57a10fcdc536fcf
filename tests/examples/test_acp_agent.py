"""``examples/acp_agent.py``, driven by the ACP library's own client as an editor drives it.

The agent's process is killed, without a warning, and another one loads the conversation. Its
MCP server is the notes example: a child process with a store of its own, killed with it.
"""

import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import anyio
import pytest
from acp import schema
from acp.stdio import spawn_agent_process

from mcp_sessions.security import mint_key
from tests.support.conversations import WITHIN, Json

pytestmark = pytest.mark.timeout(120)

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTS_WITHIN = 40.0  # seconds; importing the SDK takes one or two, twice


class Editor:
    """The library's ``Client``: what it is shown, as JSON."""

    def __init__(self) -> None:
        self.shown: list[Json] = []

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.shown.append(update.model_dump(by_alias=True, exclude_none=True))

    @property
    def of_the_agent(self) -> list[Json]:
        """All but what the user said."""
        return [one for one in self.shown if one["sessionUpdate"] != "user_message_chunk"]

    @property
    def of_the_user(self) -> list[str]:
        return [one["content"]["text"] for one in self.shown if one not in self.of_the_agent]


class Setup:
    """A folder with the stores of both, and how to start what is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = mint_key()

    @property
    def servers(self) -> list[Any]:
        """The notes server, over stdio, on a store of its own."""
        program = ["-m", "mcp_sessions.cli", "serve", str(EXAMPLES / "notes_server.py")]
        return [
            schema.McpServerStdio(
                name="notes",
                command=sys.executable,
                args=[*program, "--stdio", "--store", "sqlite:///mcp.db"],
                env=[
                    schema.EnvVariable(name="MCP_SESSIONS_KEYS", value=self.keys),
                    schema.EnvVariable(name="NOTES_DIR", value=str(self.folder / "notes")),
                ],
            )
        ]

    @property
    def command(self) -> list[str]:
        target = f"{EXAMPLES / 'acp_agent.py'}:agent"
        store = f"sqlite:///{self.folder}/conversations.db"
        return [
            *(sys.executable, "-m", "mcp_sessions.cli", "acp"),
            *("--agent", target, "--store", store, "--log-level", "error"),
        ]

    @asynccontextmanager
    async def editor(self) -> AsyncGenerator[tuple[Editor, Any, Any]]:
        """An editor, its connection, and the process of its agent, which is killed at the end."""
        editor = Editor()
        spawned = spawn_agent_process(
            editor,  # pyright: ignore[reportArgumentType]
            *self.command,
            cwd=str(EXAMPLES),
            use_unstable_protocol=True,
            transport_kwargs={"stderr": None},
        )
        async with spawned as (connection, process):
            with anyio.fail_after(STARTS_WITHIN):
                hello = await connection.initialize(protocol_version=acp.PROTOCOL_VERSION)
            assert hello.agent_capabilities is not None
            assert hello.agent_capabilities.load_session
            try:
                yield editor, connection, process
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


async def test_new_prompt_kill_load_and_the_next_prompt_uses_what_was_before(
    tmp_path: Path,
) -> None:
    """The library's own client drives the example."""
    setup = Setup(tmp_path)

    async def ask(connection: Any, session_id: str, text: str) -> None:
        with anyio.fail_after(WITHIN):
            answer = await connection.prompt(session_id=session_id, prompt=[acp.text_block(text)])
        assert answer.stop_reason == "end_turn"

    async with setup.editor() as (editor, connection, process):
        with anyio.fail_after(STARTS_WITHIN):
            made = await connection.new_session(cwd=str(tmp_path), mcp_servers=setup.servers)
        session_id = made.session_id
        asked = ["note milk: two litres of milk", "note eggs: a dozen eggs", "open milk"]
        for text in asked:
            await ask(connection, session_id, text)
        assert editor.shown[-1]["content"]["text"] == "two litres of milk"
        assert len(editor.shown) == 9
        # Its children are not asked either.
        os.kill(process.pid, 9)

    async with setup.editor() as (again, connection, _):
        with anyio.fail_after(STARTS_WITHIN):
            await connection.load_session(
                cwd=str(tmp_path), session_id=session_id, mcp_servers=setup.servers
            )
        assert again.of_the_agent == editor.shown
        assert again.of_the_user == asked
        # What the user asked for last is found in the history of the conversation …
        await ask(connection, session_id, "again")
        assert again.shown[-1]["content"]["text"] == "two litres of milk"
        # … and the notes server goes on in the session that it had before.
        await ask(connection, session_id, "recent")
        assert again.shown[-1]["content"]["text"] == "milk"

        listed = await connection.list_sessions()
        assert [session.title for session in listed.sessions] == [asked[0]]


def test_what_the_agent_prints_does_not_reach_the_editor(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        """
import subprocess, sys
import acp
print("at import")
class Agent:
    async def initialize(self, protocol_version, **_):
        print("in a method", flush=True)
        subprocess.run([sys.executable, "-c", "print('in a child')"], check=True)
        return acp.InitializeResponse(protocol_version=protocol_version)
    async def prompt(self, **_):
        raise NotImplementedError
agent = Agent()
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sessions.cli", "acp", "--agent", "loud.py:agent"],
        cwd=tmp_path,
        input='{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n',
        capture_output=True,
        text=True,
        timeout=STARTS_WITHIN,
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith('{"jsonrpc":"2.0","id":1,"result":')
    for words in ("at import", "in a method", "in a child"):
        assert words in done.stderr
