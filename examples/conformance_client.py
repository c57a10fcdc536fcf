"""The client that the conformance duties are looked at with: it does what it is told.

    mcp-sessions conformance --client 'python examples/conformance_client.py'

The scripted server's tool ``next`` says what to do; ``conformance/README.md`` describes it, so
that a client in another language can be tested the same way. All that is to be proved is done
by ``resumable()``, none of it here.
"""

import asyncio
import json
import sys
from typing import Any

import mcp_types as types
from mcp import MCPError
from mcp.client.session import ClientSession

from mcp_sessions import ReconnectPolicy, resumable

QUICK = ReconnectPolicy(backoff_base=0.05, backoff_cap=0.5)
TRIES = 5
"""How often ``next`` is asked before the program gives up."""


class Program:
    """One connection to a scripted server, and what was heard on it."""

    def __init__(self, session: ClientSession, heard: list[str], changed: asyncio.Event) -> None:
        self.session = session
        self.heard = heard
        self.changed = changed

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result."""
        result = await self.session.call_tool(tool, arguments)
        (content,) = result.content
        return content.text if isinstance(content, types.TextContent) else ""

    async def ask(self, outcome: str) -> dict[str, Any]:
        """What to do next. Asking is harmless, so it may be repeated."""
        for attempt in range(TRIES):
            try:
                told = await self.call("next", {"outcome": outcome, "heard": list(self.heard)})
                return json.loads(told)
            except MCPError:
                if attempt == TRIES - 1:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError("the last attempt raises")

    async def obey(self) -> None:
        """Do what the server says, until it says that it is done."""
        outcome = ""
        while True:
            told = await self.ask(outcome)
            match told.get("do"):
                case "done":
                    return
                case "call" if not told.get("again"):
                    outcome = await self.outcome_of(told["tool"], told["arguments"])
                case "hear":
                    await self.hear(told["count"])
                case "connect":
                    await connect(told["url"])
                case _:
                    outcome = ""

    async def outcome_of(self, tool: str, arguments: dict[str, Any]) -> str:
        """How a call ended."""
        try:
            return await self.call(tool, arguments)
        except MCPError as error:
            return f"error {error.code}"

    async def hear(self, count: int) -> None:
        """Wait until so many updates were heard."""
        async with asyncio.timeout(20):
            while len(self.heard) < count:
                self.changed.clear()
                await self.changed.wait()


async def connect(url: str) -> None:
    """Connect, and do as told."""
    heard: list[str] = []
    changed = asyncio.Event()

    async def on_message(message: object) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            heard.append(str(message.params.uri))
            changed.set()

    async with (
        resumable(url, policy=QUICK) as (reading, writing),
        ClientSession(reading, writing, message_handler=on_message) as session,
    ):
        await session.initialize()
        await Program(session, heard, changed).obey()


def main() -> None:
    """Connect to the URL that is the last argument."""
    asyncio.run(connect(sys.argv[-1]))


if __name__ == "__main__":
    main()
