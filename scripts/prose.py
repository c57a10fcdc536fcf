"""How a text reads: words a sentence, long sentences, openings without a noun.

Code, tables, headings and the targets of links are left out. A name in backticks is one word.
"""

import ast
import re
from dataclasses import dataclass
from itertools import pairwise

LONG = 30
"""A sentence of more words than this is long."""

HEADLESS = frozenset({"who", "what", "which", "whose", "whoever", "where", "that", "of"})
"""First words of a sentence that has no noun yet. A question may begin so."""

_LEFT_OUT = re.compile(r"^ *(```|~~~).*?^ *\1 *$|<!--.*?-->|\$\$.*?\$\$", re.M | re.S)
_NO_PROSE = re.compile(r"^ *(\||#|>? *!\[|\[.*\]: |</?\w).*$", re.M)
_ITEM = re.compile(r"^ *([*+-]|\d+\.) +", re.M)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"(`+)(?!`).+?\1", re.S)
_END = re.compile(r"(?<=[.!?])[*_)”\"]*\s+(?=[*_(“\"]*[A-Z0-9`])")

_LITTLE = frozenset(
    "a all an and are as at be by each for from if in is it its no none not of on one or return"
    " returns that the this to whether with".split()
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")

_BLOCKS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (*_BLOCKS, ast.Assign, ast.AnnAssign)


@dataclass(frozen=True)
class Prose:
    sentences: tuple[str, ...]

    @property
    def words(self) -> float:
        return sum(map(_words, self.sentences)) / max(1, len(self.sentences))

    @property
    def long(self) -> list[str]:
        return [each for each in self.sentences if _words(each) > LONG]

    @property
    def headless(self) -> list[str]:
        """The sentences, questions aside, that open with a word of ``HEADLESS``."""
        return [each for each in self.sentences if _opens_headless(each)]

    def share(self, some: list[str]) -> float:
        """How many of the sentences these are, in percent."""
        return 100 * len(some) / max(1, len(self.sentences))


def docstrings(tree: ast.Module) -> list[str]:
    """The docstrings of a module, of its classes and functions, and of what it assigns."""
    return [
        statement.value.value.strip()
        for node in ast.walk(tree)
        if isinstance(node, _BLOCKS)
        for before, statement in pairwise([node, *node.body])
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        and isinstance(before, _DOCUMENTED)
    ]


def repeated_names(tree: ast.Module) -> list[str]:
    """The names of classes and functions whose docstrings have no word beyond the signature's."""
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, _BLOCKS) and not isinstance(node, ast.Module)
        if (docstring := ast.get_docstring(node)) is not None
        and _said(docstring) <= _said(node.name) | _said_by_signature(node)
    ]


def _said(text: str) -> set[str]:
    """The words of a text that mean something. Forms of a word with the same beginning are one."""
    words = (word.lower() for word in _WORD.findall(text))
    return {word.removesuffix("s")[:5] for word in words if word not in _LITTLE}


def _said_by_signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    if isinstance(node, ast.ClassDef):
        return _said(" ".join(map(ast.unparse, node.bases)))
    return _said(f"{ast.unparse(node.args)} {ast.unparse(node.returns) if node.returns else ''}")


def opening(docstring: str) -> str:
    return _END.split(docstring, maxsplit=1)[0]


def prose(text: str) -> Prose:
    """The sentences of a Markdown text that have at least three words."""
    text = _NO_PROSE.sub("\n", _LEFT_OUT.sub("\n", text))
    text = _CODE.sub("Code", _LINK.sub(r"\1", _ITEM.sub("\n\n", text)))
    found = (
        " ".join(sentence.split())
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in _END.split(" ".join(paragraph.split()))
    )
    return Prose(tuple(sentence for sentence in found if _words(sentence) >= 3))


def _words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


def _opens_headless(sentence: str) -> bool:
    first = re.match(r"\W*(\w+)", sentence)
    return first is not None and first[1].lower() in HEADLESS and not sentence.endswith("?")
