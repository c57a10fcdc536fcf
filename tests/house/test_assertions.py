"""Every test shows what it asserts.

By ``assert``, by what pytest offers for failures, or by a helper whose name begins with
``assert_``, ``expect_`` or ``check_`` (or is ``check``: one of a contract). A test of which nothing
but its end is asked says so in its docstring: "Passes if …".
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_PYTEST = {"raises", "warns", "fail", "deprecated_call", "RaisesGroup", "RaisesExc"}
PREFIXES = ("assert_", "expect_", "check_")
REASON = "Passes if"


def asserts(test: ast.AST) -> bool:
    """Whether ``test`` shows what it asserts, or says that there is nothing."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in OF_PYTEST or name == "check" or name.startswith(PREFIXES):
                return True
    is_test = isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_test and REASON in (ast.get_docstring(test) or "")


def silent(text: str) -> Iterator[str]:
    """The tests in the source ``text`` that show no assertion."""
    for node in ast.walk(ast.parse(text)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_") and not asserts(node):
            yield node.name


def test_every_test_shows_what_it_asserts() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in silent(path.read_text("utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("body", "is_silent"),
    [
        ("serve()", True),
        ('"""A rule."""\n    serve()', True),
        ("def inner() -> None:\n        serve()\n    inner()", True),
        ("with suppress(ValueError):\n        serve()", True),
        ("assert serve()", False),
        ("with pytest.raises(ValueError):\n        serve()", False),
        ("run(expect_served)\n    await expect_served()", False),
        ('"""Passes if nothing is raised."""\n    serve()', False),
    ],
)
def test_a_test_that_asserts_nothing_is_seen(body: str, is_silent: bool) -> None:
    text = f"async def test_of_something() -> None:\n    {body}\n"
    assert list(silent(text)) == (["test_of_something"] if is_silent else [])
