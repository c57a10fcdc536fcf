"""The files where a reader begins, by ``CONTRIBUTING.md``, have the names that it names.

Its table "The file to open first" answers what a newcomer asks. Each answer begins with one
entry, a file and a name in it; a name that follows a file in parentheses is of that file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT

PAGE = ROOT / "CONTRIBUTING.md"

QUESTIONS = (
    "where is a resume decided",
    "what happens to an event when nobody is attached",
    "what a replica tells another",
    "where to add a transport",
    "where to add a store",
    "how to change expiry",
    "how to coalesce a notification",
    "how to find a host's key of a conversation",
    "how to add a metric",
    "how to add an option of the command",
    "how to serve an MCP method that names something",
)

_FILE = re.compile(r"`((?:mcp_sessions|transports|tests)/[\w/.]+\.(?:py|lua))`")
_NAME = re.compile(r"`(\w+(?:\.\w+)?)`")


def rows(page: str) -> dict[str, tuple[str, str]]:
    """Question → the entry, and what follows from there."""
    table = page.partition("\n| question | entry | from there |\n|---|---|---|\n")[2]
    found: dict[str, tuple[str, str]] = {}
    for line in table.partition("\n\n")[0].splitlines():
        question, entry, rest = (cell.strip() for cell in line.strip("|").split("|"))
        found[question] = (entry, rest)
    return found


def named(text: str) -> Iterator[tuple[str, str]]:
    """(file, a name that the text says is in it), for each name in parentheses behind a file."""
    parts = _FILE.split(text)
    for file, said in zip(parts[1::2], parts[2::2], strict=True):
        for inside in re.findall(r"\(([^()]*`[^()]*)\)", said):
            for name in _NAME.findall(inside):
                yield file, name
        # "core/coalescing_key.py, `coalescing_key`": the same, where parentheses are around both.
        if (also := re.match(r", `(\w+(?:\.\w+)?)`", said)) is not None:
            yield file, also[1]


def defined(path: Path) -> set[str]:
    """The names that a file defines: its own, and as ``Class.method`` those in its classes."""
    source = path.read_text("utf-8")
    if path.suffix == ".lua":
        return set(re.findall(r"^local function (\w+)", source, re.M))
    names: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name, body=body):
                names |= {name, *(f"{name}.{inner}" for each in body for inner in _names(each))}
            case _:
                names |= set(_names(node))
    return names


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            yield name
        case ast.ImportFrom(names=imported):
            # What a package hands on is found there, too.
            yield from (each.asname or each.name for each in imported)
        case _:
            pass


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomers_question_has_one_entry(question: str) -> None:
    entry, rest = rows(PAGE.read_text("utf-8"))[question]

    assert len(_FILE.findall(entry)) == 1, "one file to open first"
    assert entry.startswith("`") and any(named(entry)), "and a name in it"
    assert _FILE.findall(rest)


def test_each_name_of_the_table_is_in_the_file_next_to_it() -> None:
    cells = [cell for row in rows(PAGE.read_text("utf-8")).values() for cell in row]
    mentions = [mention for cell in cells for mention in named(cell)]

    assert len(mentions) > 20
    assert [(file, name) for file, name in mentions if name not in defined(ROOT / file)] == []
