"""Check what a program passes to a public name, by the annotations of that name.

Python itself fails deep inside, or at the first request. Rules, owned by
``tests/core/test_argument_types.py``:

1. A wrong type is one line. It names the argument and what is wanted. The value may be a secret, so
   it is shown only where one of a few texts is wanted. A name that is nearly an argument gets a
   hint.
2. What an annotation does not say at run time is not checked.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast

from mcp_sessions.errors import ConfigurationError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Made = TypeVar("_Made")

_SHOWN: Final = 40
"""Characters of a text that is none of a few."""

_WORDS: Final[Mapping[object, str]] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Callable: "a function",
    Mapping: "a mapping",
}


def checked(
    *unchecked: str, **words: str
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Check the arguments of each call of a function.

    Args:
        unchecked: Arguments that the function checks itself.
        words: What is wanted of an argument, where its annotation does not say what to write.
    """

    def around(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        signature = inspect.signature(function)

        @cache
        def kinds() -> Mapping[str, object]:
            found = {name: it.annotation for name, it in signature.parameters.items()}
            return _resolved(found, cast("Any", function).__globals__)

        @wraps(function)
        def call(*args: _Given.args, **options: _Given.kwargs) -> _Result:
            try:
                given = signature.bind(*args, **options).arguments
            except TypeError:
                _refuse_unknown(function.__qualname__, options, signature.parameters)
                # Python says the rest best.
                return function(*args, **options)
            for name, kind in kinds().items():
                if name in given and name not in unchecked:
                    is_many = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                    for value in given[name] if is_many else (given[name],):
                        _check(name, value, kind, words.get(name))
            return function(*args, **options)

        return call

    return around


def hinting(made: type[_Made]) -> type[_Made]:
    """Let a dataclass name the field that is near to one that it does not have."""
    kept = made.__init__
    names = [each.name for each in fields(cast("Any", made))]

    @wraps(kept)
    def init(self: _Made, *args: Any, **options: Any) -> None:
        _refuse_unknown(kept.__qualname__, options, names)
        kept(self, *args, **options)

    made.__init__ = init
    return made


def _refuse_unknown(called: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Say what was meant. Python says only what is unknown.

    Raises:
        TypeError: A name is nearly one that is known.
    """
    for name in {*given}.difference(known):
        if hint := did_you_mean(name, known):
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")


def check_fields(made: Any) -> None:
    """Check the fields of a dataclass.

    Raises:
        ConfigurationError: One has another type.
    """
    for name, kind in _kinds_of(cast("type[Any]", type(made))).items():
        _check(name, getattr(made, name), kind, None)


@cache
def _kinds_of(made: type) -> Mapping[str, object]:
    module = vars(inspect.getmodule(made))
    return _resolved({field.name: field.type for field in fields(cast("Any", made))}, module)


def _resolved(found: Mapping[str, Any], names: dict[str, Any]) -> dict[str, object]:
    resolved: dict[str, object] = {}
    for name, kind in found.items():
        try:
            resolved[name] = eval(kind, names) if isinstance(kind, str) else kind
        except NameError:
            # It is imported for type checkers only (rule 2).
            continue
    return {name: kind for name, kind in resolved.items() if kind is not inspect.Parameter.empty}


def _check(name: str, value: object, kind: object, words: str | None) -> None:
    wrong = _wrong(name, value, kind)
    if wrong is not None:
        which, found, wanted = wrong
        said = words if words is not None and which == name else _words(wanted)
        # A text in place of one of a few is no secret.
        is_choice = typing.get_origin(wanted) is Literal and isinstance(found, str)
        shown = repr(found[:_SHOWN]) if is_choice and isinstance(found, str) else _named(found)
        raise ConfigurationError(f"{which} must be {said}, not {shown}")


def _wrong(name: str, value: Any, kind: Any) -> tuple[str, object, object] | None:
    """Return what has another kind: its name, itself, and the kind that is wanted. None: nothing
    has.
    """
    if not _fits(value, kind):
        return name, value, kind
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        each = [_wrong(name, value, part) for part in parts if _fits(value, part)]
        return None if None in each else each[0]
    if not parts or not isinstance(value, Collection) or not isinstance(origin, type):
        return None
    # "each of each value of x" would say no more.
    of_it = name if name.startswith("each ") else f"each of {name}"
    inner = [(of_it, each, parts[0]) for each in cast("Collection[Any]", value)]
    if issubclass(origin, Mapping):
        values = cast("Mapping[Any, Any]", value).values()
        inner += [(f"each value of {name}", each, parts[1]) for each in values]
    return next(filter(None, (_wrong(*each) for each in inner)), None)


def _fits(value: Any, kind: Any) -> bool:
    """Whether it is of that kind, whatever is in it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    wanted = origin or kind
    if wanted in (types.UnionType, typing.Union):
        return any(_fits(value, part) for part in parts)
    if wanted is Literal:
        return value in parts
    if wanted in (None, types.NoneType):
        return value is None
    if not isinstance(wanted, type):
        return True
    if wanted in (int, float):
        numbers = (int, float) if wanted is float else int
        return isinstance(value, numbers) and not isinstance(value, bool)
    if getattr(wanted, "_is_protocol", False):
        # A path has `open`, and is no jar.
        needed = _members(wanted)
        is_other = isinstance(value, type) or (
            hasattr(value, "__fspath__") and "__fspath__" not in needed
        )
        return not is_other and all(hasattr(value, member) for member in needed)
    is_text = isinstance(value, (str, bytes)) and wanted not in (str, bytes)
    return isinstance(value, wanted) and not (is_text and issubclass(wanted, Iterable))


@cache
def _members(protocol: type) -> frozenset[str]:
    kinds = (kind for kind in protocol.__mro__ if getattr(kind, "_is_protocol", False))
    own = ({*vars(kind), *vars(kind).get("__annotations__", ())} for kind in kinds)
    return frozenset(name for names in own for name in names if not name.startswith("_"))


def _words(kind: Any) -> str:
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(part) for part in parts if part is not types.NoneType)
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin in _WORDS:
        return _WORDS[origin]
    if getattr(origin, "__name__", "") == "PathLike":
        return "a path"
    if isinstance(origin, type) and issubclass(cast("type[Any]", origin), Iterable) and parts:
        return "a list of texts" if parts[0] is str else "a list"
    return _article(str(getattr(origin, "__name__", origin)))


def _named(value: object) -> str:
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    return _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a hint for a word that is none of those that are known. Empty: none is near."""
    from difflib import get_close_matches

    names = {each.lower(): each for each in known}
    near = get_close_matches(text.lower(), names, 1, 0.75)
    return f"; did you mean {names[near[0]]}?" if near else ""
