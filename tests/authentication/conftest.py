"""The tests of this folder run where time jumps; see `tests.support.virtual_time`."""

import pytest

from tests.support.virtual_time import VIRTUAL, Backend


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL
