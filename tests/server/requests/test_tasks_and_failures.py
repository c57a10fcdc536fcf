"""A task ends once, and its client learns it, whatever fails after its handler (SEP-2663)."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_sessions import current_session
from mcp_sessions.core.task import TaskRecord
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.security import mint_session_id
from mcp_sessions.seldom import MOST
from mcp_sessions.stores.memory.memory_store import MemoryStore
from mcp_sessions.stores.records import Peer
from tests.server.requests.test_task_listening import agreed, boxes, listen_to, told
from tests.server.requests.test_tasks import (
    AT_ONCE,
    CAPABILITIES,
    ENDED,
    Box,
    client_of,
    got,
    named,
    tasks_of,
    until,
)
from tests.support.modern import ModernClient
from tests.support.raw import Json
from tests.support.replicas import cluster
from tests.support.world import World, world


async def test_an_end_whose_write_lost_its_reply_is_an_event_of_its_session() -> None:
    """TSK5: nobody reads the session's log again for what was never put into it."""
    lost: list[str] = []

    class LosesReply(MemoryStore):
        async def replace_data(self, session_id: Any, value: Any, **more: Any) -> Any:
            done = await super().replace_data(session_id, value, **more)
            if value["status"] in ENDED and not lost:
                lost.append(value["status"])
                raise StoreUnavailable("the reply was lost")
            return done

    async with world(store=LosesReply(), tasks=AT_ONCE) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        task = await client.call("wait", {"gate": "g"}, session=session).result()
        listen = listen_to(client, task["taskId"], session=session)
        w.box.gate("g").go.set()
        assert (await told(listen, *ENDED))["status"] == "completed"
        assert lost == ["completed"]


async def test_the_end_of_a_task_of_a_dead_process_is_an_event_also_if_the_reply_was_lost() -> None:
    """TSK5: the next look at the task found its end, and took it for announced."""
    lost: list[str] = []

    def loses_reply(_: int, store: Any) -> Any:
        replace = store.replace_data

        async def replace_data(session_id: Any, value: Any, **more: Any) -> Any:
            done = await replace(session_id, value, **more)
            if value["status"] in ENDED and not lost:
                lost.append(value["status"])
                raise StoreUnavailable("the reply was lost")
            return done

        store.replace_data = replace_data
        return store

    async with cluster(2, server=boxes, store_of=loses_reply, tasks=AT_ONCE) as replicas:
        client, elsewhere = client_of(replicas[0]), client_of(replicas[1])
        session = (await client.start())["sessionId"]
        task = await client.call("wait", {"gate": "g"}, session=session).result()
        listen = listen_to(elsewhere, task["taskId"], session=session)
        await agreed(listen)
        replicas.kill(0)
        ended = await told(listen, *ENDED)
        assert (ended["status"], ended["error"]["code"]) == ("failed", -31012)
        assert lost == ["failed"]


def keeps_state() -> Box:
    async def keeps(ctx: Any, arguments: Json) -> str:
        current_session().state["n"] = 1
        return "kept"

    box = Box()
    box.tools["keeps"] = keeps
    return box


async def test_a_task_that_is_cancelled_while_its_state_is_stored_ends() -> None:
    reached = asyncio.Event()

    class NeverStores(MemoryStore):
        async def change_state(self, *args: Any, **more: Any) -> Any:
            reached.set()
            await asyncio.Event().wait()

    policy = TaskPolicy(always={"keeps"})
    async with world(store=NeverStores(), box=keeps_state(), tasks=policy) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        task = await client.call("keeps", session=session).result()
        await reached.wait()
        await client.send("tasks/cancel", named(task)).result()
        assert (await until(client, task, *ENDED))["status"] == "cancelled"
        assert w.inside.runner.running == 0


class Broken(MemoryStore):
    async def change_state(self, *args: Any, **more: Any) -> Any:
        raise RuntimeError("a defect")


@pytest.mark.fails_in_background("a request")
async def test_a_defect_after_the_handler_ends_the_task() -> None:
    async with world(store=Broken(), box=keeps_state(), tasks=TaskPolicy(always={"keeps"})) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        task = await client.call("keeps", session=session).result()
        failed = await until(client, task, *ENDED)
        assert (failed["status"], failed["error"]["code"]) == ("failed", -31012)


@pytest.mark.fails_in_background("a request")
@pytest.mark.parametrize("key", [None, "k"])
async def test_a_defect_after_the_handler_leaves_no_client_without_an_answer(
    key: str | None,
) -> None:
    """The tool ran: nobody knows what of it is stored."""
    async with world(store=Broken(), box=keeps_state()) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        error = await client.call("keeps", session=session, key=key).error()
        assert error["code"] == -31012
        assert w.inside.runner.running == w.inside.runner.calls.opened == 0


