"""How much an object is given: few arguments, and fewer by position.

Objects that travel together are one value, as
:class:`~mcp_sessions.server.cluster.environment.Environment` is. Policies are exempt by
name. An entry that is no longer needed fails.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Module, modules

ROOT = ("mcp_sessions.assembly", "mcp_sessions.rooms")
"""The composition root."""

MOST = 8
MOST_BY_POSITION = 3
MOST_LINES = 60
"""The bound of a function of the composition root, which makes one room."""

POLICIES = {
    "mcp_sessions.client.reconnect_policy.ReconnectPolicy",
    "mcp_sessions.external_server.ExternalServer",
    "mcp_sessions.http_server.HTTPServer",
    "mcp_sessions.policy.SessionPolicy",
    "mcp_sessions.stdio_server.StdioServer",
    "mcp_sessions_conformance.fault.Fault",
}
"""Settings that are given by name. Each has a default, but for a few first ones."""


def arguments(node: ast.ClassDef) -> tuple[int, int] | None:
    """How many arguments a constructor takes, and how many of them by position. None: the class
    has no constructor of its own.

    The fields of a dataclass or named tuple are no arguments by position here: many are values,
    such as a point.
    """
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            by_position = len(each.args.posonlyargs + each.args.args) - 1
            return by_position + len(each.args.kwonlyargs), by_position
    made = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    if not any("dataclass" in each or each == "NamedTuple" for each in made):
        return None
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    given = [
        each
        for each in fields
        if not ast.unparse(each.annotation).startswith(("ClassVar", "KW_ONLY"))
        and (each.value is None or "init=False" not in ast.unparse(each.value))
    ]
    return len(given), 0


def constructors() -> Iterator[tuple[str, int, int]]:
    """Class, arguments, and arguments by position, of every class."""
    for module in modules().values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and (found := arguments(node)) is not None:
                yield f"{module.name}.{node.name}", *found


def by_position(module: Module) -> Iterator[str]:
    """The constructors that a module calls with more than `MOST_BY_POSITION` by position."""
    for node in module.nodes:
        match node:
            case ast.Call(func=ast.Name(id=name), args=args) if name.lstrip("_")[:1].isupper():
                if len(args) > MOST_BY_POSITION:
                    yield name
            case _:
                pass


def test_no_constructor_takes_many_arguments() -> None:
    wide = {name for name, given, _ in constructors() if given > MOST}

    assert wide == POLICIES


def test_no_constructor_takes_many_arguments_by_position() -> None:
    wide = {name for name, _, given in constructors() if given > MOST_BY_POSITION}

    assert wide == set()


def test_the_composition_root_makes_one_room_at_a_time() -> None:
    """A function of it can be read at once, and names what it passes."""
    roots = [modules()[name] for name in ROOT]
    long = [
        each.name
        for root in roots
        for each in root.nodes
        if isinstance(each, ast.FunctionDef) and (each.end_lineno or 0) - each.lineno >= MOST_LINES
    ]

    assert (long, {name for root in roots for name in by_position(root)}) == ([], set())


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("class A:\n def __init__(self, a, b, *, c): pass", (3, 2)),
        (
            "@dataclass\nclass A:\n a: int\n b: int = field(init=False)\n c: ClassVar[int] = 1",
            (1, 0),
        ),
        ("class A(NamedTuple):\n a: int", (1, 0)),
        ("class A(Exception):\n a: int", None),
    ],
)
def test_the_arguments_of_a_constructor_are_counted(
    source: str, given: tuple[int, int] | None
) -> None:
    node = ast.parse(source).body[0]

    assert isinstance(node, ast.ClassDef)
    assert arguments(node) == given
