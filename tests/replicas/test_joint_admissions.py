"""A request on a connection with a current session is admitted to both in one step of the store
(ASC2), and whatever comes between, nothing runs twice (KEY3).
"""

import pytest

from mcp_sessions import current_session
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.record_changes import SetCurrent
from tests.support.failing_calls import fails
from tests.support.raw import Json, RawClient, at_most, keyed, text_of
from tests.support.replicas import Cluster, cluster
from tests.support.virtual_time import cycles
from tests.support.world import Ctx

pytestmark = pytest.mark.in_process

SOON = 1.0
"""Seconds; less than a round takes."""


async def used(c: Cluster) -> RawClient:
    """A client whose current session the first replica knows of."""
    client = await c[0].connected()
    await client.start()
    await client.call("echo", text="x").result()
    c.stores[0].calls.clear()
    c[0].box.calls.clear()
    return client


def ran(c: Cluster) -> int:
    return sum(len(w.box.calls) for w in c.worlds)


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_call_in_the_current_session_is_one_step_to_come_in(key: str | None) -> None:
    """Whatever comes with it: what is left of a call with a key is to keep its answer."""
    async with cluster(1) as c:
        client = await used(c)
        meta = keyed(key) if key is not None else None
        assert text_of(await client.call("echo", text="y", meta=meta).result()) == "y"
        assert list(c.stores[0].calls) == ["admit"] + ["finish_request"] * (key is not None)


@pytest.mark.parametrize("after", [True, False], ids=["after its effect", "before"])
@pytest.mark.parametrize("at", [0, 1])
async def test_a_call_whose_one_step_failed_runs_once_when_sent_again(after: bool, at: int) -> None:
    """KEY11: it never began. Who recorded the key says so, to another replica as well."""
    async with cluster(2) as c:
        client = await used(c)
        failed = fails(c[0].layer.store, "admit", after=after)
        refused = await client.call("echo", text="x", meta=keyed("k")).reply.done()
        assert failed and refused.status == 503
        same = c.at(at, client)
        answers = [same.call("echo", text="x", meta=keyed("k")).result() for _ in range(2)]
        assert [text_of(await at_most(16, each)) for each in answers] == ["x", "x"]
        assert ran(c) == 1


@pytest.mark.parametrize("seed", range(8))
async def test_one_key_sent_many_times_at_once_runs_once(seed: int) -> None:
    """At both replicas, in whatever order their steps come: each sending is answered."""
    async with cluster(2, seed=seed) as c:
        client = await used(c)
        await c.at(1, client).call("echo", text="x").result()
        c[1].box.calls.clear()
        sent = [
            c.at(number % 2, client).call("echo", text="x", meta=keyed("k")) for number in range(6)
        ]
        answers = [await at_most(16, each.result()) for each in sent]
        assert [text_of(answer) for answer in answers] == ["x"] * 6
        assert ran(c) == 1


async def test_a_call_goes_to_the_session_that_is_current_by_now() -> None:
    """ASC2: another one than this replica saw last."""
    async with cluster(2) as c:
        sessions: list[str] = []

        async def where(ctx: Ctx, arguments: Json) -> str:
            sessions.append(current_session().id)
            return "here"

        for w in c.worlds:
            w.box.tools["where"] = where
        client = await used(c)
        await client.call("where").result()
        newest = (await c.at(1, client).start())["sessionId"]
        for meta in (None, keyed("k")):
            assert text_of(await client.call("where", meta=meta).result()) == "here"
        assert sessions[0] != newest and sessions[1:] == [newest, newest]


async def test_two_calls_that_take_each_others_session_for_theirs_do_not_wait_for_each_other() -> (
    None
):
    """Each holds the lock of its key in the session that it takes for its own, until it knows."""
    async with cluster(2) as c:
        clients = [await used(c), await used(c)]
        memory = c.backplane.memory
        names = [SessionId(client.session_id or "") for client in clients]
        records = [await memory.load(name, now=0) for name in names]
        one, other = (record.client.current for record in records if record is not None)
        assert one is not None and other is not None and one != other
        await memory.change(names[0], SetCurrent(other))
        await memory.change(names[1], SetCurrent(one))
        sent = [client.call("echo", text="x", meta=keyed("k")) for client in clients]
        assert [text_of(await at_most(SOON, each.result())) for each in sent] == ["x", "x"]
        assert ran(c) == 2


async def test_what_is_refused_for_its_number_records_no_key() -> None:
    """ERR6: it is refused before anything is recorded, and is begun where there is room."""
    async with cluster(2, max_running_requests=2) as c:
        client = await used(c)
        held = [client.call("wait", gate="g") for _ in range(2)]
        await cycles(20)
        error = await client.call("echo", text="x", meta=keyed("k")).error()
        assert error["data"]["limit"] == "max_running_requests"
        assert c.stores[0].calls[-1] == "admit"
        again = c.at(1, client).call("echo", text="x", meta=keyed("k"))
        assert text_of(await at_most(SOON, again.result())) == "x"
        c[0].box.gate("g").go.set()
        assert [text_of(await each.result()) for each in held] == ["through g"] * 2
