"""The two panes of the demo, as rows of text: for a terminal, as plain lines, and for a picture.

A row is a list of (text, kind). A kind is a name in ``STYLES``; the picture has a colour for each.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from textwrap import wrap

from demo_stage import line
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

Row = list[tuple[str, str]]

STYLES = {
    "plain": "",
    "dim": "dim",
    "strong": "bold",
    "good": "bold green",
    "bad": "bold red",
    "busy": "yellow",
    "track": "bright_black",
    "accent": "bold cyan",
}
SIGNS = {"good": "✓ ", "bad": "✗ "}
WIDTH = 38
"""Columns of a pane inside its border. Two panes fit 84 columns."""
LEAST = 2 * (WIDTH + 4)
LOG = 7
"""Lines of a pane for what happened last."""


@dataclass
class Pane:
    """What a side shows. Its side sets the fields as things happen."""

    title: str
    code: str
    line: tuple[str, str] = ("starting", "dim")
    done: int = 0
    total: int = 0
    answer: tuple[str, str] = ("", "dim")
    notes: dict[str, bool] = field(default_factory=dict[str, bool])
    """Note → whether the client heard of its newest change."""
    log: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    """(seconds, text, kind)"""


class Screen:
    """Shows both panes. ``changed`` is called after each change of what it shows."""

    def __init__(self, panes: tuple[Pane, Pane], lines: Console | None = None) -> None:
        self.panes = panes
        self.caption: tuple[str, str] = ("Two servers start. Both serve the same file.", "dim")
        self.changed: Callable[[], None] = lambda: None
        self._lines = lines
        """For plain lines: what is said is printed here."""
        self._began = time.monotonic()

    def begin(self) -> None:
        """Count the seconds from now."""
        self._began = time.monotonic()

    def say(self, pane: Pane, text: str, kind: str = "plain") -> None:
        at = time.monotonic() - self._began
        pane.log.append((at, text, kind))
        if self._lines is not None:
            line(self._lines, f"{at:5.1f} s  {pane.title}: {text}")
        self.changed()

    def announce(self, text: str, kind: str = "strong") -> None:
        self.caption = (text, kind)
        if self._lines is not None:
            line(self._lines, text)
        self.changed()

    def __rich__(self) -> RenderableType:
        """For a live display, which asks again and again."""
        panels = [
            Panel(
                Group(*(drawn(row) for row in rows(pane))),
                title=pane.title,
                width=WIDTH + 4,
                border_style="bright_black",
            )
            for pane in self.panes
        ]
        return Group(Columns(panels, padding=0), drawn([("  ", "plain"), self.caption]))


def drawn(row: Row) -> Text:
    return Text.assemble(*((text, STYLES[kind]) for text, kind in row), no_wrap=True)


def rows(pane: Pane) -> Iterator[Row]:
    """The rows of a pane: always as many."""
    yield [(pane.code, "accent")]
    yield []
    text, kind = pane.line
    broken = "━━━━ ✂ ━━━━" if kind == "bad" else "━" * 11
    yield [("line    ", "dim"), (broken, kind), (f" {text}", kind)]
    yield [("call    ", "dim"), *bar(pane)]
    yield [("answer  ", "dim"), (SIGNS.get(pane.answer[1], "") + pane.answer[0], pane.answer[1])]
    notes: Row = [("notes   ", "dim")]
    for name, is_heard in pane.notes.items():
        kind = "good" if is_heard else "bad"
        notes += [(f"{name} ", "plain"), (f"{'✓' if is_heard else '●'}  ", kind)]
    yield notes
    yield []
    said: list[Row] = []
    for at, text, kind in pane.log:
        first, *more = wrap(SIGNS.get(kind, "") + text, WIDTH - 7)
        said.append([(f"{at:4.1f} s ", "dim"), (first, kind)])
        said += [[(f"{'':9}{rest}", kind)] for rest in more]
    yield from said[-LOG:]
    yield from ([] for _ in range(LOG - len(said)))


def bar(pane: Pane, width: int = 20) -> Row:
    if not pane.total:
        return []
    full = width * pane.done // pane.total
    kind = "busy"
    if pane.answer[1] in SIGNS:
        kind = pane.answer[1]
    count = f" {pane.done}/{pane.total}"
    return [("━" * full, kind), ("━" * (width - full), "track"), (count, "plain")]
