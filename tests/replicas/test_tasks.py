"""A task that runs at one replica is polled, fed and cancelled at another (SEP-2663)."""

import asyncio

import pytest

from mcp_sessions.policy import TaskPolicy
from mcp_sessions.server.cluster.shared_bus import SharedBus
from tests.replicas.test_children import UNKNOWN, short_lives
from tests.server.requests.test_tasks import (
    CAPABILITIES,
    ENDED,
    Box,
    got,
    named,
    tasks_of,
    text_of,
    until,
)
from tests.support.modern import ModernClient
from tests.support.replicas import Cluster, cluster
from tests.support.virtual_time import cycles
from tests.support.world import Toolbox

pytestmark = pytest.mark.in_process

TASKS = TaskPolicy(always={"ask", "wait"})


def clients(c: Cluster) -> list[ModernClient]:
    return [ModernClient(w.carrier, capabilities=CAPABILITIES) for w in c.worlds]


@pytest.mark.parametrize("seed", range(3))
async def test_a_question_of_a_task_is_answered_at_any_replica(seed: int) -> None:
    async with cluster(3, seed=seed, tasks=TASKS) as c:
        at = clients(c)
        task = await at[0].call("ask", {"question": "who?"}).result()
        asked = await until(at[1], task, "input_required")
        [key] = asked["inputRequests"]
        answers = {key: {"action": "accept", "content": {"answer": "me"}}}
        await at[2].send("tasks/update", named(task, inputResponses=answers)).result()
        for client in at:
            assert text_of(await until(client, task, *ENDED)) == "accept: me"
        assert [w.box.calls for w in c.worlds] == [["ask"], [], []]


async def test_a_task_is_cancelled_at_another_replica() -> None:
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("wait", {"gate": "g"}).result()
        await other.send("tasks/cancel", named(task)).result()
        assert (await until(other, task, *ENDED))["status"] == "cancelled"
        assert c[0].box.gate("g").cancelled.is_set()


async def test_a_task_whose_replica_was_killed_has_failed_and_runs_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short_lives(monkeypatch)
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("wait", {"gate": "g"}).result()
        c.kill(0)
        async with asyncio.timeout(10):
            failed = await until(other, task, *ENDED)
        assert (failed["status"], failed["error"]["code"]) == ("failed", UNKNOWN)
        assert c[1].box.calls == []


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_task_that_failed_as_its_replica_seemed_dead_has_no_second_end(
    is_told: bool,
) -> None:
    """A replica that stands still is taken for dead. Then it goes on, and its tool ends."""
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("wait", {"gate": "g"}).result()
        bus = c[1].inside.bus
        alive, sends = bus.is_alive, bus.try_send

        async def seems_dead(process: str) -> bool:
            return False

        async def loses(message: object, *, to: str | None = None) -> None: ...

        bus.is_alive = seems_dead  # pyright: ignore[reportAttributeAccessIssue]
        if not is_told:
            bus.try_send = loses  # pyright: ignore[reportAttributeAccessIssue]
        failed = await until(other, task, *ENDED)
        assert (failed["status"], failed["error"]["code"]) == ("failed", UNKNOWN)
        bus.is_alive, bus.try_send = alive, sends  # pyright: ignore[reportAttributeAccessIssue]
        gate = c[0].box.gate("g")
        if is_told:
            async with asyncio.timeout(10):
                await gate.cancelled.wait()
        gate.go.set()
        assert await until(one, task, *ENDED) == failed
        assert await until(other, task, *ENDED) == failed


async def test_an_answer_whose_message_is_lost_arrives_with_a_poll() -> None:
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("ask", {"question": "who?"}).result()
        [key] = (await until(other, task, "input_required"))["inputRequests"]
        answers = {key: {"action": "accept", "content": {"answer": "me"}}}
        bus = c[1].inside.bus
        lost: list[object] = []
        sends = bus.try_send

        async def loses(message: object, *, to: str | None = None) -> None:
            lost.append(message)

        bus.try_send = loses  # pyright: ignore[reportAttributeAccessIssue]
        await other.send("tasks/update", named(task, inputResponses=answers)).result()
        bus.try_send = sends  # pyright: ignore[reportAttributeAccessIssue]
        assert len(lost) == 1
        assert text_of(await until(other, task, *ENDED)) == "accept: me"


