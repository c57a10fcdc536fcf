"""The tests of this folder run where time jumps; see `tests.support.virtual_time`.

Most of them begin with a world of their own (``w``), a client of the modern era (``client``) and a
session that it started (``session``).
"""

from collections.abc import AsyncGenerator

import pytest

from tests.support.modern import ModernClient
from tests.support.virtual_time import VIRTUAL, Backend
from tests.support.world import World, world


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


@pytest.fixture
async def w() -> AsyncGenerator[World]:
    async with world() as running:
        yield running


@pytest.fixture
def client(w: World) -> ModernClient:
    return ModernClient(w.carrier)


@pytest.fixture
async def session(client: ModernClient) -> str:
    return str((await client.start())["sessionId"])
