"""Tasks of the wrapped server's own, beside those of the layer (SEP-2663)."""

from typing import Any

from mcp_sessions.policy import TaskPolicy
from mcp_sessions.stores.memory.memory_store import MemoryStore
from tests.server.requests.test_tasks import (
    CAPABILITIES,
    ENDED,
    client_of,
    got,
    named,
    tasks_of,
    text_of,
    until,
)
from tests.server.upstream.external.test_upstream import user
from tests.support.children import modern_child
from tests.support.modern import ModernClient
from tests.support.raw import Json
from tests.support.world import world


def servers_own(**policy: Any) -> Any:
    """A layer over a server with tasks of its own."""
    return world(server=modern_child(per="shared"), tasks=TaskPolicy(**policy))


async def test_a_task_of_the_servers_own_stays_the_servers() -> None:
    async with servers_own(never={"own task"}) as w:
        client = client_of(w)
        task = await client.call("own task").result()
        assert (task["resultType"], task["taskId"]) == ("task", "own 0")
        shown = await got(client, task)
        assert shown["status"] == "input_required"
        answers = {key: {"action": "decline"} for key in shown["inputRequests"]}
        await client.send("tasks/update", named(task, inputResponses=answers)).result()
        ended = await got(client, task)
        assert ended["status"] == "completed"
        assert text_of(ended) == '{"q": {"action": "decline"}}'
        other = await client.call("own task").result()
        await client.send("tasks/cancel", named(other)).result()
        assert (await got(client, other))["status"] == "cancelled"


async def test_a_task_of_the_servers_own_is_its_owners() -> None:
    async with servers_own() as w:
        alice, bob = [
            ModernClient(await w.carrier_of(user(name)), capabilities=CAPABILITIES)
            for name in ("alice", "bob")
        ]
        task = await alice.call("own task").result()
        said: list[Json] = []
        for method in ("get", "update", "cancel"):
            for known in (task, {"taskId": "own 1"}):
                params = named(known, inputResponses={"q": {"action": "decline"}})
                said.append(await bob.send(f"tasks/{method}", params).error())
        assert said == [{"code": -32602, "message": "Invalid params: there is no such task"}] * 6
        assert (await got(alice, task))["status"] == "input_required"


async def test_a_call_that_is_a_task_here_has_the_outcome_of_the_servers_own() -> None:
    """The server answered late, such as after its start."""
    async with servers_own(always={"own task"}) as w:
        client = client_of(w)
        task = await client.call("own task").result()
        shown = await until(client, task, "input_required", *ENDED)
        [key] = shown["inputRequests"]
        answers = {key: {"action": "decline"}}
        await client.send("tasks/update", named(task, inputResponses=answers)).result()
        assert text_of(await until(client, task, *ENDED)) == '{"q": {"action": "decline"}}'


async def test_what_is_noted_of_a_servers_task_is_forgotten_in_time() -> None:
    store = MemoryStore()
    policy = TaskPolicy(ttl=60, max_time=60)
    async with world(store=store, server=modern_child(per="shared"), tasks=policy) as w:
        client = client_of(w)
        task = await client.call("own task").result()
        assert (await got(client, task))["status"] == "input_required"
        w.clock.now += 121
        await tasks_of(w).round()
        assert await store.all_sessions() == []
        assert (await client.send("tasks/get", named(task)).error())["code"] == -32602
