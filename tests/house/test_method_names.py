"""A method of MCP has its name, and each part of it, in one place:
``mcp_sessions/method_names.py``.
"""

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


def is_part(text: str) -> bool:
    """Whether a text is a name, or whole words of one: ``roots/``, ``/list``, ``list_changed``."""
    words = text.strip("/")
    is_clear = text in NAMES or "/" in text or "_" in text
    return is_clear and words != "" and any(f"/{words}/" in f"/{name}/" for name in NAMES)


def spelled(source: str) -> Iterator[int]:
    """The lines that have the name of a method, or a part of one, as a text or in an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_part(node.value):
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


def test_a_part_of_a_name_is_seen() -> None:
    assert list(spelled('f"notifications/{kind}/list_changed"')) == [1, 1]
    assert list(spelled('f"{kind}/list"')) == [1]
    assert list(spelled('method.startswith("session/")')) == [1]
    assert list(spelled('ENDS = ("/list_changed", "resources/updated")')) == [1, 1]
    assert list(spelled('method.endswith("list_changed")')) == [1]
    assert list(spelled('f"{listed}/other/{kind}"')) == []
