"""Each store says how many sessions it has, without reading one."""

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.stores.probe import measure
from mcp_sessions.testing import MakeStore
from tests.stores.every_store import every_encrypted_store, every_store
from tests.stores.opening import NOW, new, opened


@pytest.mark.parametrize("make", [*every_store(), *every_encrypted_store()])
async def test_a_store_knows_its_size(make: MakeStore) -> None:
    async with opened(make()) as store:
        first, second = await new(store), await new(store)
        await store.append(first, Draft(b"x" * 100_000), now=NOW)
        size = await measure(store)
        assert size is not None and size.sessions == 2
        # In memory and in a cluster it is unknown.
        assert size.bytes is None or size.bytes > 100_000
        await store.end(second)
        size = await measure(store)
        assert size is not None and size.sessions == 1
