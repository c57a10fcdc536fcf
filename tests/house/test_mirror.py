"""A test file stands where the module stands that it is mainly about.

``tests/a/test_b.py``, or ``tests/a/test_b_….py`` where there are several, is about the module
``a.b`` of ``mcp_sessions`` (in ``tests/transports``: of ``mcp_sessions_transports``). Suites, which
go through everything, are in folders of their own; see ``tests/README.md``.
"""

from pathlib import Path

from tests.house.source import PACKAGES, ROOT

MIRRORS = {
    "tests/authentication": "mcp_sessions",
    "tests/core": "mcp_sessions",
    "tests/server/calls": "mcp_sessions",
    "tests/server/cluster": "mcp_sessions",
    "tests/server/delivery": "mcp_sessions",
    "tests/server/dispatch": "mcp_sessions",
    "tests/server/requests": "mcp_sessions",
    "tests/server/upstream": "mcp_sessions",
    "tests/stores/redis": "mcp_sessions",
    "tests/stores/sqlite": "mcp_sessions",
    "tests/transports/http": "mcp_sessions_transports",
    "tests/transports/stdio": "mcp_sessions_transports",
    "tests/transports/websocket": "mcp_sessions_transports",
}
"""Folder of tests, and all that is in it → the package whose modules it mirrors."""


def mirrored(test: Path) -> Path:
    """The folder of the source in which the module of a test stands."""
    package = next(p for folder, p in MIRRORS.items() if test.is_relative_to(folder))
    inside = test.parent.relative_to("tests")
    inside = inside.relative_to("transports") if package != "mcp_sessions" else inside
    return Path(PACKAGES[package]) / inside


def has_module(test: Path, root: Path = ROOT) -> bool:
    """Whether there is a module that ``test`` is named after."""
    name = test.stem.removeprefix("test_")
    modules = [path.stem for path in (root / mirrored(test)).glob("*") if path.stem != "__init__"]
    return any(name == module or name.startswith(f"{module}_") for module in modules)


def test_each_test_of_a_mirrored_folder_has_its_module() -> None:
    """One that was renamed, or divided, takes its tests with it."""
    tests = [
        path.relative_to(ROOT) for folder in MIRRORS for path in (ROOT / folder).rglob("test_*.py")
    ]
    assert len(tests) > 20
    assert [str(test) for test in tests if not has_module(test)] == []


def test_a_test_without_a_module_is_seen() -> None:
    assert has_module(Path("tests/core/test_log.py"))
    assert has_module(Path("tests/stores/redis/test_redis_store_away.py"))
    assert not has_module(Path("tests/core/test_logs.py"))
    assert not has_module(Path("tests/transports/http/test_nothing.py"))
