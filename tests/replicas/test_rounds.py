"""A handler of a Python server asks clients of the 2026 era; they answer at any replica."""

import asyncio

import pytest

from tests.replicas.test_children import UNKNOWN, short_lives
from tests.server.upstream.external.test_peer_in_rounds import again
from tests.server.upstream.test_rounds import ASK, ELICITS, TWO
from tests.support.children import until
from tests.support.modern import ModernClient
from tests.support.raw import text_of
from tests.support.replicas import Cluster, cluster, user

pytestmark = pytest.mark.in_process


def clients(c: Cluster) -> list[ModernClient]:
    return [ModernClient(w.carrier, capabilities=ELICITS) for w in c.worlds]


@pytest.mark.parametrize("seed", range(3))
async def test_the_answer_may_come_at_any_replica(seed: int) -> None:
    """In a session and outside. The handler runs once, and a copy gets the same answer."""
    async with cluster(3, seed=seed) as c:
        at = clients(c)
        for session in (None, (await at[0].create())["sessionId"]):
            asked = await at[seed].send("tools/call", ASK, session=session).result()
            assert asked["resultType"] == "input_required"
            brought = again(asked, TWO, params=ASK)
            for number in (1, 2, 0):
                result = await at[number].send("tools/call", brought, session=session).result()
                assert text_of(result) == "accept: two"
        assert [w.box.calls for w in c.worlds].count([]) == 2
        assert c[seed].box.calls == ["ask", "ask"]


async def test_a_call_whose_replica_is_gone_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    short_lives(monkeypatch)
    async with cluster(2) as c:
        one, other = clients(c)
        asked = await one.send("tools/call", ASK).result()
        c.kill(0)
        error = await other.send("tools/call", again(asked, TWO, params=ASK)).error()
        assert error["code"] == UNKNOWN
        assert c[1].box.calls == [], "it ran nowhere else"


async def test_a_round_at_another_replica_opens_nothing_to_another_session() -> None:
    async with cluster(2) as c:
        one, other = clients(c)
        mine, another = [(await one.create())["sessionId"] for _ in range(2)]
        asked = await one.send("tools/call", ASK, session=mine).result()
        brought = again(asked, TWO, params=ASK)
        for session in (None, another):
            error = await other.send("tools/call", brought, session=session).error()
            assert error["code"] == UNKNOWN
        result = await other.send("tools/call", brought, session=mine).result()
        assert text_of(result) == "accept: two"


async def test_the_scopes_of_a_caller_count_at_any_replica() -> None:
    """KEY18, for a call in rounds: fewer scopes do not continue it, and the same do."""
    async with cluster(2) as c:
        one, weak, other = [
            ModernClient(await c[at].carrier_of(user("alice", *scopes)), capabilities=ELICITS)
            for at, scopes in ((0, ("read",)), (1, ()), (1, ("read",)))
        ]
        for session in (None, (await one.create())["sessionId"]):
            asked = await one.send("tools/call", ASK, session=session).result()
            brought = again(asked, TWO, params=ASK)
            error = await weak.send("tools/call", brought, session=session).error()
            assert error["code"] == UNKNOWN
            result = await other.send("tools/call", brought, session=session).result()
            assert text_of(result) == "accept: two"


async def test_a_call_ends_when_its_session_ends_at_another_replica() -> None:
    async with cluster(2) as c:
        one, other = clients(c)
        session = (await one.create())["sessionId"]
        ended = asyncio.Event()
        ask = c[0].box.tools["ask"]

        async def watched(ctx: object, arguments: object) -> str:
            try:
                return await ask(ctx, arguments)  # pyright: ignore[reportArgumentType]
            finally:
                ended.set()

        c[0].box.tools["ask"] = watched
        asked = await one.send("tools/call", ASK, session=session).result()
        assert not ended.is_set() and asked["resultType"] == "input_required"
        await other.send("sessions/delete", {}, session=session).result()
        await until(ended.is_set, "its handler ended")
