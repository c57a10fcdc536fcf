import pytest

from tests.support.forking import have_imported


@pytest.fixture(scope="session", autouse=True)
def servers_start_at_once() -> None:
    """An MCP server has seconds to start in."""
    have_imported()
