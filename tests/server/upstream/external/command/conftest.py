"""The tests of this folder run in real time: other processes know no other."""

import pytest

LOOPS = (
    pytest.param(False, id="asyncio", marks=pytest.mark.full),
    pytest.param(True, id="uvloop"),
)


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Asyncio's own loop, and the one that the command line has: pipes are not the same there."""
    return "asyncio", {"use_uvloop": request.param}
