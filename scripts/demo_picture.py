"""Draws what the panes of the demo showed, as it changed in time: an SVG that moves.

Each row of a pane that was seen is a text of the picture, with an animation of its own that shows
it for as long as it was seen. It loads nothing and runs nothing. It follows the reader's setting
for light and dark. A reader who wants no motion sees the end.
"""

import time
from dataclasses import dataclass, field
from html import escape

from demo_screen import LOG, WIDTH, Row, Screen, rows

CHAR, LINE, EDGE, GAP = 8.4, 20, 16, 16
"""Pixels: of a character, from line to line, around a pane's text, between panes."""
HEAD = 40
PANE = round(WIDTH * CHAR) + 2 * EDGE
ROWS = 7 + LOG
HEIGHT = HEAD + ROWS * LINE + EDGE
REST = 5.0
"""Seconds for which the end is shown, before it begins again."""

STYLE = """
:root { --ink: #1f2328; --paper: #ffffff; --pane: #f6f8fa; --edge: #d1d9e0; --dim: #59636e;
        --good: #1a7f37; --bad: #cf222e; --busy: #9a6700; --accent: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #131416; --pane: #1c1f24; --edge: #3d444d; --dim: #9198a1;
          --good: #3fb950; --bad: #ff7b72; --busy: #d29922; --accent: #58a6ff; }
}
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink);
       white-space: pre; }
.pane { fill: var(--pane); stroke: var(--edge); }
.head, .strong, .good, .bad, .accent { font-weight: 600; }
.dim { fill: var(--dim); } .track { fill: var(--edge); } .good { fill: var(--good); }
.bad { fill: var(--bad); } .busy { fill: var(--busy); } .accent { fill: var(--accent); }
.gone { visibility: hidden; }
"""


@dataclass
class Seen:
    """A row of the picture, and when it was seen."""

    x: float
    y: float
    row: tuple[tuple[str, str], ...]
    begin: float
    end: float | None = None


@dataclass
class Recorder:
    """Takes note of each change of a screen, from ``begin`` on."""

    screen: Screen
    seen: list[Seen] = field(default_factory=list[Seen])
    _now: dict[tuple[float, float], Seen] = field(default_factory=dict[tuple[float, float], Seen])
    _began: float = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()
        self.screen.changed = self._take
        self._take()

    def end(self) -> None:
        self.screen.changed = lambda: None

    def _take(self) -> None:
        at = time.monotonic() - self._began
        for x, pane in zip((0, PANE + GAP), self.screen.panes, strict=True):
            for number, row in enumerate(rows(pane)):
                self._note(x + EDGE, HEAD + 14 + number * LINE, row, at)
        self._note(EDGE, HEIGHT + 28, [self.screen.caption], at)

    def _note(self, x: float, y: float, row: Row, at: float) -> None:
        before = self._now.get((x, y))
        if before is not None:
            if before.row == tuple(row):
                return
            before.end = at
        self._now[x, y] = seen = Seen(x, y, tuple(row), at)
        self.seen.append(seen)

    def svg(self) -> str:
        length = max((each.begin for each in self.seen), default=0) + REST
        width, height = 2 * PANE + GAP, HEIGHT + 44
        title = (
            "One cut, two clients. With the SDK alone the call and the changes are lost."
            " With mcp-sessions the client comes back and has both."
        )
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {width + 16} {height + 16}"'
            f' width="{width + 16}" height="{height + 16}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}{self._animations(length)}</style>",
            f'<rect x="-8" y="-8" width="{width + 16}" height="{height + 16}" rx="8"'
            ' fill="var(--paper)"/>',
        ]
        for x, pane in zip((0, PANE + GAP), self.screen.panes, strict=True):
            parts += [
                f'<rect class="pane" x="{x}" y="0" width="{PANE}" height="{HEIGHT}" rx="8"/>',
                f'<text class="head" x="{x + EDGE}" y="27">{escape(pane.title)}</text>',
            ]
        for number, each in enumerate(self.seen):
            if any(text.strip() for text, _ in each.row):
                parts.append(self._drawn(number, each))
        return "\n".join([*parts, "</svg>\n"])

    def _animations(self, length: float) -> str:
        """Those of the rows that were not always there. Without motion, the end is seen."""
        lines = ["@media (prefers-reduced-motion: no-preference) {"]
        for number, each in enumerate(self.seen):
            if each.begin == 0 and each.end is None:
                continue
            steps = ["0%{visibility:hidden}"] if each.begin else []
            steps.append(f"{100 * each.begin / length:.2f}%{{visibility:visible}}")
            if each.end is not None:
                steps.append(f"{100 * each.end / length:.2f}%{{visibility:hidden}}")
            lines.append(f"@keyframes k{number}{{{''.join(steps)}}}")
            lines.append(f"#r{number}{{animation:k{number} {length:.1f}s step-end infinite}}")
        return "\n".join([*lines, "}\n"])

    def _drawn(self, number: int, seen: Seen) -> str:
        gone = ' class="gone"' if seen.end is not None else ""
        parts: list[str] = []
        at = seen.x
        for text, kind in seen.row:
            if text and not text.strip("━"):
                parts.append(
                    f'<rect class="{kind}" x="{at:.1f}" y="{seen.y - 7}"'
                    f' width="{len(text) * CHAR:.1f}" height="5"/>'
                )
            elif text.strip():
                shown = text.strip(" ")
                x = at + (len(text) - len(text.lstrip(" "))) * CHAR
                parts.append(
                    f'<text class="{kind}" x="{x:.1f}" y="{seen.y}"'
                    f' textLength="{len(shown) * CHAR:.1f}">{escape(shown)}</text>'
                )
            at += len(text) * CHAR
        return f'<g id="r{number}"{gone}>{"".join(parts)}</g>'
