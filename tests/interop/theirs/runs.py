"""Runs somebody else's tests in a process of its own, their connections going through us."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.interop.environments import ROOT
from tests.interop.theirs.installs import HERE, Installed
from tests.interop.theirs.manifest import Outcome

PLUGINS = HERE / "plugins"
RUN_SECONDS = 600.0
"""Several times what a run takes on a slow machine."""


def run(
    installed: Installed,
    *,
    folder: str,
    plugin: str,
    leg: str,
    into: Path,
    files: Sequence[str] = (),
    arguments: Sequence[str] = (),
    only_connected: bool = False,
) -> Mapping[str, Outcome]:
    """What became of each test.

    Args:
        folder: Which tests, below the distribution's sources.
        plugin: The pytest plugin that puts us between.
        leg: How it connects.
        into: A folder for what the run leaves behind.
        files: Which of them, from the sources on; none: all.
        arguments: More of pytest's.
        only_connected: Leave out what the plugin has not seen to connect.
    """
    written = into / "outcomes.json"
    # Their own `tests` come before ours: both are called that.
    path = [installed.sources, PLUGINS, ROOT, ROOT / "transports", ROOT / "conformance"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "MCP_SESSIONS_LEG": leg,
        # Some start a child process by the name `python`.
        "PATH": os.pathsep.join([str(installed.python.parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    command = [str(installed.python), "-m", "pytest", "-q", "-n", "2", "--tb", "native"]
    command += ["-p", "written_outcomes", "-p", plugin, "--outcomes", str(written)]
    command += ["-o", "log_cli=false", "-o", "addopts=", "-p", "no:cacheprovider", "--color", "no"]
    done = subprocess.run(
        [*command, *arguments, *(files or [folder])],
        cwd=installed.sources,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    # 1: some failed, which the manifest may expect.
    if done.returncode not in (0, 1) or not written.is_file():
        raise AssertionError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
        )
    content = json.loads(written.read_text("utf-8"))
    connected = set(content["connected"])
    return {
        test.removeprefix(f"{folder}/"): Outcome(seen["outcome"], seen["text"])
        for test, seen in content["outcomes"].items()
        if not only_connected or test in connected or seen["outcome"] == "error"
    }
