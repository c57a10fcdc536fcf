"""The rule of expiry stands once: `mcp_sessions/core/life.py` computes each deadline, and its
``has_come`` compares it with a moment. SQL and Lua have one text each for that.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import ROOT

SCRIPTS = ROOT / "mcp_sessions/stores/redis/lua"
MODULES = [
    *sorted((ROOT / "mcp_sessions/stores").rglob("*.py")),
    *sorted((ROOT / "mcp_sessions/server").rglob("*.py")),
    ROOT / "mcp_sessions/cli/sessions.py",
]
"""The modules that know when sessions end. Others know when a credential or a key does."""

DEADLINES = {"expires", "ends", "expires_at", "ends_at", "deadline"}
"""Names of a session's deadlines."""

_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_IN_SQL = re.compile(r"\b(expires_at|ends_at)\s*[<>]|[<>]=?\s*(expires_at|ends_at)\b")
_IN_LUA = re.compile(r"[<>]|\bmath\.(min|max)\b")
_NAME_IN_LUA = re.compile(rf"\b({'|'.join(sorted(DEADLINES))}|DEADLINES|times|seconds|now)\b")
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.M | re.S)

SQL = {"DUE", "IDLE_ENDS_FIRST"}
"""The two comparisons in SQL, in ``session_rows.py``."""

LUA = {"has_come", "move_deadline"}
"""The comparison in Lua, and the function that takes the earlier deadline, in ``session.lua``."""

OTHER = {
    "log.lua": "the age of an event",
    "keys.lua": "the lifetime of a request key",
}
"""Script → what else it compares with the time."""


def compared(source: str) -> Iterator[int]:
    """The lines of a module in Python that compare a deadline, or take the earlier of two."""
    tree = ast.parse(source)
    allowed = {
        part
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id in SQL
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=ops, lineno=line) if any(isinstance(op, _ORDERS) for op in ops):
                found = bool(_names(node) & DEADLINES)
            case ast.Call(func=ast.Name(id="min" | "max"), lineno=line):
                found = bool(_names(node) & DEADLINES)
            case ast.Constant(value=str(text), lineno=line):
                found = node not in allowed and bool(_IN_SQL.search(text))
            case _:
                continue
        if found:
            yield line


def _names(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def compared_in_lua(script: str, source: str) -> Iterator[str]:
    """The lines of a script that compare a deadline, or take the earlier of two."""
    source = re.sub(r"--.*", "", source)
    if script == "session.lua":
        source = _FUNCTION.sub(lambda each: "" if each[1] in LUA else each[0], source)
    for line in source.splitlines():
        names = set(_NAME_IN_LUA.findall(line))
        if _IN_LUA.search(line) and names and not (script in OTHER and names <= {"now", "ends"}):
            yield line.strip()


def _complaint(where: str) -> str:
    return (
        f"{where}: a session's deadline is compared. Call has_come (core/life.py; Lua:"
        " session.lua), or session_rows.DUE in SQL."
    )


def test_no_module_compares_a_deadline_by_itself() -> None:
    found = {path: list(compared(path.read_text("utf-8"))) for path in MODULES}
    wrong = [f"{path.relative_to(ROOT)}:{lines}" for path, lines in found.items() if lines]

    assert not wrong, _complaint(", ".join(wrong))


def test_no_script_compares_a_deadline_by_itself() -> None:
    """The number comes from `mcp_sessions/core/life.py`; Lua decides nothing."""
    scripts = sorted(SCRIPTS.glob("*.lua"))
    found = {
        path.name: list(compared_in_lua(path.name, path.read_text("utf-8"))) for path in scripts
    }
    wrong = [f"{name}: {lines}" for name, lines in found.items() if lines]

    assert len(scripts) > 30
    assert not wrong, _complaint(", ".join(wrong))


@pytest.mark.parametrize("script", OTHER)
def test_each_exception_is_needed(script: str) -> None:
    source = (SCRIPTS / script).read_text("utf-8")

    assert list(compared_in_lua("another.lua", source))


@pytest.mark.parametrize(
    "source",
    [
        "now >= record.life.expires_at",
        "if x is None or now >= session.ends_at: pass",
        "f(deadline < now + 1)",
        "min(now + idle, ends_at)",
        'execute("SELECT 1 WHERE expires_at <= ?")',
        'execute(f"SELECT {x} WHERE now > ends_at")',
    ],
)
def test_a_comparison_in_python_is_seen(source: str) -> None:
    assert list(compared(source)) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "has_come(record.life.expires_at, now)",
        "record.life.expires_at != written",
        'DUE = "expires_at <= ?"',
        "now - at >= FRESH",
    ],
)
def test_what_compares_no_deadline_is_let_pass(source: str) -> None:
    assert not list(compared(source))


@pytest.mark.parametrize(
    ("script", "source", "is_seen"),
    [
        ("attach.lua", "if now >= tonumber(fields[6]) then", True),
        ("attach.lua", "if a or seconds(fields[1]) <= at then", True),
        ("keys.lua", "local expires = math.min(now + idle, ends)", True),
        ("keys.lua", "if now > all.oldest then", False),
        ("attach.lua", "if has_come(ends, now) then -- ends > now", False),
        ("session.lua", "local function has_come(d, m)\n    return seconds(d) <= m\nend", False),
        ("attach.lua", "local function has_come(d, m)\n    return seconds(d) <= m\nend", True),
    ],
)
def test_a_comparison_in_lua_is_seen(script: str, source: str, *, is_seen: bool) -> None:
    assert bool(list(compared_in_lua(script, source))) == is_seen
