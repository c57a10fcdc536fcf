"""Each example runs a layer in an event loop of its own; see `tests.support.virtual_time`."""

import gc

import pytest


@pytest.fixture(autouse=True)
def heap_is_frozen() -> None:
    """Each layer that starts collects garbage once. It need not look through the whole test
    run's heap each time: that would be nine tenths of the time that these tests take.
    """
    gc.freeze()
