"""Draws the pictures of the documentation: ``python -m scripts.pictures``.

Each ``docs/pictures/NAME.txt`` becomes ``NAME.svg`` next to it. A picture is one file for light and
dark: it follows the reader's setting. ``tests/docs/test_pictures.py`` compares files and texts.

A text begins with ``title: …``, the alternative text. Then it has either lanes, from left to right,
and what happens in them, from top to bottom::

    lanes: Client | Layer | Store
    == The connection breaks          a heading across all lanes
    Client -> Layer: tools/call       a message; --> a dashed one; -x one that is lost
    Layer: stores the event           a note on one lane

or boxes, by column and row, and arrows between them::

    box new 0,0: Started
    new -> over: expires
"""

import argparse
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

LANE, ROW, HEAD, EDGE = 220, 38, 40, 16
"""Pixels: between two lanes, a step down, the boxes on top, the border."""

BOX_WIDTH, BOX_HEIGHT, COLUMN, LINE = 150, 46, 260, 110
"""Pixels: of a box, and from one box to the next."""

STYLE = """
:root { --ink: #1f2328; --paper: #ffffff; --soft: #59636e; --box: #ddf4ff; --line: #0969da;
        --lost: #cf222e; --note: #fff8c5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #131416; --soft: #9198a1; --box: #0c2d4d; --line: #58a6ff;
          --lost: #ff7b72; --note: #3b2e05; }
}
text { font: 15px system-ui, sans-serif; fill: var(--ink); text-anchor: middle; }
.head { font-weight: 600; }
.soft { stroke: var(--soft); stroke-dasharray: 3 5; }
.box { fill: var(--box); stroke: var(--line); }
.note { fill: var(--note); stroke: var(--soft); }
.arrow { stroke: var(--line); stroke-width: 2; fill: none; }
.dashed { stroke-dasharray: 7 5; }
.lost { stroke: var(--lost); }
.tip { fill: var(--line); }
.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
"""


