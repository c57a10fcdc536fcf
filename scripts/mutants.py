"""Change our own code in one place, run its tests, and count the changes that no test notices.

    scripts/mutate core --sample 300 --seed 1

A *mutant* is a module with one change: another comparison, another number, a statement left out.
Each runs in a process that is forked from one that has imported what takes long, and that has
imported nothing of ours. No file is written. The tests of a mutant are, in this order until one
fails: those at the mirrored path, those that import the module, those of the mirrored folder, and
the contract of stores for a module of one.
Annotations, decorators, docstrings, assertions and texts with a space are left as they are.
"""

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

ROOT: Final = Path(__file__).parents[1]

FOLDERS: Final = {
    "core": "mcp_sessions/core",
    "stores": "mcp_sessions/stores",
    "server": "mcp_sessions/server",
}

IMPORTED_FIRST: Final = (
    "pytest", "hypothesis", "hypothesis.stateful", "mcp.server", "mcp.client.session",
    "starlette.applications", "uvicorn", "httpx2", "websockets.asyncio.client", "redis.asyncio",
    "unittest.mock",
)  # fmt: skip

_CONTRACT: Final = ROOT / "tests" / "stores" / "test_contract.py"

_PASSED, _NONE_RUN = 0, 5
"""Exit statuses of pytest. All tests of a file may be long ones, which do not run here."""

_OTHER: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


class Mutation(ast.NodeTransformer):
    """Count the places of a module; change the one that is wanted."""

    def __init__(self, wanted: int = -1) -> None:
        self.count = 0
        self.made = ""
        self._wanted = wanted

    def _is_here(self, node: ast.AST, what: str) -> bool:
        is_here = self.count == self._wanted
        self.count += 1
        if is_here:
            self.made = f"{getattr(node, 'lineno', 0)}: {what}"
        return is_here

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node
        changed = self._changed(node)
        if changed is not None:
            return changed
        if isinstance(node, ast.AnnAssign):
            # What follows the name is for readers.
            if node.value is not None:
                node.value = self.visit(node.value)
            return node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._visit_all(node.args.defaults)
            self._visit_all(node.args.kw_defaults)
            self._visit_all(node.body)
            return node
        if isinstance(node, ast.ClassDef):
            self._visit_all(node.body)
            return node
        return self.generic_visit(node)

    def _visit_all(self, nodes: list[Any]) -> None:
        nodes[:] = [self.visit(node) if node is not None else None for node in nodes]

    def _changed(self, node: ast.AST) -> ast.AST | None:
        """The node that stands there instead, or None: this one stays."""
        match node:
            case ast.Compare(ops=[first, *more]) if type(first) in _OTHER:
                if self._is_here(node, f"another {type(first).__name__}"):
                    node.ops = [cast(Any, _OTHER[type(first)]()), *more]
                    return node
            case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _OTHER:
                if self._is_here(node, f"another {type(op).__name__}"):
                    node.op = cast(Any, _OTHER[type(op)]())
                    return node
            case ast.UnaryOp(op=ast.Not()):
                if self._is_here(node, "no not"):
                    return node.operand
            case ast.Constant(value=bool() as value):
                if self._is_here(node, f"not {value}"):
                    return ast.copy_location(ast.Constant(not value), node)
            case ast.Constant(value=int() | float() as value):
                if self._is_here(node, f"{value} + 1"):
                    return ast.copy_location(ast.Constant(value + 1), node)
            case ast.Constant(value=str() as value) if value and " " not in value:
                if self._is_here(node, f"another {value!r}"):
                    return ast.copy_location(ast.Constant(f"x{value}"), node)
            case ast.If() | ast.IfExp() | ast.While():
                if self._is_here(node, "the opposite condition"):
                    opposite = ast.UnaryOp(ast.Not(), node.test)
                    node.test = ast.copy_location(opposite, node.test)
                    return ast.fix_missing_locations(node)
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                if self._is_here(node, "return None"):
                    node.value = ast.copy_location(ast.Constant(None), value)
                    return node
            case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue():
                if self._is_here(node, f"no {type(node).__name__}"):
                    return ast.copy_location(ast.Pass(), node)
            case _:
                pass
        return None


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


@dataclass(frozen=True)
class Mutant:
    path: Path
    number: int
    """-1: the module as it is."""

    def tree(self) -> tuple[ast.Module, str]:
        """The changed module, and what was changed."""
        mutation = Mutation(self.number)
        tree = mutation.visit(_parsed(self.path))
        return ast.fix_missing_locations(tree), mutation.made


_trees: dict[Path, ast.Module] = {}


def _parsed(path: Path) -> ast.Module:
    if path not in _trees:
        _trees[path] = ast.parse(path.read_text())
    return copy.deepcopy(_trees[path])


