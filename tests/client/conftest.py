"""Every test of the client runs in an event loop, and warnings of the old era are expected."""

import pytest

from tests.support.apps import DEPRECATED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK warns of what 2026-07-28 removed; the client serves both eras."""
    for item in items:
        if "tests/client/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings(DEPRECATED))
