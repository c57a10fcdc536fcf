"""A URL that this process cannot connect to, because it has no descriptor left.

That is no failure of the server: whoever asks next is not refused for it.
"""

import logging

import pytest

from mcp_sessions import HTTPServer
from tests.support.descriptors import no_descriptors
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import world

pytestmark = pytest.mark.anyio

HANDSHAKE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "raw", "version": "1"},
}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_process_without_descriptors_is_no_failure_of_a_url(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A resolver that can open no file says that a name does not exist."""
    async with url_of(UrlServer()) as url:
        server = HTTPServer(url.replace("127.0.0.1", host), try_at_start=False)
        async with world(server=server) as w:
            # It stays, so that nothing is closed meanwhile.
            await w.connected()
            for _ in range(3):
                with no_descriptors():
                    error = await w.client().error("initialize", HANDSHAKE)
                assert "too many open files" in error["message"]
                await w.connected()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in said if "too many open files" in text]) == 1, said
