"""The rules at the top of ``examples/notes_store.py``."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import notes_store
import pytest
from notes_store import InvalidName, InvalidText, Match, NoteNotFound, NotesStore, WordIndex

BAD_NAMES = [
    *("", ".", "..", "../secret", "a/b", "a\\b", "/etc/passwd", "a.md", ".hidden", "-x", "_x"),
    *("Todo", "todo ", "todo\n", "to do", "täglich", "a\0b", "%2e%2e", "x" * 65),
]


@pytest.fixture
def notes(tmp_path: Path) -> NotesStore:
    """An empty store, whose directory is not yet made."""
    return NotesStore(tmp_path / "inner" / "notes")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_the_directory_is_refused_by_every_method(
    notes: NotesStore, name: str
) -> None:
    """Rule 1."""
    with pytest.raises(InvalidName):
        notes.read(name)
    with pytest.raises(InvalidName):
        notes.write(name, "text")
    with pytest.raises(InvalidName):
        notes.append(name, "text")
    with pytest.raises(InvalidName):
        notes.delete(name)

    assert not notes.directory.exists()


@pytest.mark.parametrize("name", ["a", "0", "to-do_2", "x" * 64])
def test_a_good_name_is_the_name_of_the_file(notes: NotesStore, name: str) -> None:
    """Rule 1."""
    notes.write(name, "text")

    assert [path.name for path in notes.directory.iterdir()] == [f"{name}.md"]
    assert notes.names() == [name]


def test_what_was_written_is_read_byte_for_byte(notes: NotesStore) -> None:
    """UTF-8, and no line ending is changed."""
    text = "Zürich, 東京 \N{GRINNING FACE}\r\nsecond\u2028line\n"

    notes.write("cities", text)

    assert notes.read("cities") == text
    assert (notes.directory / "cities.md").read_bytes() == text.encode("utf-8")


def test_writing_says_whether_the_note_is_new(notes: NotesStore) -> None:
    """The server announces a new resource only then."""
    assert notes.write("todo", "one") is True
    assert notes.write("todo", "two") is False
    assert notes.read("todo") == "two"


def test_an_empty_store_has_no_notes_and_makes_no_directory(notes: NotesStore) -> None:
    """Looking changes nothing."""
    assert notes.names() == []
    assert notes.search("anything") == []
    assert not notes.directory.exists()


def test_a_note_that_is_not_there_is_named_in_the_error(notes: NotesStore) -> None:
    """Reading, appending and deleting."""
    for call in (
        lambda: notes.read("nothing"),
        lambda: notes.append("nothing", "text"),
        lambda: notes.delete("nothing"),
    ):
        with pytest.raises(NoteNotFound, match="'nothing'"):
            call()


@pytest.mark.parametrize(
    ("before", "after"), [("", "two\n"), ("one", "one\ntwo\n"), ("one\n", "one\ntwo\n")]
)
@pytest.mark.parametrize("added", ["two", "two\n"])
def test_what_is_appended_gets_lines_of_its_own(
    notes: NotesStore, before: str, after: str, added: str
) -> None:
    """Whether or not the note, or what is added, ends with a line feed."""
    notes.write("list", before)

    notes.append("list", added)

    assert notes.read("list") == after


def test_a_change_that_fails_leaves_the_old_text_and_nothing_else(
    notes: NotesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 2: the disk refuses the last step."""
    notes.write("todo", "old")

    def refuse(source: object, target: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        notes.write("todo", "new")

    assert notes.read("todo") == "old"
    assert [path.name for path in notes.directory.iterdir()] == ["todo.md"]


def test_a_text_that_no_encoding_can_write_is_refused(notes: NotesStore) -> None:
    """JSON can spell half of a surrogate pair."""
    notes.write("todo", "old")

    with pytest.raises(InvalidText):
        notes.write("todo", "\ud800")

    assert notes.read("todo") == "old"


def test_a_note_that_would_become_too_large_is_refused(
    notes: NotesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds for what is kept, not for what is added, and counts bytes."""
    monkeypatch.setattr(notes_store, "MAX_TEXT_BYTES", 8)
    notes.write("todo", "äää")

    with pytest.raises(InvalidText, match="8 bytes, not 9"):
        notes.append("todo", "b")

    assert notes.read("todo") == "äää"


def test_changes_at_the_same_time_all_happen(notes: NotesStore) -> None:
    """Rule 3: no appended line is lost."""
    notes.write("log", "")
    with ThreadPoolExecutor(8) as threads:
        for added in [threads.submit(notes.append, "log", str(number)) for number in range(100)]:
            added.result(timeout=10)

    assert sorted(map(int, notes.read("log").split())) == list(range(100))


def test_a_deleted_note_is_gone(notes: NotesStore) -> None:
    """From the disk, too."""
    notes.write("todo", "text")

    notes.delete("todo")

    assert notes.names() == []
    assert list(notes.directory.iterdir()) == []


def test_files_that_no_note_can_have_are_not_notes(notes: NotesStore) -> None:
    """Whoever put them there."""
    notes.write("todo", "text")
    for name in ("README.md", "todo.txt", ".hidden.md", "two words.md"):
        (notes.directory / name).write_text("not a note")
    (notes.directory / "folder.md").mkdir()

    assert notes.names() == ["todo"]


def test_a_search_finds_lines_with_every_word_whatever_the_case(notes: NotesStore) -> None:
    """And says where they are."""
    notes.write("a", "Bread and butter\nbread\n")
    notes.write("b", "nothing\nbutter on BREAD\n")

    assert notes.search("bread Butter") == [
        Match(name="a", line=1, text="Bread and butter"),
        Match(name="b", line=2, text="butter on BREAD"),
    ]
    assert notes.search("  ") == []


def test_a_search_stops_at_its_bound(notes: NotesStore) -> None:
    """However much there is."""
    notes.write("many", "word\n" * 100)

    assert len(notes.search("word", max_matches=3)) == 3


def test_a_note_deleted_during_a_search_is_left_out(
    notes: NotesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed, and then it was gone."""
    notes.write("here", "word")
    monkeypatch.setattr(notes, "names", lambda: ["gone", "here"])

    assert [match.name for match in notes.search("word")] == ["here"]


def test_the_word_index_knows_every_word_and_where_it_is() -> None:
    """One line per word, sorted."""
    index = WordIndex()
    index.add("b", "Bread, butter")
    index.add("a", "bread and bread")

    assert index.words == 3
    assert index.as_text() == "# Word index\n\nand: a (1)\nbread: a, b (3)\nbutter: b (1)\n"
