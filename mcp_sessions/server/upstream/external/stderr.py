from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

_CHUNK = 65_536
_LINE = 1_000
"""Characters of a line that are logged, at most."""

_LINES = 100
"""Lines that are logged in each second, at most."""

_LONGEST_REASON = 300
"""Characters of a line that a client gets, at most."""

_KEPT = 30
"""Last lines that are searched for its last words."""

_LEAST_SECRET = 6
"""Characters, at least, of an environment value that is hidden. Shorter ones stand in any text."""

_NODE = re.compile(r"Node\.js v\d")
"""Last line of a crash of Node, which does not name the reason."""

_FRAME = "│║┃├╟┠╞ "
"""What some programs draw around a line."""

_RAISED = re.compile(r"(?:Uncaught )?[\w.]*(?:Error|Exception)\b.*:|\[?[\w.]+Error\b")
_NPM = re.compile(
    r"npm (?:error|ERR!)\s*"
    r"(?:\d{3}\s*|code \w+|A complete log .*|\S*\.log|\d{3} (?:Note that|tarball,) .*)?$"
)
"""Lines around the reason for which npm failed."""


class StandardError:
    """Read the standard error of one process.

    Args:
        label: Returns the name of the process for the log.
        given: Variables that its environment alone has, by name. In all output ``$NAME`` replaces
            each value.
    """

    def __init__(
        self, stream: asyncio.StreamReader, label: Callable[[], str], given: Mapping[str, str]
    ) -> None:
        self._stream = stream
        self._label = label
        self._secrets = _secrets(given)
        self._longest = max((len(value.encode()) for value, _ in self._secrets), default=0)
        self._lines = deque[str](maxlen=_KEPT)
        self._second, self._logged = 0.0, 0

    @property
    def last_words(self) -> str:
        return reason_of(self._lines)[:_LONGEST_REASON]

    async def read(self) -> None:
        rest, is_cut = b"", False
        while chunk := await self._stream.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if is_cut:
                # The rest may begin in the middle of a hidden value.
                is_cut, lines, rest = not lines, lines[1:], rest if lines else b""
            elif len(rest) > _CHUNK + self._longest:
                is_cut, lines, rest = True, [*lines, rest], b""
            self._take([line for line in lines if line.strip()])
        if rest.strip():
            self._take([rest])

    def _take(self, lines: Sequence[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        last = len(lines) - _KEPT
        for number, line in enumerate(lines):
            if now - self._second >= 1:
                if self._logged > _LINES:
                    left_out = self._logged - _LINES
                    logger.warning("%s: %d lines were dropped", self._label(), left_out)
                self._second, self._logged = now, 0
            self._logged += 1
            if self._logged <= _LINES or number >= last:
                self._say(self._printable(line))

    def _say(self, text: str) -> None:
        self._lines.append(text)
        if self._logged <= _LINES:
            logger.info("%s: %s", self._label(), text.strip())

    def _printable(self, line: bytes) -> str:
        # A value that is cut would not be found. So the search covers more than is logged.
        text = line[: 4 * _LINE + self._longest].decode("utf-8", "replace").rstrip()
        for value, name in self._secrets:
            text = text.replace(value, f"${name}")
        return "".join(character if character.isprintable() else "?" for character in text[:_LINE])


def reason_of(lines: Iterable[str]) -> str:
    """Return the last of these lines, without the lines with which some programs end: Node its
    version, npm the path of its log.
    """
    said = [line for line in lines if any(character.isalnum() for character in line)]
    if said and _NODE.match(said[-1]):
        raised = [line for line in said if _RAISED.match(line)]
        said = raised or said[:-1] or said
    return next((line for line in reversed(said) if not _NPM.match(line)), "").strip(_FRAME)


def _secrets(given: Mapping[str, str]) -> list[tuple[str, str]]:
    lines = {
        line.strip(): name
        for name, value in given.items()
        for line in (value, *value.splitlines())
        if len(line.strip()) >= _LEAST_SECRET
    }
    return sorted(lines.items(), key=lambda each: -len(each[0]))
