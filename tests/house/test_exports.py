"""The public names: one list, written three times for three readers, and equal."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import mcp_sessions

ROOT = Path(__file__).parents[2]


def names_for_type_checkers() -> dict[str, str]:
    """Name → module, as imported under TYPE_CHECKING in ``mcp_sessions/__init__.py``."""
    [block] = [
        node
        for node in ast.parse(Path(mcp_sessions.__file__).read_text()).body
        if isinstance(node, ast.If)
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_the_lists_for_type_checkers_for_run_time_and_for_readers_are_equal() -> None:
    assert vars(mcp_sessions)["_DEFINED_IN"] == names_for_type_checkers()
    assert mcp_sessions.__all__ == sorted(names_for_type_checkers())


@pytest.mark.parametrize("name", mcp_sessions.__all__)
def test_a_public_name_is_what_its_module_defines(name: str) -> None:
    module = importlib.import_module(names_for_type_checkers()[name])

    value = getattr(mcp_sessions, name)

    assert value is getattr(module, name)
    assert value.__module__ == module.__name__, "exported from where it is defined"


def test_the_reference_has_every_public_name_as_it_is_imported() -> None:
    """And with it, its arguments, types and defaults: autodoc reads them."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^\.\. auto\w+:: mcp_sessions\.(\w+)(?:\(\))?$", pages, re.M)

    assert sorted({*named} - {"errors"}) == mcp_sessions.__all__


def test_public_names_can_be_completed_in_a_shell() -> None:
    assert set(mcp_sessions.__all__) <= set(dir(mcp_sessions))


def test_an_unknown_name_is_an_attribute_error_and_an_import_error() -> None:
    assert not hasattr(mcp_sessions, "Sesion")
    with pytest.raises(ImportError):
        exec("from mcp_sessions import Sesion", {})


def test_the_version_is_the_newest_one_of_the_changelog() -> None:
    newest = re.search(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)

    assert newest is not None
    assert newest.group(1) == mcp_sessions.__version__
