"""The tests of this folder run over a store in this process, where time jumps and everything
can be done to a replica, and over a real Redis and a real Postgres; see `tests.support.replicas`.

What needs the first is marked ``in_process``.
"""

from collections.abc import Generator
from typing import Any

import pytest

from tests.support.replicas import REAL, share
from tests.support.virtual_time import VIRTUAL, Backend

_SEEDS_ON_REAL = 1
"""A seed decides nothing there."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "anyio_backend" not in metafunc.fixturenames:
        return
    kinds = [pytest.param("memory")]
    if metafunc.definition.get_closest_marker("in_process") is None:
        for name in REAL:
            kinds.append(pytest.param(name, marks=getattr(pytest.mark, name)))
    metafunc.parametrize("anyio_backend", kinds, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_repeated(item)]


def _is_repeated(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    params: dict[str, Any] = callspec.params if callspec is not None else {}
    is_real = params.get("anyio_backend") in list(REAL)
    return is_real and params.get("seed", 0) >= _SEEDS_ON_REAL


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> Generator[Backend | str]:
    if request.param == "memory":
        # WebSockets and pipes need the network, which virtual time would not wait for.
        on_network = request.node.get_closest_marker("on_network") is not None
        yield "asyncio" if on_network else VIRTUAL
        return
    with share(request.param):
        yield "asyncio"
