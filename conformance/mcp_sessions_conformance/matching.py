"""Shapes: what a JSON value has to look like.

A shape is JSON. A literal stands for itself. An object asks for its own members and ignores
others; an array asks for exactly its elements. Members that begin with ``$`` are operators, and
all of them must hold in addition to the other members:

============== ==============================================================================
operator       holds if
============== ==============================================================================
``$type``      the value is a ``string``, ``integer``, ``number``, ``boolean``, ``object``,
               ``array``, ``null``, a ``timestamp`` (RFC 3339, UTC) or an ``event-id`` (a string
               or an integer)
``$pattern``   the value is a string in which the regular expression is found
``$not``       the value does not have that shape
``$any``       the value has one of these shapes
``$exact``     the value equals this, with no further members anywhere
``$keys``      the value is an object with exactly these members, or those of this object
``$contains``  the value is an array, and one of its elements has that shape
``$every``     the value is an array, and each of its elements has that shape
``$length``    the value is a string or an array whose length has that shape
``$atLeast``   the value is a number, and no smaller
``$atMost``    the value is a number, and no larger
``$after``     the value is an event id that was issued later than this one
``$absent``    (``true``) there is no such member; (``false``) there is one, whatever it is
============== ==============================================================================
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from mcp_sessions_conformance.values import Json, is_timestamp, issued_after


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
"""Stands for a member that is not there."""


def mismatch(shape: Any, value: Any, where: str = "") -> str | None:
    """Why ``value`` has not that shape, in a sentence; None: it has it.

    Args:
        where: A JSON pointer to the value, for the sentence.
    """
    if isinstance(shape, dict):
        members = cast("Json", shape)
        operators = {name: members[name] for name in members if name.startswith("$")}
        wrong = _operators(operators, value, where)
        if wrong is not None or (operators and len(operators) == len(members)):
            return wrong
        rest = {name: members[name] for name in members if name not in operators}
        return _object(rest, value, where)
    if value is MISSING:
        return f"{where or '/'} is missing; expected {shape!r}"
    if isinstance(shape, list):
        return _array(cast("list[Any]", shape), value, where)
    if not same(shape, value):
        return f"{where or '/'} is {_short(value)}, expected {_short(shape)}"
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; ``true`` is not ``1``."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        left, right = cast("Json", one), cast("Json", other)
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(one, list) and isinstance(other, list):
        mine, theirs = cast("list[Any]", one), cast("list[Any]", other)
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(one == other)


def _object(shape: Json, value: Any, where: str) -> str | None:
    if value is MISSING:
        return f"{where or '/'} is missing"
    if not isinstance(value, dict):
        return f"{where or '/'} is {_short(value)}, expected an object"
    found = cast("Json", value)
    for name, inner in shape.items():
        wrong = mismatch(inner, found.get(name, MISSING), f"{where}/{name}")
        if wrong is not None:
            return wrong
    return None


def _array(shape: list[Any], value: Any, where: str) -> str | None:
    if not isinstance(value, list):
        return f"{where or '/'} is {_short(value)}, expected an array"
    found = cast("list[Any]", value)
    for index, inner in enumerate(shape[: len(found)]):
        wrong = mismatch(inner, found[index], f"{where}/{index}")
        if wrong is not None:
            return wrong
    if len(found) != len(shape):
        return f"{where or '/'} has {len(found)} elements, expected {len(shape)}: {_short(found)}"
    return None


def _operators(shape: Json, value: Any, where: str) -> str | None:
    for name, argument in shape.items():
        if name == "$absent":
            if (value is MISSING) != argument:
                there = "is missing" if value is MISSING else f"is there: {_short(value)}"
                return f"{where or '/'} {there}"
            continue
        if name == "$not":
            if mismatch(argument, value, where) is None:
                return f"{where or '/'} is {_short(value)}, which it must not be"
            continue
        if value is MISSING and name != "$any":
            return f"{where or '/'} is missing; expected {_short(shape)}"
        wrong = _OPERATORS[name](argument, value, where)
        if wrong is not None:
            return wrong
    return None


def _type(argument: str, value: Any, where: str) -> str | None:
    holds = _TYPES[argument](value)
    return None if holds else f"{where or '/'} is {_short(value)}, expected a {argument}"


def _pattern(argument: str, value: Any, where: str) -> str | None:
    if isinstance(value, str) and re.search(argument, value):
        return None
    return f"{where or '/'} is {_short(value)}, expected a match of {argument}"


def _any(argument: list[Any], value: Any, where: str) -> str | None:
    wrong = [mismatch(shape, value, where) for shape in argument]
    return None if None in wrong else "; or ".join(str(sentence) for sentence in wrong)


def _exact(argument: Any, value: Any, where: str) -> str | None:
    if same(argument, value):
        return None
    return f"{where or '/'} is {_short(value)}, expected exactly {_short(argument)}"


def _keys(argument: list[str] | Json, value: Any, where: str) -> str | None:
    if isinstance(value, dict) and set(cast("Json", value)) == set(argument):
        return None
    return f"{where or '/'} is {_short(value)}, expected exactly the members {argument}"


def _contains(argument: Any, value: Any, where: str) -> str | None:
    if isinstance(value, list):
        for element in cast("list[Any]", value):
            if mismatch(argument, element, where) is None:
                return None
    return f"{where or '/'} is {_short(value)}, expected an element like {_short(argument)}"


def _every(argument: Any, value: Any, where: str) -> str | None:
    if not isinstance(value, list):
        return f"{where or '/'} is {_short(value)}, expected an array"
    for index, element in enumerate(cast("list[Any]", value)):
        wrong = mismatch(argument, element, f"{where}/{index}")
        if wrong is not None:
            return wrong
    return None


def _length(argument: Any, value: Any, where: str) -> str | None:
    if not isinstance(value, (str, list)):
        return f"{where or '/'} is {_short(value)}, expected something with a length"
    return mismatch(argument, len(cast("str | list[Any]", value)), f"{where}#length")


def _at_least(argument: float, value: Any, where: str) -> str | None:
    if _is_number(value) and value >= argument:
        return None
    return f"{where or '/'} is {_short(value)}, expected at least {argument}"


def _at_most(argument: float, value: Any, where: str) -> str | None:
    if _is_number(value) and value <= argument:
        return None
    return f"{where or '/'} is {_short(value)}, expected at most {argument}"


def _after(argument: Any, value: Any, where: str) -> str | None:
    if issued_after(argument, value):
        return None
    return f"{where or '/'} is {_short(value)}, expected an id after {_short(argument)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
    "timestamp": is_timestamp,
    "event-id": lambda value: isinstance(value, str) or _is_integer(value),
}

_OPERATORS: Mapping[str, Callable[[Any, Any, str], str | None]] = {
    "$type": _type,
    "$pattern": _pattern,
    "$any": _any,
    "$exact": _exact,
    "$keys": _keys,
    "$contains": _contains,
    "$every": _every,
    "$length": _length,
    "$atLeast": _at_least,
    "$atMost": _at_most,
    "$after": _after,
}


def _short(value: Any) -> str:
    text = "missing" if value is MISSING else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
