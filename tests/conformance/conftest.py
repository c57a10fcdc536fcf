"""The conformance server of ``examples/``, running, and ways to it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.fault_proxy import FaultProxy
from mcp_sessions_conformance.loader import Vector, load_vectors
from mcp_sessions_conformance.local_server import listening
from mcp_sessions_conformance.peer import Era, Limits
from mcp_sessions_conformance.targets import Credentials, Target, UrlWay

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVER = EXAMPLES / "conformance_server.py"
CREDENTIALS = Credentials("alpha", "beta", "alpha-weak")
GOOD = Fault("none", "is good")

STDIO_COMMAND = f"{sys.executable} -m mcp_sessions.cli serve --stdio --log-level error {SERVER}"
CLIENT_COMMAND = f"{sys.executable} {EXAMPLES / 'conformance_client.py'}"

QUICK = Limits(wait=1.0, quiet=0.1)
"""A test that expects a fault waits for a shorter time."""


@contextmanager
def served(**environment: str) -> Generator[str]:
    """The endpoint of the good server, with more in its environment."""
    command = [sys.executable, "-m", "mcp_sessions.cli", "serve", "--port", "0"]
    command += ["--log-format", "json", "--log-level", "error", str(SERVER)]
    tokens = {
        "CONFORMANCE_TOKEN": "alpha",
        "CONFORMANCE_OTHER_TOKEN": "beta",
        "CONFORMANCE_WEAK_TOKEN": "alpha-weak",
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **tokens, **environment},
    )
    assert process.stderr is not None
    # It says where it serves, or ends.
    started = json.loads(process.stderr.readline())
    draining = threading.Thread(target=process.stderr.read, daemon=True)
    draining.start()
    try:
        yield started["url"]
    finally:
        # Not in order: it would wait for what vectors left running.
        process.kill()
        process.wait(timeout=20)
        draining.join(timeout=20)
        process.stderr.close()


@pytest.fixture(scope="package")
def server_url() -> Generator[str]:
    """The endpoint of the good server, served as a user would, with the tokens of
    `CREDENTIALS`.
    """
    with served() as url:
        yield url


@pytest.fixture(scope="session")
def vectors() -> list[Vector]:
    return load_vectors()


def way(name: str, url: str, limits: Limits = Limits()) -> UrlWay:  # noqa: B008 - it is frozen
    """The way that the table of faults calls so, to that endpoint."""
    transport, _, era = name.partition("/")
    if transport == "websocket":
        url = url.replace("http", "ws", 1)
    named: Era = "modern" if era == "modern" else "handshake"
    kind = "websocket" if transport == "websocket" else "http"
    return UrlWay(Target(kind, url), named, limits, CREDENTIALS)


@asynccontextmanager
async def behind_fault_proxy(upstream: str) -> AsyncGenerator[tuple[FaultProxy, str]]:
    """A proxy before ``upstream`` that can be made wrong, and its URL."""
    app = FaultProxy(upstream, GOOD)
    async with listening(app) as url:
        yield app, url
