"""Property: a question reaches the client whose call asks, whatever serves the tool.

Clients of both eras share a server, each with several calls at once, in a session and outside.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.server.upstream.external.test_peer_in_rounds import again
from tests.server.upstream.test_port import SERVERS, served
from tests.support import apps
from tests.support.asking import fastmcp_server
from tests.support.duplex import DuplexWorld, duplex_world
from tests.support.modern import ModernClient
from tests.support.raw import Json, text_of

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

ELICITS: Json = {"elicitation": {}}
CALLS = 3
"""Of each client, at once."""


@asynccontextmanager
async def of_kind(kind: str) -> AsyncGenerator[DuplexWorld]:
    if kind == "fastmcp":
        async with duplex_world(server=fastmcp_server()) as w:
            yield w
        return
    async with served(kind) as w:
        yield w


class Someone:
    """A client, and the questions that it gets."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.calls = [f"{name}-{number}" for number in range(CALLS)]
        self.asked: list[str] = []
        self._chance = chance

    def answer(self, question: Json) -> Json:
        message: str = question["params"]["message"]
        self.asked.append(message)
        return {"action": "accept", "content": {"answer": f"<{message}>"}}

    async def think(self) -> None:
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)

    async def in_results(self, client: ModernClient, session: str | None) -> None:
        """Its client is of 2026-07-28."""

        async def call(text: str) -> None:
            params: Json = {"name": "ask", "arguments": {"question": text}}
            result = await client.send("tools/call", params, session=session).result()
            while result["resultType"] == "input_required":
                answers = [self.answer(each) for each in result["inputRequests"].values()]
                await self.think()
                brought = again(result, *answers, params=params)
                result = await client.send("tools/call", brought, session=session).result()
            assert f"<{text}>" in text_of(result)

        await asyncio.gather(*map(call, self.calls))

    async def by_requests(self, client: Any) -> None:
        """Its client is older."""
        calls = [client.call("ask", question=text) for text in self.calls]

        async def answer(call: Any, text: str) -> None:
            # A command does not say which call of a client it asks about.
            count = 0
            while "method" in (message := (await call.reply.has(count + 1))[count]):
                count += 1
                await self.think()
                await client.respond(message, self.answer(message))
            assert f"<{text}>" in text_of(message["result"])

        await asyncio.gather(*map(answer, calls, self.calls))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [*SERVERS, "fastmcp"])
async def test_each_client_gets_the_questions_of_its_own_calls(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    async with of_kind(kind) as w, asyncio.timeout(60):
        people = [Someone(name, chance) for name in "abcdef"]
        work = [
            people[number].by_requests(await w.inner.connected(capabilities=ELICITS))
            for number in range(2)
        ]
        for number in range(2, 6):
            client = ModernClient(w.inner.carrier, capabilities=ELICITS)
            session = (await client.create())["sessionId"] if number % 2 else None
            work.append(people[number].in_results(client, session))
        chance.shuffle(work)
        await asyncio.gather(*work)
    for someone in people:
        assert sorted(someone.asked) == someone.calls