@dataclass
class Canvas:
    parts: list[str] = field(default_factory=list[str])
    width: int = 0
    height: int = 0

    def text(self, x: float, y: float, text: str, kind: str = "halo") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def box(self, x: float, y: float, text: str, kind: str = "box", width: int = BOX_WIDTH) -> None:
        height = BOX_HEIGHT if kind == "box" else 30
        self.parts.append(
            f'<rect class="{kind}" x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}"'
            f' height="{height}" rx="6"/>'
        )
        self.text(x, y + 5, text, "head" if kind == "box" else "")

    def arrow(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        """Draw a line with a tip, or with a cross where its message is lost."""
        (x, y), (to_x, to_y) = start, end
        far = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        along, across = (to_x - x) / far, (to_y - y) / far
        line = {"->": "arrow", "-->": "arrow dashed", "-x": "arrow lost"}[kind]
        if kind == "-x":
            to_x, to_y = x + (to_x - x) * 0.6, y + (to_y - y) * 0.6
        self.parts.append(f'<path class="{line}" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
        if kind == "-x":
            self.parts.append(
                f'<path class="arrow lost" d="M{to_x - 7:g} {to_y - 7:g}l14 14m0-14l-14 14"/>'
            )
            return
        left = (to_x - 11 * along - 5 * across, to_y - 11 * across + 5 * along)
        right = (to_x - 11 * along + 5 * across, to_y - 11 * across - 5 * along)
        self.parts.append(
            f'<path class="tip" d="M{to_x:g} {to_y:g}L{left[0]:.1f} {left[1]:.1f}'
            f'L{right[0]:.1f} {right[1]:.1f}Z"/>'
        )

    def svg(self, title: str) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="var(--paper)"/>\n'
            f"{body}\n</svg>\n"
        )


def draw(text: str) -> str:
    """The picture of a text, as SVG.

    Raises:
        ValueError: A line cannot be read; it is in the message.
    """
    first, _, rest = text.strip().partition("\n")
    if not first.startswith("title: "):
        raise ValueError(f"the first line is no title: {first}")
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    canvas = Canvas()
    if lines[0].startswith("lanes: "):
        _draw_lanes(canvas, lines)
    else:
        _draw_boxes(canvas, lines)
    return canvas.svg(first.removeprefix("title: "))


def _draw_lanes(canvas: Canvas, lines: list[str]) -> None:
    names = [name.strip() for name in lines[0].removeprefix("lanes: ").split("|")]
    at = {name: EDGE + 85 + index * LANE for index, name in enumerate(names)}
    canvas.width = 2 * EDGE + 170 + (len(names) - 1) * LANE
    canvas.height = HEAD + 2 * EDGE + ROW * len(lines)
    for x in at.values():
        canvas.parts.append(
            f'<path class="soft" d="M{x} {EDGE + BOX_HEIGHT}V{canvas.height - EDGE}"/>'
        )
    for name, x in at.items():
        canvas.box(x, EDGE + BOX_HEIGHT / 2, name)
    y = EDGE + HEAD
    for line in lines[1:]:
        y += ROW
        if line.startswith("== "):
            canvas.text(canvas.width / 2, y, line[3:], "head halo")
        elif (message := re.fullmatch(r"(.+?) (->|-->|-x) (.+?): (.+)", line)) is not None:
            start, kind, end, said = message.groups()
            if start not in at or end not in at:
                raise ValueError(f"no such lane: {line}")
            canvas.arrow((at[start], y), (at[end], y), kind)
            canvas.text((at[start] + at[end]) / 2, y - 10, said)
        elif (note := re.fullmatch(r"(.+?): (.+)", line)) is not None and note[1] in at:
            width = max(60, 8 * len(note[2]) + 16)
            x = min(max(at[note[1]], width / 2 + 4), canvas.width - width / 2 - 4)
            canvas.box(x, y - 5, note[2], "note", width)
        else:
            raise ValueError(f"cannot be read: {line}")


def _draw_boxes(canvas: Canvas, lines: list[str]) -> None:
    at: dict[str, tuple[float, float]] = {}
    texts: list[tuple[float, float, str]] = []
    for line in lines:
        if (box := re.fullmatch(r"box (\w+) (\d+),(\d+): (.+)", line)) is not None:
            x = EDGE + BOX_WIDTH / 2 + int(box[2]) * COLUMN
            y = EDGE + BOX_HEIGHT / 2 + int(box[3]) * LINE
            at[box[1]] = (x, y)
            canvas.box(x, y, box[4])
        elif (edge := re.fullmatch(r"(\w+) (->|-->) (\w+): (.+)", line)) is not None:
            if edge[1] not in at or edge[3] not in at:
                raise ValueError(f"no such box: {line}")
            start, end = _ends(at[edge[1]], at[edge[3]])
            canvas.arrow(start, end, edge[2])
            # Back and forth between two boxes: one text above its line, one below.
            below = end[0] < start[0] or (end[0] == start[0] and end[1] < start[1])
            x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
            texts.append((x, y + (19 if below else -7), edge[4]))
        else:
            raise ValueError(f"cannot be read: {line}")
    for text in texts:
        canvas.text(*text)
    canvas.width = int(max(x for x, _ in at.values()) + BOX_WIDTH / 2 + EDGE)
    canvas.height = int(max(y for _, y in at.values()) + BOX_HEIGHT / 2 + EDGE)


def _ends(
    start: tuple[float, float], end: tuple[float, float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return both ends of an arrow between two boxes; there and back are two lines."""
    across, down = end[0] - start[0], end[1] - start[1]
    if across:
        side = BOX_WIDTH / 2 if across > 0 else -BOX_WIDTH / 2
        shift = -8 if across > 0 else 8
        return (start[0] + side, start[1] + shift), (end[0] - side, end[1] + shift)
    side = BOX_HEIGHT / 2 if down > 0 else -BOX_HEIGHT / 2
    shift = -12 if down > 0 else 12
    return (start[0] + shift, start[1] + side), (end[0] + shift, end[1] - side)


def main() -> None:
    argparse.ArgumentParser(prog="python -m scripts.pictures", description=__doc__).parse_args()
    for text in sorted(FOLDER.glob("*.txt")):
        text.with_suffix(".svg").write_text(draw(text.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