def mutants_of(path: Path) -> list[Mutant]:
    mutation = Mutation()
    mutation.visit(_parsed(path))
    return [Mutant(path, number) for number in range(mutation.count)]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def tests_of(path: Path) -> list[list[str]]:
    """The files of tests, the nearest first."""
    relative = path.relative_to(ROOT / "mcp_sessions")
    folder = ROOT / "tests" / relative.parent
    mirrored = folder / f"test_{relative.stem}.py"
    name = module_name(path)
    package, _, stem = name.rpartition(".")
    phrases = (f"{name} import", f"import {name}\n", f"from {package} import {stem}\n")
    importing = [
        file
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if file != mirrored and any(phrase in file.read_text() for phrase in phrases)
    ]
    rest = [f for f in sorted(folder.glob("test_*.py")) if f != mirrored and f not in importing]
    seen = {mirrored, *importing, *rest}
    # What every store is, is tested once, over all of them.
    is_of_a_store = relative.parts[0] == "stores" and _CONTRACT not in seen
    contract = [_CONTRACT] if is_of_a_store else []
    tiers = ([mirrored] if mirrored.exists() else [], importing, rest, contract)
    return [[str(file.relative_to(ROOT)) for file in tier] for tier in tiers if tier]


# --- a mutant in its process ----------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module in its changed form."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = module_name(mutant.path)
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._mutant.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        tree, _ = self._mutant.tree()
        exec(compile(tree, str(self._mutant.path), "exec"), module.__dict__)


def _run(mutant: Mutant, tests: list[str]) -> int:
    """Run tests in this process, which is a fork; the exit status of pytest."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    sys.meta_path.insert(0, _Finder(mutant))
    sys.path[:0] = [str(ROOT), str(ROOT / "transports"), str(ROOT / "conformance")]
    import pytest

    options = ["-q", "-x", "-m", "not full", "-p", "no:cacheprovider", "--tb=no"]
    # What was imported first is known to the parent on purpose.
    options += ["-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *tests]))


def passes(mutant: Mutant, tests: list[str], within: float) -> bool:
    """Whether all of these tests pass in time."""
    pid = os.fork()
    if not pid:
        status = 3
        try:
            status = _run(mutant, tests)
        finally:
            os._exit(status)
    end = os.pidfd_open(pid)
    try:
        if not select.select([end], [], [], within)[0]:
            return False
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (_PASSED, _NONE_RUN)
    finally:
        os.close(end)
        _kill_group(pid)


def _kill_group(pid: int) -> None:
    """The process and what its tests left."""
    try:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        # It has ended, and left nothing.
        return


# --- all of them ----------------------------------------------------------------------------------


class Judge:
    """Tells whether a test notices a mutant."""

    def __init__(self) -> None:
        self._within: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def notices(self, mutant: Mutant) -> bool:
        return any(
            not passes(mutant, tests, self._seconds(mutant.path, tests))
            for tests in tests_of(mutant.path)
        )

    def _seconds(self, path: Path, tests: list[str]) -> float:
        """How long they may take. They pass on the code as it is."""
        with self._lock:
            if tuple(tests) not in self._within:
                began = time.monotonic()
                if not passes(Mutant(path, -1), tests, 600):
                    raise AssertionError(f"fails without a change: {' '.join(tests)}")
                self._within[tuple(tests)] = 20 + 4 * (time.monotonic() - began)
            return self._within[tuple(tests)]


def _possible(options: argparse.Namespace) -> list[Mutant]:
    folder = ROOT / FOLDERS[options.folder]
    return [
        mutant
        for path in sorted(folder.rglob("*.py"))
        if options.only is None or path.stem == options.only
        for mutant in mutants_of(path)
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("scripts/mutate", description=__doc__)
    parser.add_argument("folder", choices=FOLDERS, nargs="?", default="core")
    parser.add_argument("--sample", type=int, help="how many mutants (all)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--only", help="the mutants of one module, by its name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, help="write the counts and the survivors there")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    began = time.monotonic()
    mutants = possible = _possible(options)
    if options.sample is not None and options.sample < len(possible):
        mutants = random.Random(options.seed).sample(possible, options.sample)
    judge = Judge()
    noticed: Counter[Path] = Counter()
    survivors: list[str] = []
    # Each thread waits for the process of one mutant.
    with ThreadPoolExecutor(options.jobs) as threads:
        outcomes = threads.map(judge.notices, mutants)
        for mutant, is_noticed in zip(mutants, outcomes, strict=True):
            if is_noticed:
                noticed[mutant.path] += 1
            else:
                survivors.append(f"{mutant.path.relative_to(ROOT)}:{mutant.tree()[1]}")
                print(f"survived: {survivors[-1]}", flush=True)
    share = noticed.total() / max(1, len(mutants))
    seconds = time.monotonic() - began
    print(f"{noticed.total()} of {len(mutants)} mutants noticed, {share:.1%}, {seconds:.0f} s")
    if options.json is not None:
        counts = {"folder": options.folder, "seed": options.seed, "possible": len(possible)}
        result = {
            **counts,
            "mutants": len(mutants),
            "noticed": noticed.total(),
            "survivors": sorted(survivors),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
