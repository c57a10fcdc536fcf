"""The tests of this folder run where time jumps; see `tests.support.virtual_time`."""

import gc

import pytest

from tests.support.virtual_time import VIRTUAL, Backend


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


@pytest.fixture(autouse=True)
def heap_is_frozen() -> None:
    """Each layer that starts collects garbage once. It need not look through the whole test
    run's heap each time: that would be nine tenths of the time that these tests take.
    """
    gc.freeze()
