"""A task is its principal's: to everybody else each id is one that never was (TSK1)."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sessions.policy import TaskPolicy
from mcp_sessions.testing import MakeStore
from tests.server.requests.test_tasks import CAPABILITIES, got, named, until
from tests.stores.every_store import every_store
from tests.support.modern import ModernClient, Received
from tests.support.raw import Json
from tests.support.replicas import user
from tests.support.world import World, world

_ID = "the-same"
_VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=80)
_ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from(["tasks/get", "tasks/update", "tasks/cancel", "subscriptions/listen"]),
        st.sampled_from(["runs", "ended", "expired", "of fewer scopes", "unknown", "text"]),
        _VISIBLE,
    ),
    min_size=4,
    max_size=12,
)


async def sent(client: ModernClient, method: str, task_id: str) -> tuple[Any, ...]:
    """All that the client gets: status, headers, and each byte of the body."""
    if method == "subscriptions/listen":
        params: Json = {"notifications": {"taskIds": [task_id]}}
        received: Received = client.send(method, params, request_id=_ID)
        await received.has(1)
        body = bytes(received.reply.body)
        received.leave()
        await received.gone()
    else:
        params = {"taskId": task_id, "inputResponses": {}}
        received = await client.send(method, params, request_id=_ID).done()
        body = bytes(received.reply.body)
    headers = sorted(each for each in received.reply.headers if each[0] != "date")
    return received.status, headers, body


async def tasks_of_alice(w: World) -> tuple[ModernClient, dict[str, str]]:
    weak, alice = [
        ModernClient(await w.carrier_of(user("alice", *scopes)), capabilities=CAPABILITIES)
        for scopes in ((), ("admin",))
    ]
    made: dict[str, str] = {}
    for kind, tool in (("expired", "echo"), ("ended", "echo"), ("runs", "wait")):
        task = await alice.call(tool, {"text": "hi", "gate": "g"}).result()
        made[kind] = task["taskId"]
        if tool == "echo":
            await until(alice, task, "completed")
        if kind == "expired":
            w.clock.now += 61
    made["of fewer scopes"] = made["runs"]
    return weak, made


@settings(max_examples=settings().max_examples // 10, deadline=None)
@given(attempts=_ATTEMPTS)
@pytest.mark.parametrize("make_store", every_store())
def test_unknown_expired_and_foreign_tasks_have_one_answer_byte_for_byte(
    make_store: MakeStore, attempts: list[tuple[str, str, str]]
) -> None:
    async def run() -> None:
        policy = TaskPolicy(always={"echo", "wait"}, ttl=60)
        async with world(store=make_store(), tasks=policy) as w:
            weak, made = await tasks_of_alice(w)
            bob = ModernClient(await w.carrier_of(user("bob")), capabilities=CAPABILITIES)
            unknown = "x" * 43
            about = await sent(bob, "tasks/get", unknown)
            assert b"-32602" in about[2]
            heard = await sent(bob, "subscriptions/listen", unknown)
            for method, kind, text in attempts:
                client = weak if kind == "of fewer scopes" else bob
                task_id = text if kind == "text" else made.get(kind, unknown)
                expected = heard if method == "subscriptions/listen" else about
                assert await sent(client, method, task_id) == expected, (method, kind)
            alice = ModernClient(
                await w.carrier_of(user("alice", "admin")), capabilities=CAPABILITIES
            )
            assert (await got(alice, named({"taskId": made["runs"]})))["status"] == "working"
            assert (await got(alice, named({"taskId": made["ended"]})))["status"] == "completed"
            assert await sent(alice, "tasks/get", made["expired"]) == about
            w.box.gate("g").go.set()

    asyncio.run(run())
