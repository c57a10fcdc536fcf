"""How many lines of code each package has: without blanks, comments and docstrings.

`python -m tests.house.weight` prints the numbers for `weight.toml`.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

from tests.house.source import PACKAGES, ROOT

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def python_lines(text: str) -> int:
    """A line counts if a token of code is on it. A string counts with all of its lines, unless
    it is a statement of its own.
    """
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(end)):
                code.difference_update(range(node.lineno, end + 1))
            case _:
                pass
    return len(code)


def lua_lines(text: str) -> int:
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("--"))


_COUNTED = {".py": python_lines, ".lua": lua_lines}


@cache
def weights(root: Path = ROOT) -> dict[str, int]:
    """Folder → the lines of code of the files in it. A folder inside of it has its own number."""
    found: Counter[str] = Counter()
    for package in PACKAGES.values():
        for path in (root / package).rglob("*"):
            if path.suffix in _COUNTED:
                folder = path.parent.relative_to(root).as_posix()
                found[folder] += _COUNTED[path.suffix](path.read_text("utf-8"))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.stdout.writelines(f'"{name}" = {lines}\n' for name, lines in weights().items())
