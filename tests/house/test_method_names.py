"""A method of MCP has its name in one place: ``mcp_sessions/method_names.py``."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mcp_sessions import method_names
from tests.house.source import PACKAGES, ROOT

NAMES = {
    value for name, value in vars(method_names).items() if name.isupper() and isinstance(value, str)
}

FOLDERS = [PACKAGES["mcp_sessions"], PACKAGES["mcp_sessions_transports"]]
"""The conformance kit shares nothing with what it tests."""

OTHER = {
    "mcp_sessions/method_names.py": "the place",
    "mcp_sessions/acp": "another protocol",
    "mcp_sessions/cli/acp.py": "another protocol",
    "mcp_sessions/testing": "plays a client",
}
"""File or folder → why it may spell them."""


def spelled(source: str) -> Iterator[int]:
    """The lines that have the name of a method as a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno


def is_other(path: str) -> bool:
    return any(path == known or path.startswith(f"{known}/") for known in OTHER)


def test_no_module_spells_the_name_of_a_method() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    inside = [path for path in paths if not is_other(str(path.relative_to(ROOT)))]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in inside
        for line in spelled(path.read_text("utf-8"))
    ]

    assert len(inside) > 300
    assert found == []


def test_a_name_that_is_spelled_is_seen() -> None:
    assert list(spelled('if method == "tools/call":\n    x = "tools/other"')) == [1]
    assert list(spelled('case = {"a": ["notifications/progress"]}')) == [1]
    assert is_other("mcp_sessions/acp/link.py") and not is_other("mcp_sessions/acp_link.py")
    assert all(Path(ROOT, known).exists() for known in OTHER)
