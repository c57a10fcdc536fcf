"""``mcp-sessions serve`` in a process of its own."""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INITIALIZE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}

STARTED_WITHIN = 40.0  # seconds; importing the SDK takes one or two


@contextmanager
def serving(
    here: Path, *arguments: str, within: float = STARTED_WITHIN, descriptors: int | None = None
) -> Generator[subprocess.Popen[str]]:
    """A process that serves on a free port; it is gone afterwards.

    Args:
        within: Seconds after which it is killed, whatever it does.
        descriptors: How many file descriptors it may have.
    """
    limited = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"] if descriptors else []
    process = subprocess.Popen(
        [*limited, sys.executable, "-m", "mcp_sessions.cli", "serve", "--port", "0", *arguments],
        cwd=here,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Bounds every read from it: killed, it has no more to say.
    watch = threading.Timer(within, process.kill)
    watch.start()
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        watch.cancel()


def read_lines(process: subprocess.Popen[str], count: int) -> str:
    """The next ``count`` lines of its stderr, or fewer if it ended."""
    assert process.stderr is not None
    return "".join(process.stderr.readline() for _ in range(count))


def initialize(url: str) -> dict[str, object]:
    request = urllib.request.Request(
        url,
        data=json.dumps(INITIALIZE).encode(),
        headers={
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        },
    )
    # Not by way of a proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return json.load(answer)["result"]
