"""The TypeScript ACP client, unmodified, drives ``examples/acp_agent.py``.

New, prompt, process killed, load in a new process, an identical
sequence of updates, and the next prompt uses what was before.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.security import mint_key
from tests.interop.environments import ROOT, typescript_command

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

Json = dict[str, Any]


@pytest.fixture(scope="module")
def driver() -> list[str]:
    """The command, installed if need be."""
    return typescript_command("typescript_acp")


class Setup:
    """A folder with the stores of the agent and of its MCP server."""

    def __init__(self, folder: Path, driver: list[str]) -> None:
        self.folder = folder
        self.driver = driver
        cli = [sys.executable, "-m", "mcp_sessions.cli"]
        agent = f"{ROOT / 'examples' / 'acp_agent.py'}:agent"
        store = f"sqlite:///{folder}/conversations.db"
        self.command = [*cli, "acp", "--agent", agent, "--store", store, "--log-level", "error"]
        notes = str(ROOT / "examples" / "notes_server.py")
        self.servers = [
            {
                "name": "notes",
                "command": sys.executable,
                "args": [*cli[1:], "serve", notes, "--stdio", "--store", "sqlite:///mcp.db"],
                "env": [
                    {"name": "MCP_SESSIONS_KEYS", "value": mint_key()},
                    {"name": "NOTES_DIR", "value": str(folder / "notes")},
                ],
            }
        ]

    def run(self, *steps: tuple[str, Json]) -> Json:
        """One client and one agent, which is killed at the end."""
        initialize: Json = {"protocolVersion": 1, "clientCapabilities": {}}
        script: Json = {
            "command": self.command,
            "cwd": str(ROOT / "examples"),
            "steps": [("initialize", initialize), *steps],
        }
        done = subprocess.run(
            self.driver, input=json.dumps(script), capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        outcome: Json = json.loads(done.stdout)
        hello = outcome["answers"].pop(0)
        assert hello["protocolVersion"] == 1
        assert hello["agentCapabilities"]["loadSession"] is True
        return outcome

    def opening(self, **more: Any) -> Json:
        return {"cwd": str(self.folder), "mcpServers": self.servers, **more}


def prompt(text: str, session_id: str = "$session") -> tuple[str, Json]:
    block = {"type": "text", "text": text}
    return "session/prompt", {"sessionId": session_id, "prompt": [block]}


END = {"stopReason": "end_turn"}


def test_new_prompt_kill_load_and_the_next_prompt_uses_what_was_before(
    tmp_path: Path, driver: list[str]
) -> None:
    setup = Setup(tmp_path, driver)
    asked = ["note milk: two litres", "open milk", "list"]
    first = setup.run(("session/new", setup.opening()), *(prompt(text) for text in asked))
    made, *answers = first["answers"]
    session_id = made["sessionId"]
    assert answers == [END] * 3
    assert len(first["updates"]) == 9

    second = setup.run(
        ("session/load", setup.opening(sessionId=session_id)),
        prompt("open milk", session_id),
        prompt("again", session_id),
        prompt("recent", session_id),
    )
    # The client makes an object of the answer ``null``.
    assert second["answers"] == [second["answers"][0], END, END, END]
    assert second["answers"][0] in (None, {})
    shown = second["updates"][: 9 + 3]
    users = [one for one in shown if one["sessionUpdate"] == "user_message_chunk"]
    assert [one["content"]["text"] for one in users] == asked
    assert [one for one in shown if one not in users] == first["updates"]
    texts = [
        one["content"]["text"]
        for one in second["updates"][12:]
        if one["sessionUpdate"] == "agent_message_chunk"
    ]
    # The last: the notes server goes on in the session that it had before.
    assert texts == ["two litres", "two litres", "milk"]

    third = setup.run(
        ("session/resume", setup.opening(sessionId=session_id)),
        prompt("again", session_id),
        ("session/list", {"cwd": str(tmp_path)}),
        ("session/close", {"sessionId": session_id}),
    )
    resumed, answer, listed, closed = third["answers"]
    assert (resumed, answer, closed) == ({}, END, {})
    assert [(one["sessionId"], one["title"]) for one in listed["sessions"]] == [
        (session_id, asked[0])
    ]
    assert len(third["updates"]) == 3


def test_what_is_refused_is_an_error_that_the_client_understands(
    tmp_path: Path, driver: list[str]
) -> None:
    setup = Setup(tmp_path, driver)
    outcome = setup.run(
        ("session/new", {"cwd": "relative", "mcpServers": []}),
        ("session/load", {"sessionId": "nobody's", "cwd": "/", "mcpServers": []}),
        ("session/new", {"cwd": "/", "mcpServers": []}),
        prompt("list"),
    )
    relative, unknown, made, answer = outcome["answers"]
    assert relative["error"]["code"] == -32602
    assert "cwd" in relative["error"]["message"]
    assert unknown["error"]["code"] == -32002
    assert (list(made), answer) == (["sessionId"], END)
