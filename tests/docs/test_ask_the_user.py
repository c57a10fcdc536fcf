"""The page about questions to the user: its examples work for clients of both eras."""

import asyncio
import re
import sys
from types import ModuleType
from typing import Any

import pytest
from mcp.client import Client

from mcp_sessions import SessionLayer
from tests.house.source import ROOT
from tests.support.duplex import listening

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def ran(code: str, name: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType(name)
    # Classes of the page find their names by their module.
    patch.setitem(sys.modules, name, module)
    exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


@pytest.mark.parametrize("number", [0, 2], ids=["mcpserver", "fastmcp"])
async def test_its_servers_ask_clients_of_both_eras(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[str] = BLOCK.findall((ROOT / "docs/ask-the-user.md").read_text("utf-8"))
    server = ran(blocks[number], "a_server_of_the_page", monkeypatch)
    client = ran(blocks[1], "a_client_of_the_page", monkeypatch)
    answer = client["answer"]
    if number:
        # That server asks for a text, which has one member.
        async def answer(context: Any, params: Any) -> Any:
            return client["types"].ElicitResult(action="accept", content={"value": "blue"})

    layer = SessionLayer(server["mcp"])
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port, asyncio.timeout(20):
        url = f"http://127.0.0.1:{port}/mcp"
        results = [] if number else [await client["main"](url)]
        for mode in ("2026-07-28", "legacy"):
            async with Client(url, mode=mode, elicitation_callback=answer) as stock:
                results.append(await stock.call_tool("order", {}))
        assert [each.content[0].text for each in results] == ["ordered in blue"] * len(results)
