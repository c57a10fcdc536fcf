"""How the packages are built: no circles of imports, no packages that import each other,
nobody finishes another object, short files, each with a name of its own, as each class has.

Exceptions from a rule are listed here by name. A list only shrinks: an entry that is no longer
needed fails.
"""

import ast
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.assigned import assigned_from_outside
from tests.house.source import PACKAGES, ROOT, Module, modules

KNOWN_CIRCLES: set[tuple[str, str]] = set()
"""Imports (importer, imported) that close a circle and are still to be taken out."""

KNOWN_ASSIGNED: set[str] = set()
"""Attributes that are assigned from outside, and still to be replaced by an argument of their
object's constructor, or by a method of its own.
"""

FOREIGN = {
    "logger.propagate": "a logger has no other way",
    "logger.disabled": "a logger has no other way",
    "sys.excepthook": "where Python asks for it",
    "threading.excepthook": "where Python asks for it",
    "sys.unraisablehook": "where Python asks for it",
    "sys.stdin": "while a script is imported that is not to run",
    "uvicorn.Server.serve": "while a script is imported that is not to run",
    "http_server[0].should_exit": "how uvicorn is stopped",
    "inner.router.default": "Starlette's constructor takes no answer to other paths",
    "rest.router.default": "Starlette's constructor takes no answer to other paths",
    "connection.client_capabilities": "the SDK's connection, which learns it from initialize only",
    "connection.client_params": "the SDK's connection, which learns it from initialize only",
    "connection.outbound": "the SDK's connection, which has one that its transport made",
    "connection.session_id": "the SDK's connection, which has its transport's",
    "self._connection.session_id": "the SDK's connection, which has its transport's",
    "holder.session_manager": "the SDK's application of a server, which is served by the layer",
    "route.methods": "the SDK's route",
    "verifier._http_client": "FastMCP's verifier, whose provider passes no client on",
    "route.app": "a Starlette route, into whose application the middleware goes",
    "setattr(inner.state)": "the state of Starlette's application, copied",
}
"""Targets that belong to other libraries, which offer no other way → what they are."""

MAX_LINES = 500
FEW_LINES = 400
"""The bound for 95 of 100 files."""

KNOWN_LONG: set[str] = set()
"""Files of more than `MAX_LINES` that are still to be divided."""


# --- circles ------------------------------------------------------------------------------


def imports(module: Module, known: dict[str, Module]) -> set[str]:
    """The modules of ours that ``module`` names in any import: at the top, under
    ``TYPE_CHECKING``, or inside a function.
    """
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.file}:{node.lineno}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside
            if not inside <= known.keys():
                found.add(node.module or "")
    return found & known.keys()


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What ``start`` imports, and what that imports, and so on."""
    seen: set[str] = set()
    left = [*graph[start]]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    return seen


def circular(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Every import that is part of a circle."""
    reach = {name: reachable(graph, name) for name in graph}
    return {(name, to) for name, all_to in graph.items() for to in all_to if name in reach[to]}


def expect_no_circles(root: Path, known: set[tuple[str, str]] = KNOWN_CIRCLES) -> None:
    """Fail with every import that closes a circle and is not known."""
    found = modules(root)
    graph = {name: imports(module, found) for name, module in found.items()}
    without = {
        name: {to for to in all_to if (name, to) not in known} for name, all_to in graph.items()
    }
    assert circular(without) == set(), "these imports are in a circle"
    assert known - circular(graph) == set(), "take what is in no circle any more off the list"


def test_no_module_imports_itself_through_others() -> None:
    """Imports for types alone and those inside functions count: a reader follows them all."""
    expect_no_circles(ROOT)


def test_a_circle_is_seen_and_so_is_an_entry_that_is_stale(copy: Path) -> None:
    spoil(
        copy / "mcp_sessions/errors.py",
        "from typing import TYPE_CHECKING",
        "if TYPE_CHECKING:",
        "    from mcp_sessions.stores import contract",
    )
    with pytest.raises(AssertionError, match="these imports are in a circle"):
        expect_no_circles(copy)
    with pytest.raises(AssertionError, match="off the list"):
        expect_no_circles(ROOT, KNOWN_CIRCLES | {("mcp_sessions.ids", "mcp_sessions.errors")})


