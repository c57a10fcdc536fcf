"""What a server said that is no JSON-RPC message: what it is about, by its structure.

Rules, owned by ``tests/server/upstream/external/test_unreadable.py``:

1. Nothing that a server says raises anything but ``ValueError`` here.
2. An answer has a result or an error. A word that stands inside of those means nothing.
3. What is no JSON has a structure all the same: NaN and Infinity, as Python writes them, numbers
   that are too large, bytes that are no UTF-8, half a surrogate pair, a byte order mark.
4. What has too many levels to be written again is not read: whoever copies or writes it would fail.
5. A server may write all members that it knows: one that is null is not there.
6. A line may have several messages: in an array, or one behind the other. Each is read by itself.
   One that cannot be read costs nothing but itself.
7. A line may have text before its message, as a ``print`` without a new line leaves it. No message
   is read behind a quote or a brace of such text, nor behind quotes of another language. A server
   may print what a client sent to it, as ``{'q': '{"id":7}'}``, and that is no answer.
8. An answer behind such text that ends its line is an error of its request. A quoted text would
   have its own end behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, cast

import orjson

from mcp_sessions.core.messages import (
    Malformed,
    Message,
    RequestId,
    decode,
    decode_with_surrogates,
    id_of,
    members_of,
    parse,
)
from mcp_sessions.core.outline import Known, Outline

NO_JSON: Final = "is no JSON"

_LEVELS: Final = 250
"""What has fewer can be copied and written, whatever it is put into."""

_BOM: Final = b"\xef\xbb\xbf"
_DIGITS: Final = 18
_OBJECT: Final = re.compile(rb"\{")
_MESSAGE: Final = re.compile(rb'\{\s*"')
_ANSWER: Final = re.compile(rb'\{\s*"(?:jsonrpc|id|result|error)"')
_QUOTE: Final = re.compile(rb"""["'`{}]""")
_STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_GAP: Final = re.compile(
    rb"[\s\[\],]*+(?:(?:[\w+\-.]++|%b)\s*+[,\]][\s\[\],]*+)*+" % _STRING, re.DOTALL
)
"""What may be between two objects of an array: its other elements."""

_WITHIN: Final = re.compile(rb"""(?:[^"'`{}]++|%b)*+""" % _STRING, re.DOTALL)
_BRACES: Final = 500_000
"""Of a message that is no JSON and is followed by others on its line."""

_TRIES: Final = 8
"""Places at which an answer may begin that stands behind other text."""

_END: Final = 65_536
"""Bytes of the beginning of a message that broke off in which its members are looked for."""

_ENDING: Final = 100
"""Bytes of its end in which its id may stand."""

