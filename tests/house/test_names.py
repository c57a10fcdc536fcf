"""Names use the field's words.

A process starts and exits. A request is admitted, runs, completes or fails. A client connects,
disconnects and reconnects. An event is sent and received.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import ROOT

FOLDERS = ("bench", "conformance", "examples", "mcp_sessions", "scripts", "tests", "transports")

HEARSAY = (
    "(?:besides?|elsewhere|told|untold|telling|owe[ds]?|heard|unheard|hears?"
    "|let_in|let_go|at_work|goes_on|went_on|start_over|either_era|(?:is|are|was)_over)"
)
"""Words that no name has."""

VAGUE = "(?:places?|placed|whose|nobodys?|tells?|put)"
"""Words that only the name of a test has, or of a check of a store: it is a sentence."""

NO_NAME = re.compile(f"(?:^|_){HEARSAY}(?:_|$)|^over$")
NO_SHORT_NAME = re.compile(f"(?:^|_){VAGUE}(?:_|$)")
SENTENCE = re.compile(r"(?:[a-z0-9]+_){4,}[a-z0-9]+")

EXCEPTIONS = {
    "put": "a queue and `AsyncKeyValue` have this method",
    "put_nowait": "a queue has this method",
    "put_many": "`AsyncKeyValue` has this method",
    "beside": "the optional tool of a tested server, which the vectors call by this name",
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a file defines or uses, and its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name, line
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, line
            case ast.ClassDef(name=name):
                yield name, line
            case ast.keyword(arg=str(name)):
                yield name, line
            case ast.alias(name=name, asname=other):
                for part in (*name.split("."), other or ""):
                    yield part, line
            case _:
                pass


@cache
def is_banned(name: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    if name in EXCEPTIONS:
        return False
    if NO_NAME.search(words):
        return True
    return not SENTENCE.fullmatch(words) and NO_SHORT_NAME.search(words) is not None


def files() -> list[Path]:
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not {".venv", "node_modules"} & set(path.parts)]


def named_of(file: str, tree: ast.AST) -> Iterator[str]:
    """Yield each function named `of`: its name has to say what it returns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "of":
            yield f"{file}:{node.lineno}"


@cache
def found() -> frozenset[tuple[str, str, int]]:
    """Return each banned name and each exception, with its file and line."""
    return frozenset(
        (name, str(path.relative_to(ROOT)), line)
        for path in files()
        for name, line in [(path.stem, 1), *names(ast.parse(path.read_text("utf-8")))]
        if name in EXCEPTIONS or is_banned(name)
    )


def test_no_name_has_a_word_of_hearsay() -> None:
    wrong = [
        f"{file}:{line}: {name}" for name, file, line in sorted(found()) if name not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_a_functions_name_says_what_it_returns() -> None:
    """`Locks.of(key)` alone is named `of`: its class and its argument say what it returns."""
    wrong = [
        line
        for path in files()
        if path != ROOT / "mcp_sessions/locks.py"
        for line in named_of(str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8")))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_function_named_of_is_found() -> None:
    source = "class A:\n    async def of(self): ...\ndef of_a(): ...\n"
    assert [*named_of("a.py", ast.parse(source))] == ["a.py:2"]


@pytest.mark.parametrize(
    ("name", "banned"),
    [
        ("told", True),
        ("_heard_at", True),
        ("ChildrenElsewhere", True),
        ("is_let_in", True),
        ("is_over", True),
        ("over", True),
        ("place", True),
        ("answer_in_place_of", True),
        ("replace", False),
        ("placeholder", False),
        ("displaced", False),
        ("over_http", False),
        ("taken_over", False),
        ("followed", False),
        ("put", False),
        ("test_a_connection_whose_client_is_gone_is_closed", False),
        ("test_a_connection_whose_client_is_told_is_closed", True),
    ],
)
def test_words_are_known_by_themselves_and_not_by_their_letters(name: str, banned: bool) -> None:
    assert is_banned(name) is banned


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_is_in_use(name: str) -> None:
    assert any(name == each for each, _, _ in found())
