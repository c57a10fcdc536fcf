"""Plays the vectors against an example server with one violation at a time.

    python -m tests.conformance.violations [--jobs N] [--only VECTOR]... [NAME | CLAUSE]...
    python -m tests.conformance.violations --example javascript [NAME | CLAUSE]...

Each takes a run of the vectors until one fails, and some ten seconds of a core if none does. Prints
which vector caught each, and ends with status 1 if one was missed that ``violations.json``
says is caught. ``--said`` plays that vector alone, some minutes for them all; ``--why`` plays
all and says what each found; ``--write`` writes what was found there. ``--liberties`` plays the
servers that use what is free: nothing may fail.

``--clause`` plays what ``mcp-sessions conformance --only CLAUSE`` plays, with the clause that is
broken, and looks for it in the report's ``broken``. Those of the example in JavaScript are all
played so, with ``--level resume``, since it keeps this level alone.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_sessions_conformance import entry
from mcp_sessions_conformance.loader import load_vectors
from tests.conformance.violations import (
    EXAMPLES,
    JAVASCRIPT,
    PROJECT,
    TYPESCRIPT,
    Catch,
    Example,
    Violation,
    liberties,
    load,
    rewrite,
)
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
    shutil.copytree(TYPESCRIPT.sources, target / "server")
    shutil.copy(PROJECT / "package.json", target)
    (target / "node_modules").symlink_to(PROJECT / "node_modules")
    transpile(node, sorted((target / "server").glob("*.ts")))
    return target


def built(violation: Violation, node: str, home: Path) -> Path:
    target = home / violation.name
    texts = violation.edited()
    if violation.example is JAVASCRIPT:
        shutil.copytree(JAVASCRIPT.sources, target)
        for name, text in texts.items():
            (target / name).write_text(text, "utf-8")
        return target / JAVASCRIPT.program
    shutil.copytree(home / "base", target, symlinks=True)
    for name, text in texts.items():
        (target / "server" / name).write_text(text, "utf-8")
    transpile(node, [target / "server" / name for name in texts])
    return target / "server" / TYPESCRIPT.program


@dataclass(frozen=True)
class Choice:
    """What is played."""

    only: list[str]
    example: Example
    is_whole: bool
    """Whether it goes on behind the first failure."""


async def failed_with(violation: Violation, node: str, home: Path, choice: Choice) -> list[Catch]:
    """The vectors that fail: the first of them, or all."""
    program = await asyncio.to_thread(built, violation, node, home)
    if violation.way == "stdio":
        return await tested([f"stdio:{node} {program} --stdio"], choice, {})
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
        ways = [url] if choice.example is JAVASCRIPT else [url, url.replace("http", "ws", 1)]
        tokens = {"token": "alpha", "other_token": "beta", "weak_token": "weak"}
        return await tested(ways, choice, tokens)
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def tested(ways: list[str], choice: Choice, tokens: dict[str, Any]) -> list[Catch]:
    """Plays the vectors there, until the first one fails or all of them."""
    found: list[entry.Tested] = []
    vectors = load_vectors()
    if not set(choice.only) <= {name for each in vectors for name in (each.id, *each.clauses)}:
        return []  # No vector is about this clause.
    severe = {vector.id for vector in vectors if vector.severity == "failure"}

    def progress(_way: str, _number: int, _of: int, wrong: str) -> None:
        if wrong.partition(":")[0] in severe and not choice.is_whole:
            run.cancel()

    run = asyncio.ensure_future(
        entry.test_server(
            ways,
            only=choice.only,
            level=choice.example.level,
            eras=["handshake"] if choice.example is JAVASCRIPT else [],
            wait=WAIT,
            progress=progress,
            keep=found.append,
            **tokens,
        )
    )
    with contextlib.suppress(asyncio.CancelledError):
        await run
    return failures(found[0])


def failures(tested: entry.Tested) -> list[Catch]:
    """The vectors that failed, in order, each once."""
    found: dict[str, Catch] = {}
    for outcome in tested.document["outcomes"]:
        if outcome["verdict"] == "failure":
            why = f"{outcome['way']}: {outcome['found']}"
            catch = Catch(outcome["vector"], tuple(outcome["broken"]), why)
            found.setdefault(catch.vector, catch)
    return list(found.values())


def best(violation: Violation, catches: list[Catch]) -> Catch | None:
    """The first that blames the clause that is broken, or else the first."""
    named = [catch for catch in catches if violation.clause in catch.blames]
    return next(iter([*named, *catches]), None)


async def play(violations: list[Violation], asked: argparse.Namespace) -> list[Violation]:
    """Play each; those that are missed though one vector is said to catch them."""
    example = EXAMPLES[asked.example]
    is_small = example is JAVASCRIPT
    node = shutil.which("node") if is_small else node_project(PROJECT)
    assert node is not None, "Node.js is not installed"
    room = asyncio.Semaphore(asked.jobs)
    missed: list[Violation] = []
    found: dict[str, Catch | None] = {}
    by_clause = asked.clause or is_small

    async def one(violation: Violation, home: Path) -> None:
        only = [violation.clause] if by_clause else asked.only
        if asked.only:
            only = asked.only
        elif asked.said and violation.caught_by:
            only = [violation.caught_by]
        async with room:
            choice = Choice(only, example, asked.why)
            catches = await failed_with(violation, node, home, choice)
            named = any(violation.clause in catch.blames for catch in catches)
            if by_clause and catches and not named and not asked.why:
                await asyncio.to_thread(shutil.rmtree, home / violation.name)
                choice = Choice(only, example, is_whole=True)
                catches = await failed_with(violation, node, home, choice)
        catch = found[violation.name] = best(violation, catches)
        if catch is None and violation.caught_by is not None:
            missed.append(violation)
        blames = "" if catch is None or not by_clause else f" ({', '.join(catch.blames)})"
        print(f"{violation.name:<8} {catch.vector + blames if catch else 'MISSED'}", flush=True)
        if asked.why:
            for each in catches:
                print(f"    {each.vector}: {each.why[:300]}", flush=True)

    with tempfile.TemporaryDirectory() as home:
        if not is_small:
            base(node, Path(home))
        await asyncio.gather(*(one(violation, Path(home)) for violation in violations))
    if asked.write:
        rewrite(example, found)
    caught = {name: catch for name, catch in found.items() if catch is not None}
    hidden = sum(found[v.name] is None and bool(v.cannot_show) for v in violations)
    print(f"{len(caught)} of {len(found) - hidden} that can show are caught, {hidden} cannot")
    if by_clause:
        clause_of = {violation.name: violation.clause for violation in violations}
        right = sum(clause_of[name] in catch.blames for name, catch in caught.items())
        print(f"the report names the clause of {right} of them")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--example", choices=EXAMPLES, default="typescript")
    parser.add_argument("--clause", action="store_true", help="play --only CLAUSE")
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
        for each in load(EXAMPLES[asked.example])
        if not asked.names or each.name in asked.names or each.clause in asked.names
    ]
    missed = asyncio.run(play(chosen, asked))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
