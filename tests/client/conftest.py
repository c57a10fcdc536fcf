"""Every test of the client runs in an event loop, and warnings of the old era are expected."""

import pytest

from tests.support.apps import DEPRECATED
from tests.support.forking import have_imported


@pytest.fixture(scope="session", autouse=True)
def servers_start_at_once() -> None:
    """A server has seconds to start in."""
    have_imported()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK warns of what 2026-07-28 removed; the client serves both eras."""
    for item in items:
        if "tests/client/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings(DEPRECATED))
