"""The tests of this folder run in real time: other processes know no other."""

import pytest


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Asyncio's own loop, and the one that the command line has: pipes are not the same there."""
    return "asyncio", {"use_uvloop": request.param}
