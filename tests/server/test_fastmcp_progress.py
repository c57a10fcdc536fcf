"""Progress of FastMCP's own call, which sends it as a notification, where a call is repeated."""

import asyncio
from typing import Any

import pytest

from tests.support.modern import ModernClient
from tests.support.raw import Reply, keyed, text_of
from tests.support.virtual_time import cycles
from tests.support.world import World, world

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


class Steps:
    """A server of FastMCP whose tool reports ten steps, and waits for ``on`` before some."""

    def __init__(self) -> None:
        # Here: other tests start sooner without it.
        from fastmcp import Context, FastMCP

        self.at = 0
        self.on = {5: asyncio.Event(), 8: asyncio.Event()}
        self.server = FastMCP[Any]("steps")

        @self.server.tool
        async def work(ctx: Context) -> str:
            for step in range(1, 11):
                if step in self.on:
                    await self.on[step].wait()
                await ctx.report_progress(step, 10, f"step {step}")
                self.at = step
            return "done"

        _ = work

    async def reaches(self, step: int) -> None:
        while self.at < step:
            await cycles(1)


def reported(reply: Reply, token: str) -> list[int]:
    params = [m["params"] for m in reply.messages if m.get("method")]
    assert {each["progressToken"] for each in params} <= {token}
    return [each["progress"] for each in params]


@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_a_repetition_gets_what_was_reported_while_nobody_was_there(era: str) -> None:
    """KEY21: all ten, once and in order, under its own token."""
    steps = Steps()
    async with world(server=steps.server) as w:
        call, session = await _calling(w, era)
        await steps.reaches(4)
        await cycles()
        assert reported(call, "one") == [1, 2, 3, 4]
        await call.gone()
        steps.on[5].set()
        await steps.reaches(7)

        again, _ = await _calling(w, era, session, token="two")
        await cycles()
        steps.on[8].set()
        await again.until(lambda: any("result" in each for each in again.messages), "an answer")
        assert reported(again, "two") == list(range(1, 11))
        assert text_of(again.messages[-1]["result"]) == "done"


async def _calling(w: World, era: str, session: str = "", token: str = "one") -> tuple[Reply, str]:
    if era == "modern":
        modern = ModernClient(w.carrier)
        session = session or (await modern.start())["sessionId"]
        meta = {**keyed("k", session), "progressToken": token}
        return modern.call("work", {}, meta=meta).reply, session
    client = await w.connected()
    session = session or (await client.start())["sessionId"]
    return client.call("work", meta=keyed("k", session, progressToken=token)).reply, session
