"""A store that fails once, at each call of a task's life: before its effect, after it, or for a
while. The client sends again what was refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from mcp_sessions.policy import TaskPolicy
from mcp_sessions.stores.memory.memory_store import MemoryStore
from tests.server.requests.test_tasks import CAPABILITIES, ENDED, counts, named, tasks_of, text_of
from tests.support.faulty_store import HOWS, Fault, How, Plan, faulty
from tests.support.modern import ModernClient
from tests.support.raw import Json, call_params
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.world import World, world

AWAY = (503, -32603)
"""Status or code of a request that the store failed."""

Story = Callable[[World, ModernClient], Awaitable[Json]]


async def sent(client: ModernClient, method: str, params: Json) -> Json:
    """The result, of as many sendings as it takes."""
    while True:
        received = await client.send(method, params).done()
        answer = received.messages[-1] if received.messages else {}
        if "result" in answer:
            return answer["result"]
        code = answer.get("error", {}).get("code")
        assert received.status in AWAY or code in AWAY, (received.status, answer)
        await asyncio.sleep(0.5)


async def shown(client: ModernClient, task: Json, *statuses: str) -> Json:
    while True:
        found = await sent(client, "tasks/get", named(task))
        if found["status"] in statuses:
            return found
        await asyncio.sleep(0.5)


async def answered(w: World, client: ModernClient) -> Json:
    """It asks, is answered, and ends."""
    task = await sent(client, "tools/call", call_params("ask", {"question": "who?"}))
    asked = await shown(client, task, "input_required")
    [key] = asked["inputRequests"]
    answers = {key: {"action": "accept", "content": {"answer": "me"}}}
    await sent(client, "tasks/update", named(task, inputResponses=answers))
    ended = await shown(client, task, *ENDED)
    assert text_of(ended) == "accept: me"
    return ended


async def cancelled(w: World, client: ModernClient) -> Json:
    task = await sent(client, "tools/call", call_params("wait", {"gate": "g"}))
    await sent(client, "tasks/cancel", named(task))
    ended = await shown(client, task, *ENDED)
    assert ended["status"] == "cancelled"
    assert w.box.gate("g").cancelled.is_set()
    return ended


async def long(w: World, client: ModernClient) -> Json:
    """It becomes a task while it runs, if the store has it in time."""
    sending = asyncio.create_task(sent(client, "tools/call", call_params("wait", {"gate": "g"})))
    await w.box.gate("g").started.wait()
    await asyncio.sleep(1)
    w.box.gate("g").go.set()
    result = await sending
    ended = await shown(client, result, *ENDED) if "taskId" in result else {"result": result}
    assert text_of(ended) == "through g"
    return ended


STORIES: dict[str, tuple[Story, TaskPolicy]] = {
    "answered": (answered, TaskPolicy(always={"ask"}, ttl=60)),
    "cancelled": (cancelled, TaskPolicy(always={"wait"}, ttl=60)),
    "long": (long, TaskPolicy(after=0.2, ttl=60)),
}


async def told(name: str, fault: Fault | None) -> list[str]:
    """Tell a story with a fault. Return the calls of the store."""
    plan, kept, (story, policy) = Plan(fault), MemoryStore(), STORIES[name]
    async with world(store=faulty(kept, plan), tasks=policy) as w:
        client = ModernClient(w.carrier, capabilities=CAPABILITIES)
        plan.arm()
        async with asyncio.timeout(120):
            ended = await story(w, client)
        plan.mend()
        # A call that was refused did not run.
        assert len(w.box.calls) == 1
        task_id = ended.get("taskId")
        if task_id is not None:
            assert await sent(client, "tasks/get", {"taskId": task_id}) == ended
        # One that is not stored yet is tried once more, and then given up: its call has ended.
        await asyncio.sleep(2)
        for running in list(tasks_of(w)._here.values()):
            await running.settled()
        w.clock.advance(61)
        await tasks_of(w).round()
        assert await kept.all_sessions() == []
        assert await counts(w) == 0
        return plan.calls


def run(work: Coroutine[Any, Any, list[str]]) -> list[str]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", STORIES)
def test_a_task_lives_and_ends_once_whichever_call_of_the_store_fails(name: str, how: How) -> None:
    calls = run(told(name, None))
    assert calls.count("create") == 1 and "replace_data" in calls
    for number, call in enumerate(calls):
        try:
            run(told(name, Fault(number, how)))
        except BaseException as failed:
            raise AssertionError(f"{how} call {number} ({call}) of {calls}") from failed