_LAST_ID = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Said, and no message."""

    why: str
    """In words that go on "the answer"."""

    id: RequestId | None
    """Of the request that it answers or asks; None: it has none, or none that can be found."""

    is_answer: bool
    has_method: bool
    """It asks or tells. Neither this nor an answer: nobody knows what it is."""

    @property
    def is_known(self) -> bool:
        """Whether it is known what it is."""
        return self.is_answer or self.has_method


def more_than(longest: int) -> str:
    """How a message is too large, and which option says so."""
    return f"more than {longest} bytes (max_answer)"


def own_id(given: object) -> int | None:
    """The number that a server gives back as the layer's own; None: that is none of them. Some
    servers write each number as a text, or with a fraction.
    """
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= _DIGITS:
        return int(given) if str(int(given)) == given else None
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def messages_of(line: bytes) -> Iterator[Message | Unreadable]:
    """The messages in something that is not one: those of an array (which 2025-03-26 allows), one
    behind a byte order mark, one with members that mean nothing; and what is none.
    """
    line = line.removeprefix(_BOM)
    try:
        value: object = _decoded(line)
    except ValueError:
        if b"{" in line:
            yield from _each_of(line)
        else:
            # As most of what a program prints: quickly.
            yield Unreadable(NO_JSON, None, False, False)
        return
    deep = is_deep(line, value)
    for said in _elements(value):
        if deep and _has_many_levels(said):
            yield _about(said, "has too many levels")
        else:
            yield _message_of(said)


def _elements(value: object) -> Iterator[object]:
    """Those of an array, and of arrays in it; else the value itself."""
    left = [value]
    while left:
        said = left.pop()
        if isinstance(said, list) and said:
            left += reversed(cast("list[object]", said))
        else:
            yield said


def _each_of(line: bytes) -> Iterator[Message | Unreadable]:
    """The messages of a line that is no JSON as a whole."""
    first = line.lstrip()[:1]
    at = 0
    while (start := _next(line, at, first)) is not None:
        end, has_ended = _end_of(line, start)
        said = _one_of(line[start:end])
        if not has_ended and isinstance(said, Unreadable) and not said.is_known:
            break
        yield said
        at = end
        if not has_ended:
            return
    last = _last_of(line, at)
    if last is not None:
        yield last
    elif at == 0:
        yield _outlined(line)


def _next(line: bytes, at: int, first: bytes) -> int | None:
    """Where the next message begins; None: nowhere, or nobody knows where.

    Args:
        first: The line begins with it.
    """
    if first == b"[":
        gap = _GAP.match(line, at)
        if gap is not None and line[gap.end() : gap.end() + 1] == b"{":
            return gap.end()
    found = (_OBJECT if first in (b"{", b"[") else _MESSAGE).search(line, at)
    if found is None or _QUOTE.search(line, at, found.start()) is not None:
        return None
    return found.start()


def _last_of(line: bytes, at: int) -> Unreadable | None:
    """An answer behind other text, up to the end of the line."""
    for found in islice(_ANSWER.finditer(line, at), _TRIES):
        try:
            value = _decoded(line[found.start() :])
        except ValueError:
            continue
        said = _about(value, "stands behind other output on its line")
        return said if said.is_answer and said.id is not None else None
    return None


def _end_of(line: bytes, start: int) -> tuple[int, bool]:
    """The end of the object that begins there, and whether it is known: not if the object breaks
    off, is long, or has quotes of another language.
    """
    depth, at = 0, start
    for _ in range(_BRACES):
        within = _WITHIN.match(line, at)
        at = within.end() if within is not None else at
        match line[at : at + 1]:
            case b"{":
                depth += 1
            case b"}":
                depth -= 1
            case _:
                break
        at += 1
        if depth == 0:
            return at, True
    return len(line), False


def _one_of(said: bytes) -> Message | Unreadable:
    """What a line, or a part of it, says."""
    try:
        value = _decoded(said)
    except ValueError:
        return _outlined(said)
    return _about(value, "has too many levels") if is_deep(said, value) else _message_of(value)


def is_deep(line: bytes, value: object) -> bool:
    """Whether what a line says has more levels than can be written again."""
    if len(line) < 2 * _LEVELS or line.count(b"[") + line.count(b"{") <= _LEVELS:
        return False
    try:
        # Quicker than to look at it, and refuses what has more than 254.
        orjson.dumps(value)
        return False
    except TypeError:
        return _has_many_levels(value)


def _has_many_levels(value: object) -> bool:
    level = [value]
    for _ in range(_LEVELS):
        level = [inner for each in level for inner in _within(each)]
    return bool(level)


def _within(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def outlined(outline: Outline | Known, why: str) -> Unreadable:
    """What is known of a message that was not kept."""
    return Unreadable(why, outline.id, outline.is_answer, outline.has_method)


def of_ends(head: bytes, tail: bytes, why: str) -> Unreadable:
    """What is known of a message by its beginning and its end."""
    outline = Outline()
    outline.feed(head[:_END])
    known = outlined(outline, why)
    found = _LAST_ID.search(tail[-_ENDING:]) if known.is_answer and known.id is None else None
    return Unreadable(why, int(found[1]), True, False) if found is not None else known


def is_reply(value: object) -> bool:
    """Whether a decoded value answers something."""
    members = members_of(value)
    return members.get("result") is not None or members.get("error") is not None


def _decoded(line: bytes) -> object:
    """As :func:`decode`. An answer may have half a surrogate pair, as a handler's may.

    Raises:
        ValueError: See there.
    """
    try:
        return decode(line)
    except ValueError:
        value: object = decode_with_surrogates(line)
        if not is_reply(value):
            raise
        return value


def _message_of(value: object) -> Message | Unreadable:
    members = dict(members_of(value))
    replies = is_reply(value)
    if replies:
        members = {name: it for name, it in members.items() if name != "method" and it is not None}
    elif members.get("method") is None:
        members.pop("method", None)
    if isinstance(members.get("id"), float):
        members["id"] = own_id(members["id"])
    try:
        return parse(members if isinstance(value, dict) else value)
    except Malformed as malformed:
        asks = not replies and "method" in members
        # Of one that is neither, who waits for that id waits for an answer.
        is_answer = replies or (not asks and id_of(members) is not None)
        return Unreadable(f"is malformed: {malformed}", id_of(members), is_answer, asks)


def _outlined(line: bytes) -> Unreadable:
    """What is known of what is no JSON."""
    try:
        text = line.decode("utf-8", "replace")
        loose: object = json.loads(text, parse_constant=_constant, parse_int=_number)
    except (ValueError, RecursionError):
        return of_ends(line, line, NO_JSON)
    return _about(loose, NO_JSON)


def _about(value: object, why: str) -> Unreadable:
    members = members_of(value)
    replies = is_reply(value)
    given: Any = members.get("id")
    return Unreadable(
        why,
        own_id(given) if isinstance(given, float) else id_of(members),
        replies,
        not replies and members.get("method") is not None,
    )


def _constant(_: str) -> bool:
    return True


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else 0.5
