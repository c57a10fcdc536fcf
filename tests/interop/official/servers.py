"""A server for the suites in a process of its own, bare or wrapped."""

import os
import select
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tests.interop.official.installs import HERE

Kind = Literal["bare", "wrapped", "bound", "command", "url", "command-2026", "url-2026"]
Stack = Literal["h11", "httptools"]

START_SECONDS = 30.0
STOP_SECONDS = 10.0


@contextmanager
def everything_server(
    folder: Path,
    kind: Kind,
    stack: Stack,
    *,
    log: Path,
    behind: str | None = None,
    program: str = "launcher.py",
) -> Generator[str]:
    """Run it until the block ends, and give its URL.

    Args:
        folder: The one with the package ``mcp_everything_server``.
        stack: See ``launcher.py``.
        log: Where it writes what it has to say.
        behind: Where the bare one is, before which a ``url`` stands.
        program: What launches it, in this folder.

    Raises:
        AssertionError: It did not start, or it did not stop.
    """
    command = [sys.executable, str(HERE / program), str(folder), kind, stack]
    # The same packages as in this process, wherever pytest found them.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    if behind is not None:
        environment["EVERYTHING_URL"] = behind
    with (
        log.open("wb") as messages,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            encoding="ascii",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            port = process.stdout.readline().strip() if readable else ""
            if not port:
                raise AssertionError(
                    f"the {kind} everything-server did not start on {stack} within "
                    f"{START_SECONDS:g} s:\n{tail(log)}"
                )
            # By this name, as the SDK's own CI calls it.
            yield f"http://localhost:{port}/mcp"
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(
                    f"the {kind} everything-server did not stop within {STOP_SECONDS:g} s "
                    f"of SIGTERM:\n{tail(log)}"
                ) from None


def tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-3000:]