# --- both ways ----------------------------------------------------------------------------


def both_ways(root: Path) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Each pair in one package, of packages or modules, that imports each other → the imports."""
    found = modules(root)
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, module in found.items():
        for to in imports(module, found):
            one, other = name.split("."), to.split(".")
            same = len(os.path.commonprefix([one, other]))
            if 0 < same < min(len(one), len(other)):
                pair = ".".join(one[: same + 1]), ".".join(other[: same + 1])
                pairs.setdefault(pair, []).append((name, to))
    return {pair: each for pair, each in pairs.items() if pair[::-1] in pairs}


def test_no_two_packages_import_each_other() -> None:
    """Of two neighbours in one package, one can be read without the other."""
    assert both_ways(ROOT) == {}


def test_two_packages_that_import_each_other_are_seen(copy: Path) -> None:
    spoil(
        copy / "mcp_sessions/server/upstream/asks.py",
        "from mcp_sessions.server.cluster import codec",
    )
    packages = {"mcp_sessions.server.upstream", "mcp_sessions.server.cluster"}
    assert {frozenset(pair) for pair in both_ways(copy)} == {frozenset(packages)}


# --- who assigns --------------------------------------------------------------------------


def attribute(target: str) -> str:
    """The last name of what is assigned."""
    return target.rpartition(".")[2]


@cache
def assigned_here() -> list[tuple[str, str]]:
    return list(assigned_from_outside(modules()))


def expect_none_assigned(known: set[str] = KNOWN_ASSIGNED) -> None:
    """Fail with every assignment that finishes the object of another and is not known."""
    found = assigned_here()
    left = [(where, target) for where, target in found if target not in FOREIGN]
    unknown = [f"{where}: {target}" for where, target in left if attribute(target) not in known]
    assert unknown == [], "hand it to the constructor, or let the object change itself"
    stale = known - {attribute(target) for _, target in left}
    stale |= FOREIGN.keys() - {target for _, target in found}
    assert stale == set(), "take what nobody assigns any more off the list"


def test_no_object_is_finished_by_another_one() -> None:
    """What an object needs stands in its constructor."""
    expect_none_assigned()


SPOILT = """
from dataclasses import dataclass
from collections.abc import Callable

class Spoilt:
    def __init__(self) -> None:
        self.peculiar = 0

@dataclass
class Row:
    number: int = 0
    called: Callable[[], None] | None = None

def change(row: Row, spoilt: Spoilt) -> None:
    {line}
