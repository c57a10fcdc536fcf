"""The client that the conformance duties are looked at with: it does what it is asked.

    mcp-sessions conformance --client 'python examples/conformance_client.py'

The scripted server's tool ``next`` says what to do; ``conformance/README.md`` describes it, so
that a client in another language can be tested the same way. All that is to be proved is done
by ``resumable()``, none of it here.
"""

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from mcp import Client, MCPError
from mcp.client.session import ClientSession

from mcp_sessions import ReconnectPolicy, resumable

QUICK = ReconnectPolicy(backoff_base=0.05, backoff_cap=0.5)
RESOURCES = [f"conformance://e{number}" for number in range(1, 6)]
TRIES = 5
"""How often ``next`` is asked before the program gives up."""


@dataclass
class Noted:
    received: list[str] = field(default_factory=list[str])
    """Resources that changed, in order."""

    asked: int = 0
    """Questions that the user was asked."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def message(self, message: object) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            self.received.append(str(message.params.uri))
            self.changed.set()

    async def question(self, context: object, params: object) -> types.ElicitResult:
        self.asked += 1
        return types.ElicitResult(action="accept", content={"answer": f"answer {self.asked}"})

    async def receive(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.received) < count:
                self.changed.clear()
                await self.changed.wait()


class Program:
    def __init__(self, session: ClientSession | Client, noted: Noted) -> None:
        self.session = session
        self.noted = noted

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        result = await self.session.call_tool(tool, arguments)
        (content,) = result.content
        return content.text if isinstance(content, types.TextContent) else ""

    async def ask(self, outcome: str) -> dict[str, Any]:
        """Ask for the next instruction. Asking is harmless, so it may be repeated."""
        for attempt in range(TRIES):
            said = {"outcome": outcome, "heard": self.noted.received[:], "asked": self.noted.asked}
            try:
                return json.loads(await self.call("next", said))
            except MCPError:
                if attempt == TRIES - 1:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError("the last attempt raises")

    async def obey(self) -> None:
        outcome = ""
        while True:
            instruction = await self.ask(outcome)
            match instruction.get("do"):
                case "done":
                    return
                case "call":
                    outcome = await self.outcome_of(instruction["tool"], instruction["arguments"])
                case "hear":
                    await self.noted.receive(instruction["count"])
                case "connect":
                    await connect(instruction["url"])
                case _:
                    pass  # "nothing": ask again

    async def outcome_of(self, tool: str, arguments: dict[str, Any]) -> str:
        try:
            return await self.call(tool, arguments)
        except MCPError as error:
            return f"error {error.code}"


async def connect(url: str) -> None:
    """Connect, and do as asked."""
    if os.environ.get("CONFORMANCE_ERA") == "modern":
        await connect_modern(url)
        return
    noted = Noted()
    async with (
        resumable(url, policy=QUICK) as (reading, writing),
        ClientSession(
            reading,
            writing,
            message_handler=noted.message,
            elicitation_callback=noted.question,
        ) as session,
    ):
        await session.initialize()
        await Program(session, noted).obey()


async def connect_modern(url: str) -> None:
    """Connect in the modern era, where updates come only on a listen."""
    noted = Noted()
    async with (
        Client(resumable(url, policy=QUICK)) as client,
        client.listen(resource_subscriptions=RESOURCES) as changes,
    ):

        async def receive() -> None:
            async for change in changes:
                noted.received.append(str(getattr(change, "uri", "")))
                noted.changed.set()

        receiving = asyncio.create_task(receive())
        try:
            await Program(client, noted).obey()
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})


def main() -> None:
    asyncio.run(connect(sys.argv[-1]))


if __name__ == "__main__":
    main()
