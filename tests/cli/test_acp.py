"""``mcp-sessions acp``: what it refuses, in one line, and that it serves and ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from mcp_sessions.cli.main import main

Json = dict[str, Any]

AGENT = """
    import acp
    class Agent:
        async def initialize(self, protocol_version, **_):
            return acp.InitializeResponse(protocol_version=protocol_version)
        async def new_session(self, **_):
            return acp.NewSessionResponse(session_id="own")
        async def prompt(self, **_):
            return acp.PromptResponse(stop_reason="end_turn")
    agent = Agent()
"""

LAYER = f"""
    {AGENT}
    from mcp_sessions.acp import AcpSessionLayer
    layer = AcpSessionLayer(agent, store="sqlite:///layer.db")
"""

WITHIN = 40.0  # seconds; importing the SDK takes one or two

INITIALIZE: Json = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": 1},
}
NEW: Json = {
    "jsonrpc": "2.0",
    "id": 2,
    "method": "session/new",
    "params": {"cwd": "/", "mcpServers": []},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A directory with agents; what a command imports is forgotten."""
    (tmp_path / "bare_agent.py").write_text(dedent(AGENT))
    (tmp_path / "layer_agent.py").write_text(dedent(LAYER))
    (tmp_path / "no_agent.py").write_text("import acp\nname = 'a string'\n")
    (tmp_path / "two_agents.py").write_text(dedent(AGENT) + "other = Agent()\n")
    (tmp_path / "broken_agent.py").write_text("raise RuntimeError('no model here')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    for name in ("bare_agent", "layer_agent", "no_agent", "two_agents", "broken_agent"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--agent"),
        (["--agent"], "--agent"),
        (["bare_agent.py:agent"], "--agent"),
        (["--agent", "bare_agent.py:agent", "--stroe", "memory://"], "--stroe"),
        (["--agent", "bare_agent.py:agent", "--store", "carrier-pigeon://"], "carrier-pigeon"),
        (["--agent", "bare_agent.py:agent", "--store", "sqlite://x.db"], "sqlite"),
        (["--agent", "bare_agent.py:agent", "--store", "sqlite:////no/such/a.db"], "/no/such"),
        (["--agent", "bare_agent.py:agent", "--connect-timeout", "soon"], "--connect-timeout"),
        (["--agent", "bare_agent.py:agent", "--log-level", "loud"], "--log-level"),
        (["--agent", "nowhere.py:agent"], "nowhere.py"),
        (["--agent", "bare_agent.py:agnet"], "agnet"),
        (["--agent", "bare_agent.py:Agent"], "not an ACP agent"),
        (["--agent", "no_agent.py"], "an ACP agent"),
        (["--agent", "no_agent.py:name"], "an ACP agent"),
        (["--agent", "two_agents.py"], "two_agents.py:other"),
        (["--agent", "broken_agent.py"], "no model here"),
        (["--agent", "???"], "TARGET"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["acp", *arguments])
    except SystemExit as ended:
        status = ended.code
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("mcp-sessions 0.")]
    assert (status, out, len(lines)) == (2, "", 1)
    assert lines[0].startswith("mcp-sessions acp: ")
    assert says in lines[0]


def test_without_the_library_the_extra_is_named(here: Path) -> None:
    (here / "sitecustomize.py").write_text("import sys\nsys.modules['acp'] = None\n")
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sessions.cli", "acp", "--agent", "bare_agent.py:agent"],
        env={"PYTHONPATH": f"{here}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "pip install 'mcp-sessions[acp]'" in line


def start(here: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mcp_sessions.cli", "acp", *arguments],
        cwd=here,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("target", ["bare_agent.py", "layer_agent.py:layer"])
def test_it_serves_a_script_and_ends_with_its_input(here: Path, target: str) -> None:
    """Everything is sent at once, as by a shell; everything is answered."""
    with start(here, "--agent", target) as process:
        out, err = process.communicate(
            "".join(json.dumps(message) + "\n" for message in (INITIALIZE, NEW)), timeout=WITHIN
        )
    assert process.returncode == 0, err
    first, second = [json.loads(line) for line in out.splitlines()]
    is_kept = target == "layer_agent.py:layer"
    # Of the memory store nothing is left after the process.
    assert first["result"]["agentCapabilities"]["loadSession"] is is_kept
    assert len(second["result"]["sessionId"]) >= 43
    assert "over ACP" in err
    assert ("memory store" in err) == (target == "bare_agent.py")
    assert (here / "layer.db").exists() == (target == "layer_agent.py:layer")


def test_a_signal_ends_it_and_the_conversation_is_there(here: Path) -> None:
    """SIGTERM is an end like any other; Ctrl-C is asked to the shell."""
    arguments = ("--agent", "bare_agent.py", "--store", "sqlite:///conversations.db")
    second: Json = NEW
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        with start(here, *arguments) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for message in (INITIALIZE, second):
                process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            process.stdout.readline()
            answer = json.loads(process.stdout.readline())
            process.send_signal(number)
            assert process.wait(WITHIN) == status
        if second is NEW:
            params = {**NEW["params"], "sessionId": answer["result"]["sessionId"]}
            second = {**NEW, "method": "session/load", "params": params}
    assert answer == {"jsonrpc": "2.0", "id": 2, "result": None}
