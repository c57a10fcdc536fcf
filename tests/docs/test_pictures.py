"""Every picture of the documentation is drawn from its text, and a page shows it."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.pictures import FOLDER, draw

ROOT = FOLDER.parents[1]
TEXTS = sorted(FOLDER.glob("*.txt"))
PAGES = "\n".join(
    path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
)


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_a_picture_is_what_its_text_says(text: Path) -> None:
    """After a change: ``python -m scripts.pictures``."""
    picture = text.with_suffix(".svg").read_text("utf-8")

    assert picture == draw(text.read_text("utf-8"))
    assert ElementTree.fromstring(picture).find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in picture


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_a_page_shows_the_picture_with_an_alternative_text(text: Path) -> None:
    shown = re.findall(rf"!\[([^\]]*)\]\([\w/.]*pictures/{text.stem}\.svg\)", PAGES)

    assert shown, "no page shows it"
    assert all(len(alternative.split()) >= 5 for alternative in shown)


def test_every_picture_has_a_text() -> None:
    assert [path for path in FOLDER.glob("*.svg") if not path.with_suffix(".txt").is_file()] == []
    assert len(TEXTS) >= 7


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lanes: A | B", "no title"),
        ("title: t\nlanes: A | B\nA -> C: x", "no such lane"),
        ("title: t\nlanes: A | B\nsomething", "cannot be read"),
        ("title: t\nbox a 0,0: A\na -> b: x", "no such box"),
        ("title: t\nbox a 0: A", "cannot be read"),
    ],
)
def test_a_text_that_cannot_be_drawn_is_an_error(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        draw(text)
