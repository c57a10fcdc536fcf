"""The examples of the README and docs/ are run: the shell walk-through, the Python, the tables."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.errors import InvalidReason, Refusal, SessionsError, WireError
from mcp_sessions.policy import SessionPolicy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of one language, in order; one in a list is indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


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
    """docs/wire.md, "With curl"."""
    for tool in ("bash", "curl", "jq"):
        if shutil.which(tool) is None:
            pytest.fail(f"missing: {tool}, which the README's walk-through uses")
    (script,) = blocks(page("docs/wire.md"), "bash")

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
    # What the last comment of the script says, and that its server leaves nothing in the clone.
    shown = [line for line in done.stdout.splitlines() if line.startswith("data: {")]
    assert len(shown) == 2 and "two events" in script
    assert shown[0].count("notifications/resources/list_changed") == 1
    assert "`NOTES_DIR=$(mktemp -d) mcp-sessions serve" in page("docs/wire.md")
    assert done.stdout.count('"sessionEventId"') >= 2


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_python_of_every_page_is_python(path: Path) -> None:
    """Every block compiles; ``await`` at the top stands for a coroutine around it. Passes if
    none raises a SyntaxError.
    """
    for block in blocks(path.read_text(), "python"):
        compile(
            "async def shown():\n" + "\n".join("    " + line for line in block.splitlines()),
            path.name,
            "exec",
        )


def test_the_one_line_makes_an_application() -> None:
    """README, "The one line"."""
    shown: dict[str, Any] = {}
    exec(blocks(page("README.md"), "python")[0], shown)

    assert callable(shown["app"])


@pytest.mark.parametrize(
    ("policy", "name"),
    [(SessionPolicy, "docs/limits.md"), (ReconnectPolicy, "docs/clients.md")],
)
def test_every_limit_is_in_the_table_with_its_default(policy: type[Any], name: str) -> None:
    """The server's limits, and the client's own."""
    lines = page(name).splitlines()
    for limit in dataclasses.fields(policy):
        row = next(line for line in lines if f"`{limit.name}`" in line and line.startswith("|"))
        if isinstance(limit.default, (int, float)):
            assert re.search(rf"\b{limit.default:g}\b", row) or str(limit.default) in row, row


def test_every_error_on_the_wire_is_in_the_table() -> None:
    """docs/limits.md, "Errors": codes and reasons."""
    text = page("docs/limits.md")

    def below(kind: type[SessionsError]) -> set[type[SessionsError]]:
        return {kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))}

    codes = {str(error.code) for error in below(SessionsError) if issubclass(error, WireError)}
    for code in codes - {"-32603"}:
        assert f"`{code}`" in text, code
    for reason in [*InvalidReason, *Refusal]:
        assert f"`{reason.value}`" in text, reason


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_a_page_links_to_is_there(path: Path) -> None:
    """Links into the repository. ``scripts/docs`` checks those to headings, too."""
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_commands_of_the_readme_can_be_run() -> None:
    """README, "Two commands", and the site's."""
    for command in ("scripts/demo", "scripts/test", "scripts/docs"):
        assert f"./{command}" in page("README.md")
        assert os.access(ROOT / command, os.X_OK)
