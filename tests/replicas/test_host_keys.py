"""A host sends a call again, with a key of its own, to another replica (KEY3, KEY22)."""

import asyncio

import pytest

from tests.server.dispatch.stages.test_host_keys import HEADER, ON
from tests.support.modern import ModernClient, Received
from tests.support.replicas import Cluster, cluster, user


async def hosts(c: Cluster, *names: str) -> list[ModernClient]:
    return [
        ModernClient(await w.carrier_of(user(name)))
        for w, name in zip(c.worlds, names, strict=True)
    ]


def called(client: ModernClient, gate: str = "g") -> Received:
    return client.call("wait", {"gate": gate}, headers={HEADER: "k"})


async def began(c: Cluster) -> None:
    async with asyncio.timeout(20):
        while not any(w.box.gate("g").started.is_set() for w in c.worlds):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def opens(c: Cluster) -> None:
    for w in c.worlds:
        w.box.gate("g").go.set()


def runs(c: Cluster) -> list[str]:
    return [each for w in c.worlds for each in w.box.calls]


async def through(call: Received) -> str:
    async with asyncio.timeout(20):
        return str((await call.result())["content"][0]["text"])


@pytest.mark.parametrize("seed", range(6))
async def test_a_key_at_two_replicas_at_once_runs_once(seed: int) -> None:
    async with cluster(2, seed=seed, request_keys=ON) as c:
        calls = [called(client) for client in await hosts(c, "alice", "alice")]
        await began(c)
        opens(c)
        assert [await through(call) for call in calls] == ["through g"] * 2
        assert runs(c) == ["wait"]


async def test_a_call_whose_response_broke_is_answered_by_another_replica() -> None:
    async with cluster(2, request_keys=ON) as c:
        one, other = await hosts(c, "alice", "alice")
        cut = called(one)
        await began(c)
        cut.leave()
        await cut.gone()
        again = called(other)
        opens(c)
        assert await through(again) == "through g"
        assert await through(called(other)) == "through g"
        error = await called(other, "another").error()
        assert error["data"]["reason"] == "key_reused"
        assert runs(c) == ["wait"]


async def test_a_key_of_another_principal_is_another_key_at_any_replica() -> None:
    async with cluster(2, request_keys=ON) as c:
        calls = [called(client) for client in await hosts(c, "alice", "bob")]
        opens(c)
        assert [await through(call) for call in calls] == ["through g"] * 2
        assert runs(c) == ["wait", "wait"]


@pytest.mark.in_process
async def test_of_a_replica_that_was_killed_the_outcome_is_unknown() -> None:
    """KEY11."""
    async with cluster(2, request_keys=ON) as c:
        one, other = await hosts(c, "alice", "alice")
        called(one)
        await began(c)
        c.kill(0)
        async with asyncio.timeout(120):
            assert (await called(other).error())["code"] == -31012
        assert runs(c) == ["wait"]
