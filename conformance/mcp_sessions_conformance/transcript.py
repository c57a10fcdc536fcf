"""What went over the wire while one vector was played: the evidence of a failure."""

import time

MAX_LINES = 200
"""Lines of one vector that are kept; a server that floods is not all recorded."""

MAX_CHARACTERS = 700
"""Characters of one line that are kept."""


class Transcript:
    """Lines, oldest first. Credentials are never among them."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.lines: list[str] = []
        self.left_out = 0
        """Lines that came after the last one that was kept."""

    def note(self, connection: str, direction: str, text: str) -> None:
        """Keep a line.

        Args:
            connection: The vector's name for it.
            direction: ``->`` to the server, ``<-`` from it, ``--`` for what is no message.
        """
        if len(self.lines) >= MAX_LINES:
            self.left_out += 1
            return
        if len(text) > MAX_CHARACTERS:
            text = f"{text[:MAX_CHARACTERS]}… ({len(text)} characters)"
        took = time.monotonic() - self._begun
        self.lines.append(f"{took:7.3f} {connection} {direction} {text}")
