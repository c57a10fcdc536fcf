"""Read the messages of a child: each is an answer, a question or a notification, or cannot be read.
Then the request behind it is found by its structure.

Rules, owned by ``tests/server/upstream/external/test_reading.py``:

1. No text of a server raises anything but ``ValueError`` here.
2. An answer has a result or an error. A word inside of those means nothing.
3. Text that is no JSON has a structure all the same: NaN and Infinity, as Python writes them,
   numbers that are too large, bytes that are no UTF-8, half a surrogate pair, a byte order mark.
4. A value with too many levels to be written again is not read: code that copies or writes it would
   fail.
5. A server may write all members that it knows: a member that is null counts as absent.
6. A line may have several messages in an array.
7. An answer that ends its line is an error of its request if other text is before it, as a
   ``print`` without a new line leaves it. A server may print what a client sent to it, as
   ``{'q': '{"id":7}'}``. That is no answer: the quotes have their end behind it.
8. A line that is no message costs the one request that it answers.
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
    AnyMessage,
    Malformed,
    RequestId,
    decode,
    decode_with_surrogates,
    entries_of,
    id_of,
    members_of,
    parse,
)
from mcp_sessions.core.outline import Outline

NO_JSON: Final = "is no JSON"

_LEVELS: Final = 250
"""Levels of a value that can be copied and written inside of any message."""

_BOM: Final = b"\xef\xbb\xbf"
_DIGITS: Final = 18
_ANSWER: Final = re.compile(rb'\{\s*"(?:jsonrpc|id|result|error)"')
_TRIES: Final = 8
"""Places, at most, at which an answer behind other text may begin."""

_END: Final = 65_536
"""Bytes at the beginning of a broken message that are searched for its members."""

_ENDING: Final = 100
"""Bytes at its end that are searched for its id."""

_LAST_ID = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')


@dataclass(frozen=True, slots=True)
class Unreadable:
    why: str
    """Reason, in words that continue "the answer"."""

    id: RequestId | None
    """Id of the request that it answers or asks. None: it has none, or none was found."""

    is_answer: bool
    has_method: bool
    """Whether it is a request or a notification. Neither this nor an answer: its kind is
    unknown.
    """


def more_than(longest: int) -> str:
    return f"more than {longest} bytes (max_answer)"


def own_id(given: object) -> int | None:
    """Return the number of the layer's own request that a server gives back. None: it is none of
    them. Some servers write each number as a text, or with a fraction.
    """
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= _DIGITS:
        return int(given) if str(int(given)) == given else None
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def messages_of(line: bytes) -> Iterator[AnyMessage | Unreadable]:
    """Return the messages in a text that is not one. They may stand in an array (which 2025-03-26
    allows), behind a byte order mark, or have members that mean nothing. A part that is no message
    comes as `Unreadable`.
    """
    line = line.removeprefix(_BOM)
    try:
        value: object = _decoded(line)
    except ValueError:
        if b"{" in line:
            yield from _broken(line)
        else:
            # Most output of programs takes this way. It is quick.
            yield Unreadable(NO_JSON, None, False, False)
        return
    deep = is_deep(line, value)
    for said in _elements(value):
        if deep and _has_many_levels(said):
            yield _about(said, "has too many levels")
        else:
            yield _message_of(said)


def _elements(value: object) -> Iterator[object]:
    left = [value]
    while left:
        said = left.pop()
        if isinstance(said, list) and said:
            left += reversed(cast("list[object]", said))
        else:
            yield said


def _broken(line: bytes) -> Iterator[Unreadable]:
    try:
        # Python writes NaN. This is quicker than a look at each byte.
        yield from (_about(each, NO_JSON) for each in _elements(_loosely(line)))
    except ValueError:
        yield _last_of(line) or of_ends(line, line, NO_JSON)


def _loosely(line: bytes) -> object:
    """Decode what many programs take for JSON.

    Raises:
        ValueError: It is not even that.
    """
    try:
        return json.loads(line.decode("utf-8", "replace"), parse_int=_number)
    except RecursionError:
        raise ValueError("too many levels") from None


def _last_of(line: bytes) -> Unreadable | None:
    """Return the answer that ends a line, behind other text. None: there is none."""
    line = line.rstrip(b"] \t\r\n")
    for found in islice(_ANSWER.finditer(line, 1), _TRIES):
        try:
            value = _loosely(line[found.start() :])
        except ValueError:
            continue
        said = _about(value, "stands behind other output on its line")
        return said if said.is_answer and said.id is not None else None
    return None


def is_deep(line: bytes, value: object) -> bool:
    if len(line) < 2 * _LEVELS or line.count(b"[") + line.count(b"{") <= _LEVELS:
        return False
    try:
        # It is quicker than a look at the value, and refuses more than 254 levels.
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
    return [*members_of(value).values(), *entries_of(value)]


def outlined(outline: Outline, why: str) -> Unreadable:
    return Unreadable(why, outline.id, outline.is_answer, outline.has_method)


def of_ends(head: bytes, tail: bytes, why: str) -> Unreadable:
    outline = Outline()
    outline.feed(head[:_END])
    known = outlined(outline, why)
    found = _LAST_ID.search(tail[-_ENDING:]) if known.is_answer and known.id is None else None
    return Unreadable(why, int(found[1]), True, False) if found is not None else known


def is_reply(value: object) -> bool:
    members = members_of(value)
    return members.get("result") is not None or members.get("error") is not None


def _decoded(line: bytes) -> object:
    """Decode a line as :func:`decode`. An answer may have half a surrogate pair, as a handler's
    may.

    Raises:
        ValueError: As :func:`decode` raises it.
    """
    try:
        return decode(line)
    except ValueError:
        value: object = decode_with_surrogates(line)
        if not is_reply(value):
            raise
        return value


def _message_of(value: object) -> AnyMessage | Unreadable:
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
        # If it is neither, the caller with that id waits for an answer.
        is_answer = replies or (not asks and id_of(members) is not None)
        return Unreadable(f"is malformed: {malformed}", id_of(members), is_answer, asks)


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


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else 0.5
