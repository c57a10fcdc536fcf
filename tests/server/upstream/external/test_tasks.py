"""Tasks of the wrapped server's own, beside those of the layer (SEP-2663)."""

import asyncio
from typing import Any

import pytest

from mcp_sessions.core.messages import error_body
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.policy import TaskPolicy
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.server.upstream.external.child_requests import NOT_STARTED
from mcp_sessions.server.upstream.external.peer import ExternalPeer
from mcp_sessions.server.upstream.port import UpstreamError
from mcp_sessions.stores.memory.memory_store import MemoryStore
from tests.server.requests.test_tasks import (
    CAPABILITIES,
    ENDED,
    FailingStore,
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
from tests.support.world import World, world


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


async def status_of(w: World, task_id: str) -> str:
    """The status that the server itself has of a task of its own."""
    await tasks_of(w).note_of_server({"taskId": task_id}, ANONYMOUS, None)
    return str((await got(client_of(w), {"taskId": task_id}))["status"])


async def test_two_owners_may_have_tasks_of_one_id_from_processes_of_their_own() -> None:
    """TSK1: each server numbers its own, and has one client."""
    policy = TaskPolicy(ttl=60, max_time=60, never={"own task"})
    async with world(server=modern_child(), tasks=policy) as w:
        clients = [
            ModernClient(await w.carrier_of(user(name)), capabilities=CAPABILITIES)
            for name in ("alice", "bob")
        ]
        made = [await client.call("own task").result() for client in clients]
        assert [task["taskId"] for task in made] == ["own 0", "own 0"]
        alice, bob = clients
        await alice.send("tasks/cancel", named(made[0])).result()
        assert (await got(alice, made[0]))["status"] == "cancelled"
        assert (await got(bob, made[1]))["status"] == "input_required"
        w.clock.advance(121)
        await tasks_of(w).round()
        assert tasks_of(w)._shares == {}


@pytest.mark.parametrize("way", ["cancel", "end"])
async def test_a_servers_own_task_ends_with_the_task_that_follows_it(way: str) -> None:
    async with servers_own(always={"own task"}) as w:
        client = client_of(w)
        session = (await client.start())["sessionId"]
        task = await client.call("own task", session=session).result()
        await until(client, task, "input_required")
        if way == "cancel":
            await client.send("tasks/cancel", named(task)).result()
        else:
            await client.send("session/end", {"sessionId": session}).result()
        ended = await until(client, task, *ENDED)
        assert ended["status"] == ("cancelled" if way == "cancel" else "failed")
        while w.inside.runner.running:  # noqa: ASYNC110  (it has no event for it)
            await asyncio.sleep(0.01)
        assert await status_of(w, "own 0") == "cancelled"


@pytest.mark.parametrize("why", ["too many", "the store is away"])
async def test_a_servers_own_task_that_cannot_be_noted_is_cancelled(why: str) -> None:
    """ERR6, ERR17: the tool has run, so no error says that nothing did."""
    store = FailingStore("create" if why == "the store is away" else "")
    policy = TaskPolicy(never={"own task"}, ttl=60, max_time=60, max_tasks_per_principal=1)
    server = modern_child(per="shared")
    async with world(store=store, server=server, tasks=policy) as w:
        client = client_of(w)
        if why == "too many":
            await client.call("own task").result()
        refused = client.call("own task")
        assert (await refused.error())["code"] == -31012
        assert refused.status == 200
        store.fails = ""
        await tasks_of(w).round()
        assert len(tasks_of(w)._owners) == len(await store.all_sessions()) == (why == "too many")
        w.clock.advance(121)
        await tasks_of(w).round()
        assert await status_of(w, "own 1" if why == "too many" else "own 0") == "cancelled"


async def test_a_servers_own_task_that_cannot_be_asked_for_is_not_one_that_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ERR17: its process died, and no other one starts. The tool has run."""
    served = ExternalPeer.served

    async def refuses(peer: Any, call: Any, method: str, *params: Any) -> Any:
        if method == "tasks/get":
            data = {"reason": NOT_STARTED, "started": False}
            raise UpstreamError(error_body(INTERNAL_ERROR, "no process starts", data))
        return await served(peer, call, method, *params)

    monkeypatch.setattr(ExternalPeer, "served", refuses)
    async with servers_own(always={"own task"}) as w:
        client = client_of(w)
        task = await client.call("own task").result()
        assert (await until(client, task, "failed"))["error"]["code"] == -31012
