"""Each log message and each error has an entry on its page, and each entry is still of one.

``docs/log-messages/`` has the messages, ``docs/setting-errors.md`` the texts of wrong settings,
and ``docs/limits.md`` the errors. They say what to do. The collector is in ``logged.py``.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

import pytest

from mcp_sessions import errors
from tests.house.logged import (
    Kind,
    Logged,
    logged,
    name_of,
    wordless,
)
from tests.house.source import ROOT, modules

MESSAGES = "docs/log-messages"
SETTINGS = "docs/setting-errors.md"
ERRORS = "docs/limits.md"

WORDLESS = {
    ("mcp_sessions/client/connection_loss.py", "open_for"): "the text of a Failure",
    ("mcp_sessions/client/connection_loss.py", "first_failed"): "the text of a Failure",
    ("mcp_sessions/client/connection_loss.py", "_recover"): "the text of a Failure",
    ("mcp_sessions/client/resuming.py", "_on_event"): "one text, two lines above",
    ("mcp_sessions/server/reporting/audit.py", "write"): "a record of the audit",
    ("mcp_sessions/server/upstream/external/child.py", "warn"): "its callers give the text",
    ("mcp_sessions/server/upstream/external/children.py", "start"): "the text of not_started",
    ("mcp_sessions/server/upstream/external/children.py", "_say_now_and_then"): "its callers' text",
    (
        "mcp_sessions/server/upstream/external/command.py",
        "_died",
    ): "a status, and a line of the process",
    ("mcp_sessions/server/upstream/external/process.py", "_say"): "a line that the process wrote",
    ("mcp_sessions/stores/sqlite/checkpointing.py", "begin_anew"): "SQLite's own text",
    ("mcp_sessions/stores/sqlite/checkpointing.py", "_copy"): "SQLite's own text",
    ("mcp_sessions/stores/sqlite/cleaning.py", "shut_down"): "the system's own text",
    ("mcp_sessions/stores/sqlite/writer.py", "failed"): "SQLite's own text",
}
"""(file, function) with a message that has only values → the origin of its text."""

OF_OTHERS = {
    "408": "the bytes of the answer are in serve/protocols.py",
    "431": "the bytes of the answer are in serve/protocols.py",
}
"""Code or status → why no number in the source is it."""

CLIENT = (
    "mcp_sessions/client/",
    "mcp_sessions/http_client/",
    "transports/mcp_sessions_transports/http/client/",
)
ANSWERING = ("mcp_sessions/errors.py", "mcp_sessions/serve/", "transports/")

_CODE = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
_CALLS = frozenset({"send_text", "send_json", "_text", "_said", "Denied"})


def trees() -> dict[str, ast.Module]:
    """File → its syntax tree, of all that serves or connects."""
    return {
        module.file: module.tree
        for module in modules().values()
        if not module.file.startswith("conformance/")
    }


def entries(page: str, heading: str) -> Iterator[str]:
    """The texts in backticks in the first column of the tables with such a first heading."""
    is_there = False
    for line in page.splitlines():
        if not line.startswith("|"):
            is_there = False
            continue
        cell = re.split(r"(?<!\\)\|", line)[1].strip()
        if is_there:
            yield from (found[1] for found in _CODE.findall(cell))
        is_there = is_there or cell == heading


def missing(found: Iterable[Logged], pages: Mapping[Kind, str]) -> list[str]:
    """The texts without an entry, and the entries without a text.

    Args:
        pages: Kind of a text → the page that has its entries.
    """
    known = {kind.value: set(entries(page, kind.value)) for kind, page in pages.items()}
    texts = sorted(set(found))
    said = {(each.kind, each.text) for each in texts}
    return [
        *(
            f"{each} has no entry in {page_of(each.kind)}"
            for each in texts
            if each.text not in known[each.kind]
        ),
        *(
            f"{page_of(kind)}: {kind}: {text} is written nowhere"
            for kind, there in known.items()
            for text in sorted(there)
            if (kind, text) not in said
        ),
    ]


def page_of(kind: str) -> str:
    return SETTINGS if kind == Kind.SETTING.value else MESSAGES


def text_of(page: str) -> str:
    """A page, or the pages of a folder."""
    path = ROOT / page
    files = sorted(path.glob("*.md")) if path.is_dir() else [path]
    return "\n".join(file.read_text("utf-8") for file in files)


def statuses(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(args=args, keywords=keywords) as call:
                given = [*args, *(each.value for each in keywords if "status" in str(each.arg))]
                values = given if name_of(call) in _CALLS or keywords else []
            case ast.Dict(keys=keys, values=of):
                values = [
                    value
                    for key, value in zip(keys, of, strict=True)
                    if isinstance(key, ast.Constant) and key.value == "status"
                ]
            case ast.Return(value=ast.Tuple(elts=values)):
                pass
            case _:
                continue
        for value in values:
            if isinstance(value, ast.Constant) and type(value.value) is int:
                if 400 <= value.value < 600:
                    yield str(value.value)


def codes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))) if (
                value > 30000
            ):
                yield str(-value)
            case _:
                pass


def test_each_message_has_an_entry_and_each_entry_a_message() -> None:
    found = list(logged(trees()))
    pages = {kind: text_of(page_of(kind.value)) for kind in Kind}

    assert len(found) > 500
    assert missing(found, pages) == []


@pytest.mark.parametrize(("page", "cells"), [(MESSAGES, (2, 3)), (SETTINGS, (2,))])
def test_each_entry_says_what_to_do(page: str, cells: tuple[int, ...]) -> None:
    """A log message also says why it happens."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text_of(page).splitlines()
        if line.startswith("| `")
    ]

    assert len(rows) > 150
    assert [row for row in rows if len(row) not in cells or not all(row)] == []


def test_a_message_that_is_only_values_says_where_its_text_comes_from() -> None:
    found = {(each.file, each.text) for each in wordless(trees())}

    assert sorted(found - WORDLESS.keys()) == []
    assert sorted(WORDLESS.keys() - found) == []


def test_each_error_has_an_entry_and_each_entry_an_error() -> None:
    page = (ROOT / ERRORS).read_text("utf-8")
    sources = trees()
    answered = {
        status
        for file, tree in sources.items()
        if file.startswith(ANSWERING) and not file.startswith(CLIENT)
        for status in statuses(tree)
    }
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SessionsError)
    }
    written = {code for tree in sources.values() for code in codes(tree)}

    assert {"404", "503"} <= answered and len(written) > 10 and len(raised) > 15
    assert OF_OTHERS.keys().isdisjoint(answered | written)
    assert differences(written | others(is_code=True), entries(page, "code")) == []
    assert differences(answered | others(is_code=False), entries(page, "status")) == []
    assert differences(raised, entries(page, "error")) == []


def others(*, is_code: bool) -> set[str]:
    """The codes, or else the statuses, of other standards."""
    return {each for each in OF_OTHERS if each.startswith("-") is is_code}


def differences(there: set[str], known: Iterable[str]) -> list[str]:
    """The messages without an entry, and the entries without a message."""
    named = set(known)
    return [
        *(f"{each} has no entry in {ERRORS}" for each in sorted(there - named)),
        *(f"{ERRORS}: {each} is nowhere in the source" for each in sorted(named - there)),
    ]
