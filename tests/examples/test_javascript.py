"""The server in ``examples/javascript`` keeps the level resume, and is short enough to be read.

It shares no code with the reference implementation: what they agree on, the specification says.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from mcp_sessions_conformance import entry

HOME = Path(__file__).resolve().parents[2] / "examples" / "javascript"
TOKENS = {"alpha": {"subject": "a"}, "weak": {"subject": "a"}, "beta": {"subject": "b"}}
PATIENT = 15.0
"""Seconds. A loaded machine is no fault of the server's."""
LONGEST = 600
"""Lines of code of the server, without its fixture tools: people read it from end to end."""


def code_lines(text: str) -> int:
    """Lines that are neither blank nor of a comment; the others may end in one."""
    lines = (line.strip() for line in text.splitlines())
    return sum(not line.startswith(("//", "/**", "*")) for line in lines if line)


def test_the_server_is_short() -> None:
    sources = [HOME / "sessions.mjs", HOME / "server.mjs"]
    assert {*HOME.glob("*.mjs")} == {*sources, HOME / "tools.mjs"}
    assert sum(code_lines(path.read_text("utf-8")) for path in sources) <= LONGEST


def test_a_comment_is_no_code() -> None:
    assert code_lines("// a\n\nlet b; // c\n/**\n * d\n */\n/** e */\n  f();\n") == 2


@pytest.fixture
def server_url() -> Generator[str]:
    """The endpoint, with tokens of two principals, and a second one of the first."""
    node = shutil.which("node")
    assert node is not None, "Node.js is not installed"
    process = subprocess.Popen(
        [node, str(HOME / "server.mjs"), "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENS": json.dumps(TOKENS)},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(timeout=20)
        process.stdout.close()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_the_server_keeps_the_level_resume(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = await entry.test_server(
        [server_url],
        level="resume",
        eras=["handshake"],
        token="alpha",
        other_token="beta",
        weak_token="weak",
        wait=PATIENT,
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{tested.text.splitlines()[-1]}\n")
    assert tested.is_conformant, tested.text