"""


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("spoilt.peculiar = 1", True),
        ("row.called = print", True),
        ("setattr(spoilt, 'peculiar', 1)", True),
        ("row.number = 1", False),
    ],
)
def test_an_assignment_from_outside_is_seen_unless_it_is_to_a_record(
    tmp_path: Path, line: str, is_seen: bool
) -> None:
    (tmp_path / "mcp_sessions").mkdir()
    (tmp_path / "mcp_sessions/spoilt.py").write_text(SPOILT.format(line=line))

    found = [where for where, _ in assigned_from_outside(modules(tmp_path))]

    assert found == (["mcp_sessions/spoilt.py:15"] if is_seen else [])


def test_an_assignment_that_is_gone_is_taken_off_the_list() -> None:
    with pytest.raises(AssertionError, match="off the list"):
        expect_none_assigned(KNOWN_ASSIGNED | {"assigned_by_nobody"})


# --- how long -----------------------------------------------------------------------------


def expect_short(root: Path, known: set[str] = KNOWN_LONG) -> None:
    """Fail with every file that is too long and not known, and where too many are long."""
    lines = {module.file: module.lines for module in modules(root).values()}
    longer = {file for file, count in lines.items() if count > MAX_LINES}
    assert longer - known == set(), "divide it"
    assert known - longer == set(), "take what is short by now off the list"
    too_long = {file: n for file, n in lines.items() if n > FEW_LINES}
    assert len(too_long) * 20 <= len(lines), f"too many long: {too_long}"


def test_a_file_can_be_read_in_one_sitting() -> None:
    expect_short(ROOT)


def test_a_file_that_grows_is_seen_and_so_is_one_that_is_short_by_now(copy: Path) -> None:
    (copy / "mcp_sessions/spoilt.py").write_text("\n" * (MAX_LINES + 1))
    with pytest.raises(AssertionError, match="divide it"):
        expect_short(copy)
    (copy / "mcp_sessions/spoilt.py").unlink()
    with pytest.raises(AssertionError, match="off the list"):
        expect_short(copy, KNOWN_LONG | {"mcp_sessions/ids.py"})
    for number in range(30):
        (copy / f"mcp_sessions/spoilt{number}.py").write_text("\n" * (FEW_LINES + 1))
    with pytest.raises(AssertionError, match="too many long"):
        expect_short(copy)


# --- names --------------------------------------------------------------------------------


def expect_names_used_once(root: Path) -> None:
    """Fail with every name that two files of one package have."""
    files: dict[tuple[str, str], list[str]] = {}
    for module in modules(root).values():
        if not module.path.name.startswith("__"):
            package = module.name.partition(".")[0]
            files.setdefault((package, module.path.name), []).append(module.file)
    assert [found for found in files.values() if len(found) > 1] == [], "rename one of them"


def test_a_name_of_a_file_is_used_once_in_its_package() -> None:
    """A reader who searches for a file by its name finds one."""
    expect_names_used_once(ROOT)


def test_a_name_that_is_used_twice_is_seen(copy: Path) -> None:
    (copy / "mcp_sessions/acp/ids.py").touch()
    with pytest.raises(AssertionError, match="rename one"):
        expect_names_used_once(copy)


def meanings(module: Module) -> Iterator[tuple[str, str]]:
    """Each public class or alias of a module: its name, and its file or, of an alias, its value.

    A type variable has its meaning in its own signature.
    """
    for node in module.tree.body:
        match node:
            case ast.ClassDef(name=name):
                yield name, module.file
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                is_alias = name[0].isupper() and not name.isupper()
                if is_alias and not ast.unparse(value).startswith("TypeVar("):
                    yield name, ast.unparse(value)
            case _:
                pass


def expect_one_meaning(root: Path) -> None:
    """Fail with every name of a class or alias that has two meanings in the product.

    Other definitions do not count: private ones, and those of ACP agents, whose protocol has its
    own sessions, calls and connections.
    """
    found: dict[str, set[str]] = {}
    for module in modules(root).values():
        if not module.name.startswith(("mcp_sessions_conformance", "mcp_sessions.acp.")):
            for name, meaning in meanings(module):
                if not name.startswith("_"):
                    found.setdefault(name, set()).add(meaning)
    twice = {name: each for name, each in found.items() if len(each) > 1}
    assert twice == {}, "rename one of them"


def test_a_class_or_alias_has_a_name_of_its_own() -> None:
    """A reader who knows one `Message` knows each."""
    expect_one_meaning(ROOT)


def test_a_class_or_alias_with_a_name_that_is_used_is_seen(copy: Path) -> None:
    spoil(copy / "mcp_sessions/ids.py", "Json = dict[str, Any]", "class _Own: ...")
    spoil(copy / "mcp_sessions/locks.py", "class _Own: ...")
    expect_one_meaning(copy)
    spoil(copy / "mcp_sessions/ids.py", "Json = dict[str, str]")
    with pytest.raises(AssertionError, match="rename one"):
        expect_one_meaning(copy)


# --- a copy -------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in PACKAGES.values():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def spoil(file: Path, *lines: str) -> None:
    file.write_text("\n".join([file.read_text("utf-8"), *lines, ""]))
