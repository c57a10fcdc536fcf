"""Plays the vectors against the example server with one violation at a time.

    python -m tests.conformance.violations [--jobs N] [NAME | CLAUSE]...

Each takes a run of all vectors, some ten seconds of a core; without names that is an hour. Prints
which vector caught each, and ends with status 1 if one was missed that ``violations.json``
says is caught.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mcp_sessions_conformance import entry
from tests.conformance.violations import PROJECT, SOURCES, Violation, load
from tests.interop.environments import node_project

TOKENS = {
    "alpha": {"subject": "a", "scopes": ["read", "write"]},
    "weak": {"subject": "a", "scopes": ["read"]},
    "beta": {"subject": "b"},
}
WAIT = 8.0
"""Seconds that an answer may take."""


def built(violation: Violation, node: str, home: Path) -> Path:
    """The server with that violation, transpiled beside the modules it needs."""
    target = home / violation.name
    shutil.copytree(SOURCES, target / "server")
    for name, text in violation.edited().items():
        (target / "server" / name).write_text(text, "utf-8")
    for name in ("package.json", "tsconfig.json"):
        shutil.copy(PROJECT / name, target)
    (target / "node_modules").symlink_to(PROJECT / "node_modules")
    # What it breaks may be no good TypeScript any more; it is built all the same.
    compiler = PROJECT / "node_modules" / "typescript" / "bin" / "tsc"
    subprocess.run(
        [node, compiler, "--noEmitOnError", "false"],
        cwd=target,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    return target / "build" / "server" / "main.js"


async def failed_with(violation: Violation, node: str, home: Path) -> list[str]:
    """The vectors that fail."""
    program = await asyncio.to_thread(built, violation, node, home)
    if violation.way == "stdio":
        return failures(await entry.test_server([f"stdio:{node} {program} --stdio"], wait=WAIT))
    server = await asyncio.create_subprocess_exec(
        node,
        str(program),
        "0",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **violation.environment, "TOKENS": json.dumps(TOKENS)},
    )
    try:
        assert server.stdout is not None
        url = (await asyncio.wait_for(server.stdout.readline(), 20)).decode().strip()
        ways = [url, url.replace("http", "ws", 1)]
        tested = await entry.test_server(
            ways, token="alpha", other_token="beta", weak_token="weak", wait=WAIT
        )
        return failures(tested)
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


def failures(tested: entry.Tested) -> list[str]:
    """The ids of the vectors that failed, in order."""
    failed = [o["vector"] for o in tested.document["outcomes"] if o["verdict"] == "failure"]
    return list(dict.fromkeys(failed))


async def play(violations: list[Violation], jobs: int) -> list[Violation]:
    """Play each; those that are missed though one vector is said to catch them."""
    node = node_project(PROJECT)
    room = asyncio.Semaphore(jobs)
    missed: list[Violation] = []
    caught = 0

    async def one(violation: Violation, home: Path) -> None:
        nonlocal caught
        async with room:
            by = await failed_with(violation, node, home)
        caught += bool(by)
        if not by and violation.caught_by is not None:
            missed.append(violation)
        print(f"{violation.name:<8} {', '.join(by[:4]) or 'MISSED'}", flush=True)

    with tempfile.TemporaryDirectory() as home:
        await asyncio.gather(*(one(violation, Path(home)) for violation in violations))
    print(f"{caught} of {len(violations)} are caught")
    return missed


def main() -> None:
    """Play those that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    chosen = [
        each
        for each in load()
        if not asked.names or each.name in asked.names or each.clause in asked.names
    ]
    missed = asyncio.run(play(chosen, asked.jobs))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
