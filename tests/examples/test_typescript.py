"""The server and the client in ``examples/typescript`` are type-checked, built, and conformant.

They share no code with the reference implementation: what they agree on, the specification says.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcp_sessions_conformance import entry
from tests.interop.environments import node_project

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

HOME = Path(__file__).resolve().parents[2] / "examples" / "typescript"
TOKENS = {
    "alpha": {"subject": "a", "scopes": ["read", "write"]},
    "weak": {"subject": "a", "scopes": ["read"]},
    "beta": {"subject": "b"},
}
PATIENT = 15.0
"""Seconds. A loaded machine is no fault of the server's."""


@dataclass(frozen=True)
class Project:
    node: str

    @property
    def server(self) -> list[str]:
        return [self.node, str(HOME / "build" / "server" / "main.js")]

    def demo(self, url: str, era: str) -> list[str]:
        """The command that loses its connection twice and prints what it received."""
        return [self.node, str(HOME / "build" / "client" / "demo.js"), url, era]

    @property
    def client(self) -> list[str]:
        """The command that does what a scripted server says."""
        return [self.node, str(HOME / "build" / "client" / "main.js")]


@pytest.fixture(scope="module")
def project() -> Project:
    """Installed from its lock file, and built: what has a type error is not."""
    node = node_project(HOME)
    compiler = HOME / "node_modules" / "typescript" / "bin" / "tsc"
    built = subprocess.run([node, compiler], cwd=HOME, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout
    return Project(node)


@pytest.fixture(scope="module")
def server_url(project: Project) -> Generator[str]:
    """The endpoint, with tokens of two principals, and a weaker one of the first."""
    process = subprocess.Popen(
        [*project.server, "0"],
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


def show_counts(tested: entry.Tested, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of the report, also where all passes."""
    with capsys.disabled():
        sys.stdout.write(f"\n{tested.text.splitlines()[-1]}\n")


async def test_the_server_is_conformant_over_http_and_websocket(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [server_url, server_url.replace("http", "ws", 1)]
    tested = await entry.test_server(
        ways, token="alpha", other_token="beta", weak_token="weak", wait=PATIENT
    )
    show_counts(tested, capsys)
    assert tested.is_conformant, tested.text


async def test_the_server_is_conformant_on_a_pipe(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = await entry.test_server([f"stdio:{' '.join(project.server)} --stdio"], wait=PATIENT)
    show_counts(tested, capsys)
    assert tested.is_conformant, tested.text


async def test_the_client_does_every_duty(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = await entry.test_client(" ".join(project.client), wait=PATIENT)
    show_counts(tested, capsys)
    assert tested.is_conformant, tested.text


@pytest.mark.parametrize("era", ["handshake", "modern"])
def test_the_client_gets_each_event_once_over_lost_connections(era: str, project: Project) -> None:
    """RES3, CUP3, CLI3, CLI11: in each era."""
    command = [*project.server, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            done = subprocess.run(
                project.demo(url, era), capture_output=True, text=True, timeout=60, check=True
            )
        finally:
            server.kill()
    said = json.loads(done.stdout)
    assert said == {"heard": ["one", "two", "three", "four", "five"], "missed": 0}
