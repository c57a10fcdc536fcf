"""Servers in processes of their own: a port for one, and when it can be called."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mcp_sessions.security import mint_key

ROOT = Path(__file__).parents[2]

WITHIN = 60.0
"""Seconds in which a server starts, also on a busy machine."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_it_listens(
    process: "subprocess.Popen[bytes]", port: int, said: Callable[[], str] = str
) -> None:
    """Return once the server accepts connections.

    Args:
        process: The server.
        port: Where it listens.
        said: What it said, for the error.

    Raises:
        AssertionError: It ended, or did not listen within ``WITHIN`` seconds.
    """
    until = time.monotonic() + WITHIN
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            # Nothing says when it listens; this is a bounded wait on the condition.
            time.sleep(0.02)
    raise AssertionError(f"a server did not start: {said()}")


class KilledServer:
    """``mcp-sessions serve tests/support/restart_app.py`` over one file and port, in one process
    after the other, each ended by SIGKILL.

    Its methods wait: call them from a thread.
    """

    def __init__(self, position: Path) -> None:
        self.port = free_port()
        self.position = position
        self._process: subprocess.Popen[bytes] | None = None
        self._env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT}/transports",
            "RUNS": str(position / "runs"),
            "MCP_SESSIONS_KEYS": mint_key(),
        }

    def url(self, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        """Start it, and return once it accepts connections."""
        app = f"{ROOT / 'tests/support/restart_app.py'}:mcp"
        store = f"sqlite:///{self.position / 'sessions.db'}"
        serve = ["serve", app, "--store", store, "--port", str(self.port), "--log-level", "error"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mcp_sessions.cli", *serve],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._env,
            cwd=self.position,
        )
        wait_until_it_listens(self._process, self.port)

    def kill(self) -> None:
        """``kill -9``, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def cpu(self) -> float:
        """Seconds of CPU that the newest process has used."""
        assert self._process is not None
        parts = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def runs(self) -> list[str]:
        """What tools did, in order."""
        runs = self.position / "runs"
        return runs.read_text().splitlines() if runs.exists() else []
