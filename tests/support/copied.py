"""A copy of what goes to a store and comes from it, as one that travels has it.

`copy.deepcopy` does the same with a search for cycles and for what is named twice. Records have
neither, and in a simulated run it was the largest cost of all that is not the layer.
"""

import copy
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")

_AS_IT_IS = (str, int, float, bool, bytes, type(None))
"""What nobody can change."""


def copied(value: T) -> T:
    """``value``, with no part that can be changed in common with it."""
    return cast("T", _any(value))


def _any(value: Any) -> Any:
    kind = cast("type[Any]", type(value))
    return _copier(kind)(value)


@cache
def _copier(kind: Any) -> Callable[[Any], Any]:
    if kind in _AS_IT_IS or _is_a(kind, Enum):
        return _same
    if kind is dict:
        return _dict
    make = kind._make if _is_a(kind, tuple) and hasattr(kind, "_make") else kind
    if make is not kind or kind in (list, tuple, set, frozenset):
        return lambda value: make([_any(each) for each in value])
    if hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "__deepcopy__"):
        return _record(kind)
    return copy.deepcopy


def _is_a(kind: Any, other: type) -> bool:
    return issubclass(kind, other)


def _same(value: Any) -> Any:
    return value


def _dict(value: dict[Any, Any]) -> dict[Any, Any]:
    return {_any(name): _any(each) for name, each in value.items()}


def _record(kind: Any) -> Callable[[Any], Any]:
    names = [each.name for each in fields(kind)]
    new, put = kind.__new__, object.__setattr__

    def copier(value: Any) -> Any:
        made = new(kind)
        for name in names:
            put(made, name, _any(getattr(value, name)))
        return made

    return copier
