"""Each place at which we use something private of another package is in ``seams.toml``.

With a new release of that package the name may be gone, or mean something else.
"""

import ast
import importlib
import tomllib
from typing import Any, NotRequired, TypedDict, cast

import pytest

from tests.house.seams import names_of, seams
from tests.house.source import ROOT


class Entry(TypedDict):
    file: str
    of: str
    """A class or a module of the other package."""

    names: list[str]
    why: NotRequired[str]
    test: str


ENTRIES = cast(
    "list[Entry]", tomllib.loads((ROOT / "tests/house/seams.toml").read_text("utf-8"))["seam"]
)
NAMED = [(entry, name) for entry in ENTRIES for name in entry["names"]]


def object_at(path: str) -> Any:
    """A module, or what is in one."""
    module, _, inside = path, "", ""
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            inside = f"{last}.{inside}".rstrip(".")
            assert module, f"there is no {path}"
    for name in filter(None, inside.split(".")):
        found = getattr(found, name)
    return found


def is_there(of: str, name: str) -> bool:
    owner = object_at(of)
    if not isinstance(owner, type):
        return hasattr(owner, name)
    kinds = cast("type[Any]", owner).__mro__
    return any(name in vars(each) or name in names_of(each) for each in kinds)


def test_each_seam_is_where_we_use_it() -> None:
    assert [(e["of"], name) for e, name in NAMED if not is_there(e["of"], name)] == []


@pytest.mark.timeout(240)
def test_the_list_is_complete() -> None:
    """And nothing is in it that no code of ours uses any more."""
    listed = {(entry["file"], name) for entry, name in NAMED}
    found = {(file, name.rpartition(".")[2]) for file, name in seams()}

    assert found - listed == set()
    assert {(e["file"], n) for e, n in NAMED if "why" not in e} - found == set()


def functions_of(file: str) -> set[str]:
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_a_test_would_notice_its_move() -> None:
    for test in {entry["test"] for entry in ENTRIES}:
        file, _, name = test.partition("::")
        assert name in functions_of(file), test
