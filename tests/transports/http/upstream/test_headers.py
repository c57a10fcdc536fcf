"""What a request of the era of 2026-07-28 says in its headers.

All else is the same for a command: ``tests/server/upstream/external/test_either_era.py``.
"""

import pytest

from mcp_sessions import HTTPServer
from tests.support import apps
from tests.support.modern_server import ModernServer, modern_url
from tests.support.world import world

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(apps.DEPRECATED)]


async def test_headers_repeat_what_a_request_is() -> None:
    modern = ModernServer()
    async with modern_url(modern) as url, world(server=HTTPServer(url)) as w:
        client = await w.connected()
        assert await client.text("echo") == "echo"
        read = await client.result("resources/read", {"uri": "note://é"})
        assert read["contents"][0]["text"] == "read"
    sent = {(h["mcp-method"], h.get("mcp-name")) for h in modern.headers}
    assert {("tools/call", "echo"), ("resources/read", "=?base64?bm90ZTovL8Op?=")} <= sent
