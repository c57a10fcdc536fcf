"""Notes on disk: one directory, one UTF-8 file per note. Shared by both notes servers.

It knows nothing of MCP: a name and a text go in, a text or a ``NotesError`` comes out.

Rules that must hold, and that ``tests/examples/test_notes_store.py`` owns:

1. A name can never leave the directory. It is checked, not cleaned, and then it is the
   file's name and the note's address, ``note://{name}``, without any escaping.
2. A reader sees the old text or the new one, never half of one. A change that fails
   leaves the old text and nothing else behind.
3. Two changes of one note at the same time both happen. The rule covers the threads of one process.
   Two processes must not write one directory.
"""

import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAME_RULE = "1 to 64 of a-z, 0-9, - and _, starting with a letter or digit"
MAX_TEXT_BYTES = 1_048_576
"""Encoded bytes of one note."""

# Lower case only: "Todo" and "todo" are one file on some file systems and two on others,
# and a resource must not change its meaning with the disk it lies on.
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_WORD = re.compile(r"\w+")
_SUFFIX = ".md"


class NotesError(Exception):
    """The caller asked for something that cannot be done; the message says what and why."""


class InvalidName(NotesError):
    """The name breaks ``NAME_RULE``."""


class InvalidText(NotesError):
    """The text is larger than ``MAX_TEXT_BYTES``, or is not Unicode."""


class NoteNotFound(NotesError):
    """There is no such note."""


@dataclass(frozen=True)
class Match:
    name: str
    line: int
    """Counted from 1."""
    text: str


def note_uri(name: str) -> str:
    return f"note://{name}"


class NotesStore:
    """The notes in one directory. Every method may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Made with the first note that is written; until then there are no notes."""
        self._changing = threading.Lock()

    def names(self) -> list[str]:
        """The names of all notes, sorted. Files that no note can have are not seen."""
        if not self.directory.is_dir():
            return []
        return sorted(
            path.stem
            for path in self.directory.iterdir()
            if path.suffix == _SUFFIX and _NAME.fullmatch(path.stem) and path.is_file()
        )

    def read(self, name: str) -> str:
        """The text of a note.

        Raises:
            InvalidName: The name breaks ``NAME_RULE``.
            NoteNotFound: There is no such note.
        """
        try:
            return self._path(name).read_bytes().decode()
        except FileNotFoundError:
            raise NoteNotFound(f"there is no note {name!r}") from None

    def write(self, name: str, text: str) -> bool:
        """Replace the text of a note, or make the note. True if it was made.

        Raises:
            InvalidName: The name breaks ``NAME_RULE``.
            InvalidText: The text is too large, or is not Unicode.
        """
        path = self._path(name)
        with self._changing:
            is_new = not path.exists()
            self._replace(path, text)
        return is_new

    def append(self, name: str, text: str) -> None:
        """Add ``text`` to the end of a note, as lines of their own.

        Raises:
            InvalidName: The name breaks ``NAME_RULE``.
            InvalidText: The note would become too large, or the text is not Unicode.
            NoteNotFound: There is no such note.
        """
        path = self._path(name)
        with self._changing:
            old = self.read(name)
            if old and not old.endswith("\n"):
                old += "\n"
            self._replace(path, old + (text if text.endswith("\n") else f"{text}\n"))

    def delete(self, name: str) -> None:
        """Remove a note.

        Raises:
            InvalidName: The name breaks ``NAME_RULE``.
            NoteNotFound: There is no such note.
        """
        path = self._path(name)
        with self._changing:
            try:
                path.unlink()
            except FileNotFoundError:
                raise NoteNotFound(f"there is no note {name!r}") from None

    def search(self, query: str, *, max_matches: int = 50) -> list[Match]:
        """The lines that contain every word of ``query``, whatever the case.

        A query without words finds nothing.
        """
        words = query.casefold().split()
        return list(self._matches(words, max_matches)) if words else []

    def _matches(self, words: list[str], max_matches: int) -> Iterator[Match]:
        found = 0
        for name in self.names():
            try:
                lines = self.read(name).splitlines()
            except NoteNotFound:
                continue  # deleted while we searched
            for number, line in enumerate(lines, start=1):
                folded = line.casefold()
                if all(word in folded for word in words):
                    yield Match(name=name, line=number, text=line)
                    found += 1
                    if found == max_matches:
                        return

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidName(f"a note's name is {NAME_RULE}: not {name!r}")
        return self.directory / f"{name}{_SUFFIX}"

    def _replace(self, path: Path, text: str) -> None:
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            # JSON can spell half a surrogate pair ("\ud800"); no encoding can.
            raise InvalidText("the text is not valid Unicode") from None
        if len(encoded) > MAX_TEXT_BYTES:
            raise InvalidText(f"a note has at most {MAX_TEXT_BYTES} bytes, not {len(encoded)}")
        self.directory.mkdir(parents=True, exist_ok=True)
        # The new text is complete and on the disk before it takes the name: `os.replace` is
        # atomic within one directory, and a leading dot is no note's name.
        descriptor, temporary = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".tmp")
        try:
            with open(descriptor, "wb") as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


class WordIndex:
    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}
        self._count: Counter[str] = Counter()

    @property
    def words(self) -> int:
        return len(self._names)

    def add(self, name: str, text: str) -> None:
        for word in _WORD.findall(text.casefold()):
            self._names.setdefault(word, set()).add(name)
            self._count[word] += 1

    def as_text(self) -> str:
        """The index as a note: one line per word, with the notes it is in and its count."""
        lines = [
            f"{word}: {', '.join(sorted(names))} ({self._count[word]})"
            for word, names in sorted(self._names.items())
        ]
        return "\n".join(["# Word index", "", *lines, ""])
