"""The tests of this folder run in real time: they are asked over sockets."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio's own loop."""
    return "asyncio"
