"""Pages and docstrings are read at first try: short sentences, each with a subject.

The exceptions are below, with their reasons.
"""

import ast
from pathlib import Path

import pytest

from tests.house.prose import Prose, docstrings, opening, prose, repeated_names
from tests.house.source import ROOT, modules

WORDS = 16.0
"""Words a sentence, on average, at most."""

LONG = 5.0
"""Percent of the sentences that may have more than 30 words."""

HEADLESS = 3.0
"""Percent of the sentences that may open with *who*, *what*, *which*, *where*, *that*, *of*."""

EXCEPTIONS: dict[str, str] = {}
"""Page → why it may be longer."""

CODE_EXCEPTIONS: dict[str, str] = {}
"""Folder → why its docstrings may still open headless."""

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
        ROOT / "conformance/README.md",
        *(ROOT / "examples").glob("*/README.md"),
        *(ROOT / "docs").rglob("*.md"),
    )
)


def faults(found: Prose) -> list[str]:
    """The faults of a page, with their sentences."""
    said: list[str] = []
    if found.words > WORDS:
        longest = sorted(found.sentences, key=len)[-5:]
        said.append(f"{found.words:.1f} words a sentence, at most {WORDS:g}: {longest}")
    if found.share(found.long) > LONG:
        said.append(f"{found.share(found.long):.0f} % of the sentences are long: {found.long}")
    if found.share(found.headless) > HEADLESS:
        said.append(f"{found.share(found.headless):.0f} % open headless: {found.headless}")
    return said


@pytest.mark.parametrize("page", [page for page in PAGES if page not in EXCEPTIONS])
def test_a_page_has_short_sentences_that_begin_with_their_subject(page: str) -> None:
    assert faults(prose((ROOT / page).read_text("utf-8"))) == []


def test_an_exception_has_a_reason_and_is_still_one() -> None:
    for page, reason in EXCEPTIONS.items():
        assert len(reason.split()) >= 4, page
        assert faults(prose((ROOT / page).read_text("utf-8"))) != [], f"{page} is none any more"


def docstrings_of(folders: dict[str, str], *, inside: bool) -> list[str]:
    """The docstrings of the packages inside of these folders, or outside."""
    return [
        docstring
        for module in modules().values()
        if module.file.startswith(tuple(folders)) is inside
        for docstring in docstrings(module.tree)
    ]


def docstring_faults(found: list[str]) -> list[str]:
    """The docstrings that open headless, if they are too many, and those that only point away."""
    headless = Prose(tuple(map(opening, found))).headless
    allowed = len(found) * HEADLESS / 100
    return [
        *(headless if len(headless) > allowed else ()),
        *(each for each in found if each.startswith("See ")),
    ]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = docstrings_of(CODE_EXCEPTIONS, inside=False)

    assert len(found) > 3000
    assert docstring_faults(found) == []


def test_a_docstring_says_more_than_the_name_below_which_it_stands() -> None:
    found = {module.name: repeated_names(module.tree) for module in modules().values()}

    assert {name: repeats for name, repeats in found.items() if repeats} == {}


def test_docstrings_that_repeat_a_name_are_seen() -> None:
    module = '''
class OpenStore:
    """An open store."""

    def close(self):
        """Close it."""

    def read(self, key: str) -> bytes:
        """Return the bytes of a key."""

    def stop(self):
        """Stop it, within ten seconds."""

def parsed(text): ...
'''

    assert repeated_names(ast.parse(module)) == ["OpenStore", "close", "read"]


def test_an_exception_of_the_code_has_a_reason_and_is_still_one() -> None:
    for folder, reason in CODE_EXCEPTIONS.items():
        assert len(reason.split()) >= 4, folder
        faults_there = docstring_faults(docstrings_of({folder: ""}, inside=True))
        assert faults_there != [], f"{folder} is no exception any more: remove it from the list"


def test_docstrings_of_each_kind_are_found() -> None:
    module = '''"""A module. It has two sentences."""

SIZE = 1
"""Bytes."""

class Peer:
    """A client."""

    name: str
    """The name of it."""

    def close(self):
        """Close it."""
        self.name = ""
        """What it was."""
        self.close()
        """No docstring."""
'''
    found = docstrings(ast.parse(module))

    assert sorted(map(opening, found)) == [
        "A client.",
        "A module.",
        "Bytes.",
        "Close it.",
        "The name of it.",
        "What it was.",
    ]
    assert docstring_faults(found) == ["What it was."]
    assert docstring_faults(["See `Peer`."]) == ["See `Peer`."]


def test_the_notes_of_the_first_release_fit_on_one_screen() -> None:
    notes = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("\n## Unreleased: 0.1.0\n")[2]

    assert 5 < len(notes.splitlines()) <= 80


def test_pages_are_found() -> None:
    assert len(PAGES) > 25
    assert all(Path(ROOT / page).is_file() for page in PAGES)


def test_code_tables_headings_and_links_are_no_prose() -> None:
    text = """# A heading of some length

One sentence with `some code()` in it. A [link of four words](https://a.example/b.c?d) ends here.

| a table | is no prose at all |
|---|---|

```sh
this is code and not prose
```

* An item without an end
* Another item here. With two sentences
"""

    assert prose(text).sentences == (
        "One sentence with Code in it.",
        "A link of four words ends here.",
        "An item without an end",
        "Another item here.",
        "With two sentences",
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (" ".join(["word"] * 17) + ".", "17.0 words a sentence"),
        ("Two short words. " * 10 + " ".join(["word"] * 31) + ".", "are long"),
        ("You run it now. " * 20 + "Who shares waits for nobody.", "open headless"),
    ],
)
def test_a_text_that_is_hard_to_read_is_seen(text: str, fault: str) -> None:
    (said,) = faults(prose(text))

    assert fault in said


def test_a_question_may_begin_with_what_or_who() -> None:
    assert prose("Who shares a process? You choose it.").headless == []
