"""JSON values and how vectors speak of them: templates, pointers, event ids, spoilt copies."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

Json = dict[str, Any]
"""A JSON object."""

SESSION = "io.modelcontextprotocol/session"
"""The member of ``_meta`` that names a session."""

KEY = "io.github.mcp-sessions/requestKey"
"""The member of ``_meta`` that carries a request key."""

EXTENSION = "io.github.mcp-sessions/sessions"
"""The extension's name among the capabilities."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def as_object(value: Any) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


class UnknownName(Exception):
    """A template names what was never captured, or a pointer points nowhere."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return self.what


def filled(template: Any, names: Mapping[str, Any]) -> Any:
    """``template`` with each ``${name}`` replaced.

    A string that is one reference and nothing else becomes the value itself, of whatever
    type; within a longer string the value is inserted as text.

    Raises:
        UnknownName: There is no such name.
    """
    if isinstance(template, str):
        whole = _REFERENCE.fullmatch(template)
        if whole is not None:
            return _value(whole[1], names)
        return _REFERENCE.sub(lambda found: as_text(_value(found[1], names)), template)
    if isinstance(template, list):
        return [filled(element, names) for element in cast("list[Any]", template)]
    if isinstance(template, dict):
        members = cast("Json", template)
        return {filled(name, names): filled(value, names) for name, value in members.items()}
    return template


def _value(name: str, names: Mapping[str, Any]) -> Any:
    if name not in names:
        raise UnknownName(f"${{{name}}} was never captured")
    return names[name]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def pointed(document: Any, pointer: str) -> Any:
    found = document
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            if isinstance(found, list):
                found = cast("list[Any]", found)[int(name)]
            else:
                found = cast("Json", found)[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise UnknownName(f"nothing at {pointer} to capture") from None
    return found


def issued_after(earlier: Any, later: Any) -> bool:
    """Whether an event id was issued after another, as far as the documents order them.

    Integers go by value, and so do strings of digits; other strings go by their characters.
    """
    if isinstance(earlier, bool) or isinstance(later, bool):
        return False
    if isinstance(earlier, int) and isinstance(later, int):
        return later > earlier
    if isinstance(earlier, str) and isinstance(later, str):
        if earlier.isdecimal() and later.isdecimal():
            return int(later) > int(earlier)
        return later > earlier
    return False


def is_timestamp(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", value
    ):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def spoilt(text: str, how: str) -> str:
    """Spoil a token: ``flip`` changes one character in its middle, ``truncate`` drops its second
    half, ``extend`` adds a character, ``oversize`` makes it 64 KiB long, ``ahead`` replaces the
    digits at its end by nines, nine of them at least, and ``next`` adds one to these digits.
    """
    middle = len(text) // 2
    match how:
        case "flip":
            other = "B" if text[middle : middle + 1] == "A" else "A"
            return f"{text[:middle]}{other}{text[middle + 1 :]}"
        case "truncate":
            return text[:middle]
        case "extend":
            return f"{text}A"
        case "ahead":
            return re.sub(r"\d+$", lambda digits: "9" * max(9, len(digits[0])), text)
        case "next":
            return re.sub(r"\d+$", lambda d: str(int(d[0]) + 1).zfill(len(d[0])), text)
        case "oversize":
            return text + "A" * (65_536 - len(text))
        case _:
            raise AssertionError("the schema lists the ways")
