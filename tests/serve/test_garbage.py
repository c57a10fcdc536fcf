"""What the collector of a serving process looks at."""

import gc
import weakref

import pytest

from mcp_sessions.serve.garbage import (
    FEW,
    Collections,
    set_aside_everything,
    set_aside_if_many,
    setting_aside,
)


class Session:
    itself: "Session | None" = None


def test_what_became_much_is_set_aside_and_goes_when_nobody_refers_to_it() -> None:
    set_aside_everything()
    sessions = [Session() for _ in range(2_000)]
    gone = weakref.ref(sessions[0])
    gc.collect()
    before = gc.get_freeze_count()

    assert not set_aside_if_many(10_000)
    assert gc.get_freeze_count() <= before

    assert set_aside_if_many(1_000)
    assert gc.get_freeze_count() >= before + 2_000
    assert len(gc.get_objects(generation=2)) < 1_000
    sessions.clear()
    assert gone() is None


def test_what_was_much_and_is_garbage_is_collected_and_not_set_aside() -> None:
    set_aside_everything()
    sessions = [Session() for _ in range(2_000)]
    for session in sessions:
        session.itself = session
    gc.collect()
    frozen = gc.get_freeze_count()
    session = None
    sessions.clear()

    assert not set_aside_if_many(1_000)
    assert gc.get_freeze_count() <= frozen
    assert len(gc.get_objects(generation=2)) < 1_000


def test_it_is_looked_again_as_soon_as_something_has_become_old() -> None:
    set_aside_everything()
    looking = Collections(2_000)
    sessions = [Session() for _ in range(3_000)]
    gc.collect()
    frozen = gc.get_freeze_count()

    looking.look()
    assert gc.get_freeze_count() >= frozen + 3_000

    frozen = gc.get_freeze_count()
    sessions += [Session() for _ in range(3_000)]
    gc.collect(1)
    looking.look()
    assert gc.get_freeze_count() >= frozen + 3_000


def test_what_replaces_what_was_set_aside_is_set_aside_before_it_is_everything() -> None:
    """The collector never begins by itself there, and then had to look at all at once."""
    sessions = [Session() for _ in range(20_000)]
    set_aside_everything()
    looking = Collections(3_000)
    looking.look()
    most = 0
    for number in range(len(sessions)):
        sessions[number] = Session()
        if number % 1_000 == 0:
            looking.look()
            most = max(most, len(gc.get_objects()))
    assert most < 8_000


def test_what_replaces_what_was_set_aside_is_counted_once_and_not_in_each_look() -> None:
    """Ten times a second each of thousands of idle streams was counted, for most of what they
    cost: it stayed new.
    """
    sessions = [Session() for _ in range(20_000)]
    set_aside_everything()
    looking = Collections(10_000)
    looking.look()
    frozen = gc.get_freeze_count()
    for number in range(3_000):
        sessions[number] = Session()
    looking.look()
    assert len(gc.get_objects(generation=0)) < FEW
    assert gc.get_freeze_count() <= frozen - 3_000
    for number in range(3_000, 13_000):
        sessions[number] = Session()
    looking.look()
    assert gc.get_freeze_count() >= frozen - 1_000


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_modules_load_and_they_are_set_aside(collects: bool) -> None:
    """However that ends, the collector is as it was."""
    was, before, sessions = gc.isenabled(), gc.get_freeze_count(), list[Session]()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), setting_aside():
            collections = [each["collections"] for each in gc.get_stats()]
            sessions += [Session() for _ in range(20_000)]
            assert [each["collections"] for each in gc.get_stats()] == collections
            raise ImportError
        assert gc.isenabled() is collects
        assert gc.get_freeze_count() >= before + 20_000
        assert len(sessions) == 20_000
    finally:
        (gc.enable if was else gc.disable)()
