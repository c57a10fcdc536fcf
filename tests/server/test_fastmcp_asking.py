"""A tool of FastMCP whose client cannot be asked; `tests.interop.test_asking` has the others."""

from typing import Any

import pytest

from tests.support.asking import fastmcp_server
from tests.support.modern import ModernClient
from tests.support.world import world

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


@pytest.mark.parametrize("limit", [0, 900])
async def test_a_client_that_cannot_be_asked_gets_fastmcps_error(limit: float) -> None:
    declared: Any = {"elicitation": {}} if limit == 0 else {}
    async with world(server=fastmcp_server(), question_timeout=limit) as w:
        client = ModernClient(w.carrier, capabilities=declared)
        result = await client.call("ask").result()
    assert result["isError"] and "unavailable on 2026-07-28" in result["content"][0]["text"]
