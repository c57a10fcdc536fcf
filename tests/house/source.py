"""The source as syntax trees, for the tests of how it is built."""

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "mcp_sessions": "mcp_sessions",
    "mcp_sessions_transports": "transports/mcp_sessions_transports",
    "mcp_sessions_conformance": "conformance/mcp_sessions_conformance",
}
"""Package → its folder below the root."""


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _walked(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_parsed(text)))


@dataclass(frozen=True)
class Module:
    name: str
    """As it is imported."""

    path: Path
    file: str
    """Its path below the root, with slashes."""

    @cached_property
    def lines(self) -> int:
        return len(self.path.read_text("utf-8").splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        return _parsed(self.path.read_text("utf-8"))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, as `ast.walk` has them. The walk takes longer than to look at each."""
        return _walked(self.path.read_text("utf-8"))


def modules(root: Path = ROOT) -> dict[str, Module]:
    """Name → module, of every module of the packages in the checkout at ``root``."""
    found: dict[str, Module] = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = Module(name, path, path.relative_to(root).as_posix())
    return found
