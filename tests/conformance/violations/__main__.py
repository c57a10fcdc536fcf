"""Plays the vectors against the example server with one violation at a time.

    python -m tests.conformance.violations [--jobs N] [--only VECTOR]... [NAME | CLAUSE]...

Each takes a run of the vectors until one fails, and some ten seconds of a core if none does. Prints
which vector caught each, and ends with status 1 if one was missed that ``violations.json``
says is caught. ``--said`` plays that vector alone, some minutes for them all; ``--why`` plays
all and says what each found; ``--write`` writes what was found there. ``--liberties`` plays the
servers that use what is free: nothing may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mcp_sessions_conformance import entry
from mcp_sessions_conformance.loader import load_vectors
from tests.conformance.violations import PROJECT, SOURCES, Violation, liberties, load, rewrite
from tests.interop.environments import node_project

TOKENS = {
    "alpha": {"subject": "a", "scopes": ["read", "write"]},
    "weak": {"subject": "a", "scopes": ["read"]},
    "beta": {"subject": "b"},
}
WAIT = 4.0
"""Seconds that an answer may take."""


TRANSPILE = """
const [, compiler, ...paths] = process.argv;
const ts = require(compiler), fs = require("fs");
const compilerOptions = { target: "ES2022", module: "ESNext" };
for (const path of paths) {
  const { outputText } = ts.transpileModule(fs.readFileSync(path, "utf8"), { compilerOptions });
  fs.writeFileSync(path.replace(/ts$/, "js"), outputText);
}
"""


def transpile(node: str, paths: list[Path]) -> None:
    """Write the JavaScript next to each file of TypeScript. What a violation breaks may have no
    good types any more: they are not looked at.
    """
    compiler = PROJECT / "node_modules" / "typescript"
    command = [node, "-e", TRANSPILE, "--", str(compiler), *map(str, paths)]
    subprocess.run(command, check=True, timeout=120)


def base(node: str, home: Path) -> Path:
    """The good server, transpiled next to the modules that it needs."""
    target = home / "base"
    shutil.copytree(SOURCES, target / "server")
    shutil.copy(PROJECT / "package.json", target)
    (target / "node_modules").symlink_to(PROJECT / "node_modules")
    transpile(node, sorted((target / "server").glob("*.ts")))
    return target


def built(violation: Violation, node: str, home: Path) -> Path:
    target = home / violation.name
    shutil.copytree(home / "base", target, symlinks=True)
    texts = violation.edited()
    for name, text in texts.items():
        (target / "server" / name).write_text(text, "utf-8")
    transpile(node, [target / "server" / name for name in texts])
    return target / "server" / "main.js"


async def failed_with(
    violation: Violation, node: str, home: Path, asked: argparse.Namespace, only: list[str]
) -> dict[str, str]:
    """The vectors that fail, and why: the first of them, or all."""
    program = await asyncio.to_thread(built, violation, node, home)
    if violation.way == "stdio":
        return await tested([f"stdio:{node} {program} --stdio"], asked, only, {})
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
        tokens = {"token": "alpha", "other_token": "beta", "weak_token": "weak"}
        return await tested(ways, asked, only, tokens)
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def tested(
    ways: list[str], asked: argparse.Namespace, only: list[str], tokens: dict[str, Any]
) -> dict[str, str]:
    """Plays the vectors there, unless asked until the first one fails."""
    found: list[entry.Tested] = []
    severe = {vector.id for vector in load_vectors() if vector.severity == "failure"}

    def progress(_way: str, _number: int, _of: int, wrong: str) -> None:
        if wrong.partition(":")[0] in severe and not asked.why:
            run.cancel()

    run = asyncio.ensure_future(
        entry.test_server(
            ways, only=only, wait=WAIT, progress=progress, keep=found.append, **tokens
        )
    )
    with contextlib.suppress(asyncio.CancelledError):
        await run
    return failures(found[0])


def failures(tested: entry.Tested) -> dict[str, str]:
    """The ids of the vectors that failed, in order, with the first reason."""
    found: dict[str, str] = {}
    for outcome in tested.document["outcomes"]:
        if outcome["verdict"] == "failure":
            found.setdefault(outcome["vector"], f"{outcome['way']}: {outcome['found']}")
    return found


async def play(violations: list[Violation], asked: argparse.Namespace) -> list[Violation]:
    """Play each; those that are missed though one vector is said to catch them."""
    node = node_project(PROJECT)
    room = asyncio.Semaphore(asked.jobs)
    missed: list[Violation] = []
    found: dict[str, str | None] = {}

    async def one(violation: Violation, home: Path) -> None:
        async with room:
            only = [violation.caught_by] if asked.said and violation.caught_by else asked.only
            by = await failed_with(violation, node, home, asked, only)
        found[violation.name] = next(iter(by), None)
        if not by and violation.caught_by is not None:
            missed.append(violation)
        print(f"{violation.name:<8} {', '.join(list(by)[:4]) or 'MISSED'}", flush=True)
        if asked.why:
            for vector, sentence in by.items():
                print(f"    {vector}: {sentence[:300]}", flush=True)

    with tempfile.TemporaryDirectory() as home:
        base(node, Path(home))
        await asyncio.gather(*(one(violation, Path(home)) for violation in violations))
    if asked.write:
        rewrite(found)
    caught = sum(by is not None for by in found.values())
    hidden = sum(found[v.name] is None and bool(v.cannot_show) for v in violations)
    print(f"{caught} of {len(found) - hidden} that can show are caught, {hidden} cannot")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="a vector or clause to play")
    parser.add_argument("--said", action="store_true", help="play what is said to catch each")
    parser.add_argument("--why", action="store_true", help="say what each vector found")
    parser.add_argument("--write", action="store_true", help="write what caught each")
    parser.add_argument(
        "--liberties", action="store_true", help="servers that use what is free: none may fail"
    )
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    if asked.liberties:
        asked.why = True
        free = [each for each in liberties() if not asked.names or each.name in asked.names]
        asyncio.run(play(free, asked))
        return
    chosen = [
        each
        for each in load()
        if not asked.names or each.name in asked.names or each.clause in asked.names
    ]
    missed = asyncio.run(play(chosen, asked))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
