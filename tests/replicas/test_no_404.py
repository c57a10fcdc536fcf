"""Two answers of 404 in a row make some hosts give a server up. Nobody gets one while replicas
drain, or while their store is away.
"""

import asyncio
from collections import Counter

import pytest

from tests.support.raw import Json, RawClient
from tests.support.replicas import Cluster, cluster


async def asked(c: Cluster, number: int, client: RawClient) -> list[int | None]:
    """How a replica answers each kind of message of a stock client; a stream is left again."""
    at, found = c.at(number, client), list[int | None]()
    messages: list[Json] = [
        {"jsonrpc": "2.0", "id": next(client.numbers), "method": "tools/list"},
        {"jsonrpc": "2.0", "method": "notifications/roots/list_changed"},
        {"jsonrpc": "2.0", "id": 99_999, "result": {}},
    ]
    for message in messages:
        found.append((await at.post(message).done()).status)
    stream = await at.get().started()
    found.append(stream.status)
    await stream.gone()
    return found


async def test_no_stage_of_a_rolling_restart_answers_404() -> None:
    """HTL13: what a replica that leaves does not serve is 503, until nobody is there to answer; the
    next one serves the session from its first request on.
    """
    async with cluster(3) as c:
        client, other = await c[0].connected(), await c[1].connected()
        statuses: Counter[int | None] = Counter()
        for leaving, staying in ((0, 1), (1, 2)):
            waits = c.at(leaving, client).call("wait", gate="g")
            await c[leaving].box.gate("g").started.wait()
            statuses.update(await asked(c, leaving, client))
            draining = asyncio.create_task(c[leaving].layer.drain(20))
            for _ in range(3):
                await asyncio.sleep(0.2)
                for each in (client, other):
                    statuses.update(await asked(c, leaving, each))
                    statuses.update(await asked(c, staying, each))
            c[leaving].box.gate("g").go.set()
            await draining
            await waits.result()
            for each in (client, other):
                statuses.update(await asked(c, leaving, each))
                statuses.update(await asked(c, staying, each))
            made = await c[staying].connected()
            statuses.update(await asked(c, 2, made))
        assert set(statuses) == {200, 202, 503}, statuses


@pytest.mark.in_process
async def test_a_store_that_is_away_is_not_taken_for_a_session_that_is_gone() -> None:
    """HTP5: 503, also where a replica knows the session already or has it for the first time."""
    async with cluster(2) as c:
        client = await c[0].connected()
        c.backplane.is_away = True
        statuses = {each for number in (0, 1) for each in await asked(c, number, client)}
        c.backplane.is_away = False
        assert statuses == {503}
        assert set(await asked(c, 1, client)) <= {200, 202}