async def test_a_replica_that_seemed_dead_shows_the_end_that_another_one_has_shown() -> None:
    """Nothing has told it yet, and its tool still runs."""
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("wait", {"gate": "g"}).result()
        bus = c[1].inside.bus
        alive = bus.is_alive

        async def seems_dead(process: str) -> bool:
            return False

        async def loses(message: object, *, to: str | None = None) -> None: ...

        bus.is_alive = seems_dead  # pyright: ignore[reportAttributeAccessIssue]
        bus.try_send = loses  # pyright: ignore[reportAttributeAccessIssue]
        failed = await got(other, task)
        bus.is_alive = alive  # pyright: ignore[reportAttributeAccessIssue]
        assert (failed["status"], failed["error"]["code"]) == ("failed", UNKNOWN)
        assert await got(one, task) == failed


@pytest.mark.parametrize("is_gap", [True, False])
async def test_a_cancellation_whose_message_is_lost_arrives_though_nobody_polls(
    is_gap: bool,
) -> None:
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("wait", {"gate": "g"}).result()
        bus = c[1].inside.bus
        sends = bus.try_send

        async def loses(message: object, *, to: str | None = None) -> None: ...

        bus.try_send = loses  # pyright: ignore[reportAttributeAccessIssue]
        await other.send("tasks/cancel", named(task)).result()
        bus.try_send = sends  # pyright: ignore[reportAttributeAccessIssue]
        if is_gap:
            bus = c[0].inside.bus
            assert isinstance(bus, SharedBus)
            bus.on_gap()
        else:
            await tasks_of(c[0]).round()
        async with asyncio.timeout(10):
            await c[0].box.gate("g").cancelled.wait()
        assert (await until(other, task, *ENDED))["status"] == "cancelled"


async def test_the_end_of_a_session_at_another_replica_ends_its_task() -> None:
    async with cluster(2, tasks=TASKS) as c:
        one, other = clients(c)
        session = (await one.start())["sessionId"]
        task = await one.call("wait", {"gate": "g"}, session=session).result()
        await other.send("session/end", {"sessionId": session}).result()
        ended = await until(other, task, *ENDED)
        assert (ended["status"], ended["error"]["code"]) == ("failed", -32043)
        assert c[0].box.gate("g").cancelled.is_set()


@pytest.mark.parametrize("seed", range(6))
async def test_answers_that_come_at_two_replicas_at_once_are_both_taken(seed: int) -> None:
    def boxed() -> tuple[Toolbox, None]:
        return Box(), None

    async with cluster(3, seed=seed, server=boxed, tasks=TaskPolicy(always={"ask_two"})) as c:
        at = clients(c)
        task = await at[0].call("ask_two").result()
        asked = await until(at[1], task, "input_required", questions=2)
        sendings = [
            client.send(
                "tasks/update",
                named(
                    task,
                    inputResponses={key: {"action": "accept", "content": {"answer": key}}},
                ),
            )
            for client, key in zip(at[1:], asked["inputRequests"], strict=True)
        ]
        for sending in sendings:
            assert await sending.result() == {"resultType": "complete"}
        ended = [await until(client, task, *ENDED) for client in at]
        assert text_of(ended[0]) == "question-1 question-2"
        assert ended == [ended[0]] * 3


@pytest.mark.parametrize("seed", range(6))
async def test_two_answers_to_one_question_at_once_are_one_answer(seed: int) -> None:
    async with cluster(3, seed=seed, tasks=TASKS) as c:
        at = clients(c)
        task = await at[0].call("ask", {"question": "who?"}).result()
        [key] = (await until(at[1], task, "input_required"))["inputRequests"]
        sendings = [
            client.send(
                "tasks/update",
                named(
                    task,
                    inputResponses={key: {"action": "accept", "content": {"answer": name}}},
                ),
            )
            for client, name in zip(at, "abc", strict=True)
        ]
        for sending in sendings:
            assert await sending.result() == {"resultType": "complete"}
        ended = [await until(client, task, *ENDED) for client in at]
        assert text_of(ended[0]) in {f"accept: {name}" for name in "abc"}
        assert ended == [ended[0]] * 3


@pytest.mark.parametrize("seed", range(6))
async def test_a_cancellation_that_meets_the_end_leaves_one_end(seed: int) -> None:
    async with cluster(2, seed=seed, tasks=TASKS) as c:
        one, other = clients(c)
        task = await one.call("wait", {"gate": "g"}).result()
        sending = other.send("tasks/cancel", named(task))
        await cycles(seed * 7)
        c[0].box.gate("g").go.set()
        assert await sending.result() == {"resultType": "complete"}
        ended = [await until(client, task, *ENDED) for client in (one, other)]
        assert ended[0]["status"] in ("completed", "cancelled")
        again = await other.send("tasks/cancel", named(task)).result()
        assert again == {"resultType": "complete"}
        assert [await until(client, task, *ENDED) for client in (other, one)] == ended[::-1]
