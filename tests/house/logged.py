"""The texts that this project logs, as its source has them.

A text is literal where the source writes it out. Each value in it is one ``…`` here, whether by
``%`` or in an f-string. Each has a :class:`Kind`. So have the texts of wrong settings.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

LEVELS = frozenset({"info", "warning", "error", "critical", "exception"})
"""The methods of a logger for lines that an operator sees at ``--log-level info``."""

_LOGGERS = re.compile(r"(\w*\.)?_?log(ger)?|logging\.getLogger\(.*\)")
_PARSERS = re.compile(r"(\w*\.)?_?parser")
_VALUE = re.compile(r"%%|%[-+#0]*\d*(?:\.\d+)?[a-zA-Z]")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Kind(Enum):
    """The part of a line that a text is; the value is the heading of its column on the page."""

    MESSAGE = "message"
    """The whole line."""

    CAUSE = "cause"
    """A text in place of a value of a message."""

    WORK = "work"
    """The name of a work in the background, which ``report`` logs."""

    SETTING = "text"
    """A wrong setting, as a command prints it and a program gets it."""


@dataclass(frozen=True, order=True)
class Logged:
    """One text, and the place in the source where it stands."""

    text: str
    kind: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.text}"


COMPOSERS: Mapping[str, tuple[Kind, int, str]] = {
    "StoreUnavailable": (Kind.CAUSE, 0, ""),
    "StoreRefused": (Kind.CAUSE, 0, ""),
    "Failure": (Kind.CAUSE, 1, ""),
    "warn": (Kind.CAUSE, 1, "upstream/"),
    "_say_now_and_then": (Kind.CAUSE, 0, "upstream/"),
    "_break": (Kind.CAUSE, 0, "upstream/"),
    "not_started": (Kind.CAUSE, 0, "upstream/"),
    "refused": (Kind.CAUSE, 0, "external/url"),
    "count_reason": (Kind.CAUSE, 0, "serve/"),
    "_say_what_is_lost": (Kind.CAUSE, 0, ""),
    "LogRecord": (Kind.MESSAGE, 4, "cli/"),
    "ConfigurationError": (Kind.SETTING, 0, ""),
    "ArgumentTypeError": (Kind.SETTING, 0, ""),
    "report": (Kind.WORK, 0, ""),
    "watched": (Kind.WORK, 0, ""),
    "hold": (Kind.WORK, 0, ""),
    "run": (Kind.WORK, 0, ""),
    "loop": (Kind.WORK, 0, ""),
}
"""Function → the kind of a text that it takes, the argument with it, and the files where it is
that function.
"""


TABLES: Mapping[tuple[str, str], Kind] = {
    ("mcp_sessions/stores/postgres/postgres_link.py", "_REFUSALS"): Kind.CAUSE,
    ("mcp_sessions/stores/redis/refusals.py", "_REFUSALS"): Kind.CAUSE,
}
"""File and name of a dictionary whose values are such texts → their kind."""


def logged(trees: Mapping[str, ast.Module]) -> Iterator[Logged]:
    """The texts of these files.

    Args:
        trees: File → its syntax tree.
    """
    for file, tree in trees.items():
        for call, around in _calls(tree):
            for kind, argument in _texts(call, file):
                for text in _literals(argument, [*around, tree]):
                    if kind in (Kind.MESSAGE, Kind.SETTING) or has_words(text):
                        yield Logged(text, kind.value, file, call.lineno)
        yield from _of_tables(file, tree)


def wordless(trees: Mapping[str, ast.Module]) -> Iterator[Logged]:
    """The log calls whose message says nothing by itself: others compose the text."""
    for file, tree in trees.items():
        for call, around in _calls(tree):
            message = _message(call)
            if message is not None:
                found = list(_literals(message, [*around, tree]))
                if not found or not all(map(has_words, found)):
                    yield Logged(around[0].name if around else "", "wordless", file, call.lineno)


def has_words(text: str) -> bool:
    """Whether a text says something next to its values."""
    return re.search(r"[A-Za-z]{3}", text) is not None


def _of_tables(file: str, tree: ast.Module) -> Iterator[Logged]:
    for (of, name), kind in TABLES.items():
        for table in _assigned(tree, name) if of == file else ():
            assert isinstance(table, ast.Dict), f"{file}: {name}"
            for value in table.values:
                for text in _literals(value, ()):
                    yield Logged(text, kind.value, file, value.lineno)


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, list[_Function]]]:
    """Each call, with the functions around it, the innermost first."""

    def below(node: ast.AST, around: list[_Function]) -> Iterator[tuple[ast.Call, list[_Function]]]:
        if isinstance(node, _Function):
            around = [node, *around]
        if isinstance(node, ast.Call):
            yield node, around
        for child in ast.iter_child_nodes(node):
            yield from below(child, around)

    return below(tree, [])


def name_of(call: ast.Call) -> str:
    """The name of the function or method that is called; empty if it has none."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def _message(call: ast.Call) -> ast.expr | None:
    """The message of a call of a logger at a level that an operator sees."""
    at = 1 if name_of(call) == "log" else 0
    if len(call.args) <= at or not (at or name_of(call) in LEVELS):
        return None
    if not isinstance(call.func, ast.Attribute):
        return None
    return call.args[at] if _LOGGERS.fullmatch(ast.unparse(call.func.value)) else None


def _texts(call: ast.Call, file: str) -> Iterator[tuple[Kind, ast.expr]]:
    message = _message(call)
    name = name_of(call)
    if message is not None:
        yield Kind.MESSAGE, message
    elif name == "error" and _PARSERS.fullmatch(ast.unparse(call.func).removesuffix(".error")):
        yield Kind.SETTING, call.args[0]
    elif name in COMPOSERS:
        kind, at, where = COMPOSERS[name]
        is_other = name in ("run", "loop") and "background" not in ast.unparse(call.func)
        if at < len(call.args) and where in file and not is_other:
            yield kind, call.args[at]


def _literals(text: ast.expr, scopes: Iterable[ast.AST]) -> Iterator[str]:
    """What an expression may be, each value as ``…``; none if it is a value itself."""
    match text:
        case ast.Constant(value=str(literal)):
            yield _with_values(literal)
        case ast.JoinedStr(values=parts):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
            )
        case ast.IfExp(body=one, orelse=other):
            yield from _literals(one, scopes)
            yield from _literals(other, scopes)
        case ast.Name(id=name):
            for scope in scopes:
                found = [
                    literal for value in _assigned(scope, name) for literal in _literals(value, ())
                ]
                if found:
                    yield from found
                    return
        case _:
            pass


def _with_values(literal: str) -> str:
    return _VALUE.sub(lambda value: "%" if value[0] == "%%" else "…", literal)


def _assigned(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if (
                found == name
            ):
                yield value
            case _:
                pass
