"""A task ends once, and its client learns it, whatever fails after its handler (SEP-2663)."""

import asyncio
from typing import Any

import pytest

from mcp_sessions import current_session
from mcp_sessions.core.task import TaskRecord
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.stores.memory.memory_store import MemoryStore
from tests.server.requests.test_task_listening import listen_to, told
from tests.server.requests.test_tasks import AT_ONCE, ENDED, Box, client_of, named, tasks_of, until
from tests.support.raw import Json
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
    peer: Any = type("Peer", (), {"modern": True, "capabilities": {}})
    task = await tasks.create(ANONYMOUS, peer, None)
    assert isinstance(task.record, TaskRecord)
    return task
