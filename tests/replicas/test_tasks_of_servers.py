"""Tasks of a command that runs at a replica, while the store is away (ERR17)."""

import asyncio
from typing import Any

import pytest

from mcp_sessions.policy import TaskPolicy
from tests.server.requests.test_tasks import CAPABILITIES, ENDED, tasks_of, until
from tests.support.children import modern_child
from tests.support.modern import ModernClient
from tests.support.raw import Json
from tests.support.replicas import Cluster, cluster
from tests.support.world import Toolbox

pytestmark = [pytest.mark.on_network, pytest.mark.in_process]


def server() -> tuple[Toolbox, object]:
    return Toolbox(), modern_child()


async def client_in(c: Cluster) -> tuple[ModernClient, str]:
    """A client, and its session: a process has the command for it, which the store names."""
    client = ModernClient(c[0].carrier, capabilities=CAPABILITIES)
    return client, (await client.start())["sessionId"]


async def test_a_call_that_the_server_answered_is_not_one_that_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client would send it again, and the tool would run twice."""
    async with cluster(1, server=server, tasks=TaskPolicy(never={"own task"})) as c:
        client, session = await client_in(c)
        tasks = tasks_of(c[0])
        note = tasks.note_of_server

        async def note_while_away(*args: Any) -> None:
            c.backplane.is_away = True
            await note(*args)

        monkeypatch.setattr(tasks, "note_of_server", note_while_away)
        call = client.call("own task", session=session)
        error = await call.error()
        c.backplane.is_away = False
        assert (call.status, error) == (200, {"code": -31012, "message": "Outcome unknown"})


async def answered_while_away(
    c: Cluster, tool: str, arguments: Json, caplog: pytest.LogCaptureFixture, said: str
) -> Json:
    """A task whose question was answered while the store was away, until that was said."""
    client, session = await client_in(c)
    task = await client.call(tool, arguments, session=session).result()
    [key] = (await until(client, task, "input_required"))["inputRequests"]
    here = tasks_of(c[0])._here[task["taskId"]]
    assert await here.settled(5)
    c.backplane.is_away = True
    here.answered({key: {"action": "decline"}})
    async with asyncio.timeout(10):
        while said not in caplog.text:  # noqa: ASYNC110  (it has no event for it)
            await asyncio.sleep(0.01)
    c.backplane.is_away = False
    return await until(client, task, *ENDED)


async def test_a_task_that_follows_the_servers_own_outlives_a_store_that_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It failed, and the server's ran on."""
    policy = TaskPolicy(always={"own task"}, poll_interval=0.05)
    async with cluster(1, server=server, tasks=policy) as c:
        ended = await answered_while_away(c, "own task", {}, caplog, "asked later")
        assert ended["status"] == "completed"


async def test_a_later_round_of_a_task_is_not_a_call_that_did_not_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(1, server=server, tasks=TaskPolicy(always={"ask"})) as c:
        ended = await answered_while_away(c, "ask", {"question": "?"}, caplog, "may be lost")
        assert ended["error"] == {"code": -31012, "message": "Outcome unknown"}
