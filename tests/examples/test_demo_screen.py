"""The demo's panes: where they fit, what they say, and the picture that is made of them."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import demo
import pytest
from demo_picture import Recorder
from demo_screen import LEAST, LOG, WIDTH, Pane, Screen, rows
from rich.console import Console

PICTURE = Path(demo.__file__).resolve().parents[1] / "docs" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"


def screen(lines: Console | None = None) -> Screen:
    return Screen((Pane("left", "Client(url)"), Pane("right", "Client(resumable(url))")), lines)


@pytest.mark.parametrize(
    ("width", "is_terminal", "variables", "has_room"),
    [
        (LEAST, True, {}, True),
        (LEAST - 1, True, {}, False),
        (LEAST, False, {}, False),
        (LEAST, True, {"NO_COLOR": "1"}, False),
        (LEAST, True, {"TERM": "dumb"}, False),
    ],
    ids=["wide", "narrow", "pipe", "no colours", "dumb"],
)
def test_the_panes_are_for_a_wide_terminal_with_colours(
    width: int,
    is_terminal: bool,
    variables: dict[str, str],
    has_room: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = io.TextIOWrapper(io.BytesIO(), "utf-8")

    console = Console(file=file, width=width, force_terminal=is_terminal)

    assert demo.fits(console) is has_room


def test_a_pane_has_always_as_many_rows_and_none_is_too_wide() -> None:
    shown = screen()
    pane = shown.panes[0]
    pane.line, pane.answer, pane.done, pane.total = ("cut", "bad"), ("lost", "bad"), 7, 20
    pane.notes = {"plan": True, "ideas": False, "tasks": False}
    before = len(list(rows(pane)))

    for _ in range(LOG):
        shown.say(pane, "lost: SSE stream ended without a response (-32000)", "bad")

    seen = ["".join(text for text, _ in row) for row in rows(pane)]
    assert len(seen) == before
    assert max(map(len, seen)) <= WIDTH
    assert "answer  ✗ lost" in seen and "notes   plan ✓  ideas ●  tasks ●" in map(str.rstrip, seen)


def test_lines_have_the_words_of_the_panes() -> None:
    written = io.StringIO()
    shown = screen(Console(file=written, width=80))

    shown.announce("1  A call.")
    shown.say(shown.panes[1], "answer: 3", "good")

    assert re.fullmatch(r"1  A call\.\n +0\.\d s  right: answer: 3\n", written.getvalue())


def test_the_picture_shows_each_row_for_as_long_as_it_was_seen() -> None:
    """A row that did not last is hidden for those who want no motion."""
    shown = screen()
    recorder = Recorder(shown)
    recorder.begin()
    shown.panes[0].answer = ("waiting", "busy")
    shown.changed()
    shown.panes[0].answer = ("lost <b>", "bad")
    shown.changed()
    recorder.end()
    shown.panes[0].answer = ("after the end", "bad")
    shown.changed()

    picture = ElementTree.fromstring(recorder.svg())

    gone = {
        "".join(group.itertext()): group.get("class") == "gone" for group in picture.iter(f"{SVG}g")
    }
    assert gone["answerwaiting"] is True
    assert gone["answer✗ lost <b>"] is False
    assert not any("after the end" in text for text in gone)


def test_the_picture_of_the_readme_loads_nothing_and_is_for_light_and_dark() -> None:
    """``./scripts/demo --picture docs/demo.svg`` made it."""
    text = PICTURE.read_text("utf-8")
    picture = ElementTree.fromstring(text)

    assert picture.find(f"{SVG}title") is not None
    assert "prefers-color-scheme: dark" in text and "prefers-reduced-motion" in text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|<script|url\(", text) == []
    ends = {"".join(each.itertext()) for each in picture.iter(f"{SVG}g") if not each.get("class")}
    assert "answer✗ lost" in ends
    assert any(each.startswith("answer✓ ") for each in ends)
