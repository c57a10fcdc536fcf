"""The tests of this folder run in real time: other processes know no other."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio's own loop."""
    return "asyncio"
