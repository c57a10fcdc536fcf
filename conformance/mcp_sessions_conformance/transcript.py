import time
from collections import deque

FIRST_LINES, LAST_LINES = 160, 40
"""Lines of one vector that are kept, from its beginning and its end: of a server that floods, how
it began and what came last."""

MAX_CHARACTERS = 700
"""Characters of one line that are kept."""


class Transcript:
    """Lines, oldest first. Credentials are never among them."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._noted = 0

    @property
    def lines(self) -> list[str]:
        left_out = self._noted - len(self._first) - len(self._last)
        between = [f"        … {left_out} lines left out"] if left_out else []
        return [*self._first, *between, *self._last]

    def note(self, connection: str, direction: str, text: str) -> None:
        """Keep a line.

        Args:
            connection: The vector's name for it.
            direction: ``->`` to the server, ``<-`` from it, ``--`` for what is no message.
        """
        if len(text) > MAX_CHARACTERS:
            text = f"{text[:MAX_CHARACTERS]}… ({len(text)} characters)"
        took = time.monotonic() - self._begun
        line = f"{took:7.3f} {connection} {direction} {text}"
        self._noted += 1
        if len(self._first) < FIRST_LINES:
            self._first.append(line)
        else:
            self._last.append(line)
