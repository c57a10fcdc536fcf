"""`driver.py`, with the stock WebSocket client of Python 1.x as its transport."""

# See `driver.py`: what is imported is there only where this runs.
# pyright: basic, reportAttributeAccessIssue=false, reportMissingImports=false

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import driver
from mcp.client.websocket import websocket_client


class OverWebSocket(driver.Driven):
    @asynccontextmanager
    async def transport(self, command: dict[str, Any]) -> AsyncGenerator[tuple[Any, Any]]:
        self.get_session_id = lambda: None
        async with websocket_client(command["url"]) as (read, write):
            yield read, write


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(driver.main(OverWebSocket))
