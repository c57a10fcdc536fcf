"""The tests of this folder run where time jumps; see `tests.support.virtual_time`.

Most of them begin with a world of their own (``w``), a client after its handshake (``client``),
its GET stream (``stream``) and a session that it started (``session``). They are made in the order
of a test's parameters.
"""

from collections.abc import AsyncGenerator

import pytest

from tests.support.raw import RawClient, Reply
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
async def client(w: World) -> RawClient:
    """A client of the handshake era, connected."""
    return await w.connected()


@pytest.fixture
async def stream(client: RawClient) -> Reply:
    """The GET stream of ``client``, open."""
    return await client.get().started()


@pytest.fixture
async def session(client: RawClient) -> str:
    """The session that ``client`` started: its current one."""
    return str((await client.start())["sessionId"])
