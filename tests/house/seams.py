"""The places at which our code names something private of another package.

`python -m tests.house.seams` prints them for `seams.toml`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from textwrap import dedent
from typing import Any, NamedTuple

from tests.house.source import PACKAGES, Module, modules

INTERNALS = ("uvicorn", "websockets")
"""Packages whose classes we derive from, and of which every name that we use there counts."""

OURS_THOUGH_PRIVATE = {("mcp_sessions/testing/memory_client.py", "_assembly")}
"""A private name of ours that another file of ours uses."""

_PUBLIC = {"_replace", "_asdict", "_fields"}
"""Of a named tuple: documented."""

_ACCESS = {"getattr", "setattr", "hasattr", "delattr"}


class Seam(NamedTuple):
    file: str
    """Below the root of a checkout."""

    name: str
    """The name in the other package: as it is imported, of a class that we derive from, or alone
    if the syntax does not tell whose it is.
    """


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_internal(path: str) -> bool:
    return path.partition(".")[0] in INTERNALS


def is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in PACKAGES and top not in sys.stdlib_module_names


def imported(module: Module) -> Iterator[Seam]:
    for node in module.nodes:
        match node:
            case ast.ImportFrom(module=str(source), names=names) if is_foreign(source):
                for alias in names:
                    if any(map(is_private, [*source.split("."), alias.name])):
                        yield Seam(module.file, f"{source}.{alias.name}")
            case ast.Import(names=names):
                for alias in names:
                    if is_foreign(alias.name) and any(map(is_private, alias.name.split("."))):
                        yield Seam(module.file, alias.name)
            case _:
                pass


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that a class or a module makes: functions, classes, attributes."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name), simple=1):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    return found


def used(module: Module) -> Iterator[Seam]:
    """Private names of an object that is neither the own one nor of a class in the same file."""
    ours = defined(module.nodes)
    lines = module.path.read_text("utf-8").splitlines()
    for node in module.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Name(id=owner)) if owner in sys.stdlib_module_names:
                continue
            case ast.Attribute(attr=name, lineno=line):
                pass
            case ast.Call(
                func=ast.Name(id=access), args=[_, ast.Constant(value=str(name)), *_], lineno=line
            ) if access in _ACCESS:
                pass
            case _:
                continue
        is_marked = "reportPrivateUsage" in lines[line - 1]
        if is_private(name) and name not in _PUBLIC and (is_marked or name not in ours):
            seam = Seam(module.file, name)
            if seam not in OURS_THOUGH_PRIVATE:
                yield seam


@cache
def names_of(kind: type[Any]) -> set[str]:
    """The names that a class makes itself, and those that its instances have."""
    try:
        return defined(_walked(kind))
    except (OSError, TypeError, SyntaxError):
        return set(vars(kind))


def derived(module: Module) -> Iterator[Seam]:
    """Names of another package's class in a class of ours that derives from it."""
    if not any(isinstance(node, ast.ClassDef) and node.bases for node in module.nodes):
        return
    for kind in vars(importlib.import_module(module.name)).values():
        if not isinstance(kind, type) or kind.__module__ != module.name:
            continue
        own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] in PACKAGES]
        foreign = [each for each in kind.__mro__ if is_foreign(each.__module__)]
        if not foreign:
            continue
        ours: set[str] = set()
        for node in [node for each in own for node in _walked(each)]:
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    ours.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    ours.add(name)
                case _:
                    pass
        for other in foreign:
            for name in sorted(ours & names_of(other)):
                if is_private(name) or (is_internal(other.__module__) and name[:2] != "__"):
                    yield Seam(module.file, f"{other.__module__}.{other.__qualname__}.{name}")


@cache
def _walked(kind: type[Any]) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(dedent(inspect.getsource(kind)))))


@cache
def seams() -> frozenset[Seam]:
    every = modules().values()
    found = {seam for module in every for seam in imported(module)}
    found |= {seam for module in every for seam in used(module)}
    return frozenset(found).union(seam for module in every for seam in derived(module))


if __name__ == "__main__":
    sys.stdout.writelines(f"{file}: {name}\n" for file, name in sorted(seams()))
