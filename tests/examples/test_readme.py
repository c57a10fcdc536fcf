"""What the README shows is run: its shell walk-through, its Python, its tables."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.client.policy import ReconnectPolicy
from mcp_sessions.errors import InvalidReason, Refusal, SessionsError, WireError
from mcp_sessions.policy import SessionPolicy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """What stands under one heading."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.fixture(scope="module")
def notes_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The notes server, started by the README's command on a port of its own."""
    folder = tmp_path_factory.mktemp("notes")
    command = [sys.executable, "-m", "mcp_sessions.cli", "serve", "examples/notes_server.py"]
    server = subprocess.Popen(
        [*command, "--port", "0", "--log-format", "json"],
        cwd=ROOT,
        env={**os.environ, "NOTES_DIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        while True:
            line = server.stderr.readline()
            assert line, "the server ended before it said where it listens"
            said: dict[str, Any] = json.loads(line)
            if said.get("message") == "serving":
                yield said["url"]
                break
    finally:
        server.terminate()
        server.communicate(timeout=30)


def test_the_walk_through_with_curl_ends_with_one_update_not_three(notes_url: str) -> None:
    """README, "With curl"."""
    for tool in ("bash", "curl", "jq"):
        if shutil.which(tool) is None:
            pytest.fail(f"missing: {tool}, which the README's walk-through uses")
    (script,) = blocks("bash")

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "URL": notes_url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert '"catchup":true' in done.stdout
    assert done.stdout.count("notifications/resources/updated") == 1
    assert done.stdout.count('"sessionEventId"') >= 2


def test_the_python_of_the_readme_is_python() -> None:
    """Every block compiles; ``await`` at the top stands for a coroutine around it."""
    for block in blocks("python"):
        compile(
            "async def shown():\n" + "\n".join("    " + line for line in block.splitlines()),
            "README.md",
            "exec",
        )


def test_the_one_line_makes_an_application() -> None:
    """README, "The one line"."""
    shown: dict[str, Any] = {}
    exec(blocks("python")[0], shown)

    assert callable(shown["app"])


@pytest.mark.parametrize(
    ("policy", "title"),
    [(SessionPolicy, "Limits"), (ReconnectPolicy, "A client that comes back by itself")],
)
def test_every_limit_is_in_the_table_with_its_default(policy: type[Any], title: str) -> None:
    """README, "Limits", and the client's own."""
    lines = section(title).splitlines()
    for limit in dataclasses.fields(policy):
        row = next(line for line in lines if f"`{limit.name}`" in line and line.startswith("|"))
        if isinstance(limit.default, (int, float)):
            assert re.search(rf"\b{limit.default:g}\b", row) or str(limit.default) in row, row


def test_every_error_on_the_wire_is_in_the_table() -> None:
    """README, "Errors": codes, reasons, and the classes that are raised in Python."""

    def below(kind: type[SessionsError]) -> set[type[SessionsError]]:
        return {kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))}

    codes = {str(error.code) for error in below(SessionsError) if issubclass(error, WireError)}
    for code in codes - {"-32603"}:
        assert f"`{code}`" in README, code
    for reason in [*InvalidReason, *Refusal]:
        assert f"`{reason.value}`" in README, reason


def test_every_file_that_the_readme_names_is_there() -> None:
    """Links into the repository, and the two commands."""
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for command in ("scripts/demo", "scripts/test"):
        assert os.access(ROOT / command, os.X_OK)
