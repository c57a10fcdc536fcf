"""What a store of the tests hands on has nothing in common with what it got."""

import copy
from typing import Any, NamedTuple

from mcp_sessions.ids import LogEpoch, Position
from mcp_sessions.stores.records import Appended, Peer
from tests.support.copied import copied


class _Pair(NamedTuple):
    first: Any
    second: Any


def test_a_copy_is_equal_and_no_part_of_it_that_can_be_changed_is_shared() -> None:
    """It is compared with what `copy.deepcopy` makes, of each kind of value that a store has."""
    shared: dict[str, Any] = {"deep": [{"er": {1, 2}}]}
    for value in (
        {"a": shared, "b": [1, 2.5, None, True, b"x"]},
        (shared, frozenset({"x"})),
        _Pair(shared, ["x"]),
        Peer("2025-11-25", shared),
        Appended(None, Peer("2025-11-25", shared)),  # pyright: ignore[reportArgumentType]
        {Position(LogEpoch("e"), 1): shared},
        ValueError(shared),
    ):
        made, deep = copied(value), copy.deepcopy(value)
        assert type(made) is type(deep)
        assert repr(made) == repr(deep)
        shared["deep"][0]["er"].add(3)
        assert "3" in repr(value)
        assert repr(made) == repr(deep)
        shared["deep"][0]["er"].discard(3)
