"""The tests of this folder run where time jumps; see `tests.support.virtual_time`."""

import pytest

from tests.support import identities
from tests.support.virtual_time import VIRTUAL, Backend


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


@pytest.fixture(params=["server", "layer"])
def with_each_authentication(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapped server's own authentication, or the layer's before a server that has none."""
    monkeypatch.setattr(identities, "AUTHENTICATES", request.param)