async def test_a_store_that_is_away_has_few_lines_however_many_calls_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A full disk got a line for each call, and the log was on that disk."""

    class Full(MemoryStore):
        async def change_state(self, *args: Any, **more: Any) -> Any:
            raise StoreUnavailable("no space left")

    async with world(store=Full(), box=keeps_state()) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        for _ in range(30):
            assert (await client.call("keeps", session=session).error())["code"] == -31012
    assert len([line for line in caplog.messages if "no space left" in line]) == MOST


async def test_an_outcome_that_cannot_be_written_is_an_error_of_the_task() -> None:
    """A server outside of this process may answer with as many levels as it likes."""
    deep: Json = {}
    for _ in range(2_000):
        deep = {"": deep}
    async with world(tasks=AT_ONCE) as w:
        task = await running_task(w)
        task.ends(deep, None)
        await task.settled()
        shown = await tasks_of(w).get(task.id, ANONYMOUS)
        assert (shown["status"], shown["error"]["code"]) == ("failed", -32603)


async def running_task(w: World) -> Any:
    """A task of a client that nobody knows."""
    tasks = tasks_of(w)
    inbound: Any = SimpleNamespace(principal=ANONYMOUS, peer=Peer("2026-07-28"), scope=None)
    task = await tasks.create(inbound, None, None)
    assert isinstance(task.record, TaskRecord)
    return task


class Away(MemoryStore):
    """Takes nothing new while it is away, and ends nothing."""

    is_away = False

    async def create(self, *args: Any, **more: Any) -> Any:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().create(*args, **more)

    async def end(self, session_id: Any) -> Any:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().end(session_id)


async def test_a_call_that_becomes_no_task_while_the_store_is_away_takes_the_room_of_one() -> None:
    """However long that is. Otherwise its client has no room for tasks when the store is back."""
    store = Away()
    policy = TaskPolicy(after=0.01, always={"echo"}, max_tasks_per_principal=3)
    async with world(store=store, tasks=policy) as w:
        client = client_of(w)
        store.is_away = True
        call = await w.waits(client.call("wait", {"gate": "g"}))
        await asyncio.sleep(60)
        store.is_away = False
        for _ in range(2):
            task = await client.call("echo", {"text": "hi"}).result()
            assert task["resultType"] == "task"
        assert (await call.result())["resultType"] == "task"
        assert len(await store.all_sessions()) == 3


async def test_a_task_loses_its_room_to_a_task_that_is_made_and_to_no_other() -> None:
    store = Away()
    policy = TaskPolicy(always={"wait"}, max_tasks=4)
    async with world(store=store, tasks=policy) as w:
        flood, bystander = [
            ModernClient(await w.carrier_from(address), capabilities=CAPABILITIES)
            for address in ("192.0.2.1", "192.0.2.2")
        ]
        made = [await flood.call("wait", {"gate": "g"}).result() for _ in range(4)]
        store.is_away = True
        for _ in range(3):
            assert (await bystander.call("wait", {"gate": "g"}).done()).status == 503
        store.is_away = False
        assert [(await got(flood, task))["status"] for task in made] == ["working"] * 4
        await bystander.call("wait", {"gate": "g"}).result()
        assert (await flood.send("tasks/get", named(made[0])).error())["code"] == -32602
        assert [(await got(flood, task))["status"] for task in made[1:]] == ["working"] * 3
        assert len(tasks_of(w)._owners) == len(await store.all_sessions()) == 4


@pytest.mark.parametrize("how", ["other", "sealed"])
async def test_a_task_that_cannot_be_read_costs_no_other_one_its_time(how: str) -> None:
    """A newer release wrote it, or it is sealed with a key that is gone. No round came behind it:
    tasks that ran were not kept, and those that had ended kept their room.
    """

    class Sealed(MemoryStore):
        async def load_data(self, session_id: Any) -> Any:
            if how == "sealed" and session_id == foreign:
                raise StoreRefused("another key")
            return await super().load_data(session_id)

    store, foreign = Sealed(), mint_session_id()
    async with world(store=store, tasks=AT_ONCE) as w:
        client = client_of(w)
        task = await client.call("wait", {"gate": "g"}).result()
        (running,) = await store.all_sessions()
        deadline = running.life.expires_at
        await store.create(
            running.mode, running.principal, peer=None, now=w.clock.now, session_id=foreign
        )
        await store.replace_data(foreign, {"status": "working", "newer": 1}, expected_version=0)
        await tasks_of(w)._look_at_all()
        w.clock.now += 1
        await tasks_of(w).round()
        kept = await store.load(running.session_id, now=w.clock.now)
        assert kept is not None
        assert kept.life.expires_at > deadline
        w.box.gate("g").go.set()
        assert (await until(client, task, *ENDED))["status"] == "completed"
