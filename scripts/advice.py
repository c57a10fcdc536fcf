"""Print what a reader may stumble over: long files, vague names, long sentences, silent tests.

These are warnings. The author decides, so the exit status is always 0.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.prose import Prose, docstrings, opening, prose, repeated_names

ROOT = Path(__file__).parents[1]
PRODUCT = ("mcp_sessions", "transports", "conformance")
FOLDERS = (*PRODUCT, "bench", "examples", "scripts", "tests")

LINES = 500
"""A file with more lines may hold a second idea."""

WORDS = 16.0
"""Words a sentence of a page, on average."""

LONG = 5.0
"""Percent of the sentences of a page that have more than 30 words."""

HEADLESS = 3.0
"""Percent of the sentences that open with *who*, *what*, *which*, *where*, *that*, *of*."""

HEARSAY = re.compile(
    "(?:^|_)(?:besides?|elsewhere|told|untold|telling|owe[ds]?|heard|unheard|hears?"
    "|let_in|let_go|at_work|goes_on|went_on|start_over|either_era|(?:is|are|was)_over)(?:_|$)"
)
"""Words in a name that are not words of the field."""

SHOWS = re.compile(r"(?:^|\.)(?:raises|warns|fail|RaisesGroup|check|(?:assert|expect|check)_\w+)$")
"""Calls that show what a test asserts."""


def files(folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each Python file of the folders: its path below the root, and its text."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {".venv", "node_modules"} & set(path.parts):
                yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def pages() -> Iterator[Path]:
    yield from (ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))
    yield ROOT / "conformance/README.md"
    yield from sorted((ROOT / "examples").glob("*/README.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def of_page(found: Prose) -> Iterator[str]:
    if found.words > WORDS:
        yield f"{found.words:.1f} words a sentence, at most {WORDS:g}"
    for share, some, what in (
        (LONG, found.long, "have more than 30 words"),
        (HEADLESS, found.headless, "open without a noun"),
    ):
        if found.share(some) > share:
            yield f"{found.share(some):.0f} % of the sentences {what}, as: {some[0]}"


def of_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
            ):
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
                if HEARSAY.search(words):
                    yield f"{node.lineno}: {name}: use a word of the field"
            case _:
                pass


def of_docstrings(tree: ast.Module) -> Iterator[str]:
    yield from (f"{name}: its docstring repeats its name" for name in repeated_names(tree))
    for each in Prose(tuple(map(opening, docstrings(tree)))).headless:
        yield f"a docstring opens without a noun or a verb: {each}"


def of_tests(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        shown = "Passes if" in (ast.get_docstring(node) or "") or any(
            isinstance(each, ast.Assert)
            or (isinstance(each, ast.Call) and SHOWS.search(ast.unparse(each.func)))
            for each in ast.walk(node)
        )
        if node.name.startswith("test_") and not shown:
            yield f"{node.lineno}: {node.name} shows no assertion"


def advice() -> Iterator[str]:
    for path in pages():
        name = path.relative_to(ROOT).as_posix()
        yield from (f"{name}: {each}" for each in of_page(prose(path.read_text("utf-8"))))
    for file, text in files(FOLDERS):
        tree, lines = ast.parse(text), len(text.splitlines())
        if lines > LINES and file.startswith(PRODUCT):
            yield f"{file}: {lines} lines"
        yield from (f"{file}:{each}" for each in of_names(tree))
        if file.startswith("tests/"):
            yield from (f"{file}:{each}" for each in of_tests(tree))
        elif file.startswith(PRODUCT):
            yield from (f"{file}: {each}" for each in of_docstrings(tree))


def main() -> None:
    argparse.ArgumentParser(prog="python -m scripts.advice", description=__doc__).parse_args()
    found = list(advice())
    print(*found, f"{len(found)} warnings", sep="\n")


if __name__ == "__main__":
    main()
