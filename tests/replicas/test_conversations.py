"""A conversation whose host starts no session, and whose requests come to any replica."""

import asyncio

import pytest

from mcp_sessions import Conversations, SessionSecurity
from mcp_sessions.server.requests.handle import current_session
from tests.support.modern import ModernClient
from tests.support.raw import Json
from tests.support.replicas import cluster
from tests.support.world import Ctx, World

pytestmark = pytest.mark.anyio

META = {"openai/session": "one"}


def tools(w: World) -> None:
    """Adds ``count``, which counts in its session, and ``name``, which says its id."""

    async def count(ctx: Ctx, arguments: Json) -> str:
        async with current_session().data.edit() as data:
            data["n"] = data.get("n", 0) + 1
            return f"{current_session().source} {data['n']}"

    async def name(ctx: Ctx, arguments: Json) -> str:
        return current_session().id

    w.box.tools.update(count=count, name=name)


@pytest.mark.parametrize("seed", range(5))
async def test_two_first_requests_at_once_make_one_session(seed: int) -> None:
    """And every later one finds it, wherever it comes, in either era."""
    security = SessionSecurity(["k" * 32])
    async with cluster(3, seed=seed, security=security, conversations=Conversations()) as c:
        for w in c.worlds:
            tools(w)
        calls = [ModernClient(w.carrier).text("name", meta=META) for w in c.worlds]
        calls += [w.client().text("name", meta=META) for w in c.worlds]
        assert len(set(await asyncio.gather(*calls))) == 1

        said = [await ModernClient(w.carrier).text("count", meta=META) for w in c.worlds]
        said += [await (await w.connected()).text("count", meta=META) for w in c.worlds]
        assert said == [f"conversation {n}" for n in range(1, 7)]
        modes = [each.mode for each in await c[0].layer.sessions.list()]
        assert modes.count("bound") == 1
