"""A tool takes longer than its client waits. A replica is killed meanwhile: three real processes.

The client's time and the tool's are a sixth of the story's 5 s and 30 s.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.replicas.test_chaos import Replica, replicas
from tests.support.apps import DEPRECATED
from tests.support.modern import MODERN, envelope, routing_headers
from tests.support.raw import Json
from tests.support.store_servers import STORE_SERVERS, store_server

pytestmark = [
    pytest.mark.full,
    pytest.mark.in_process,
    pytest.mark.on_network,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(DEPRECATED),
]

CAPABILITIES: Json = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
WAITS, TAKES = 5 / 6, 5.0
"""Seconds."""


@pytest.fixture(params=STORE_SERVERS)
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[list[Replica]]:
    options = ("--tasks", "--task-after", "0.2")
    with store_server(request.param) as store:
        with replicas(3, store.url, tmp_path, *options) as running:
            yield running


@asynccontextmanager
async def client_of(tmp_path: Path) -> AsyncGenerator["Caller"]:
    async with httpx.AsyncClient(timeout=WAITS) as http:
        yield Caller(http, tmp_path / "runs")


class Caller:
    def __init__(self, http: httpx.AsyncClient, runs: Path) -> None:
        self._http, self._runs = http, runs

    async def send(self, replica: Replica, method: str, params: Json) -> Json:
        members = {**params, "_meta": envelope(capabilities=CAPABILITIES)}
        message: Json = {"jsonrpc": "2.0", "id": 1, "method": method, "params": members}
        headers = {
            "Accept": "application/json, text/event-stream",
            "Mcp-Protocol-Version": MODERN,
            **routing_headers(message),
        }
        response = await self._http.post(replica.url("http"), json=message, headers=headers)
        return dict[str, Any](response.json()["result"])

    async def begins(self, replica: Replica) -> str:
        call: Json = {"name": "work", "arguments": {"name": "long", "pause": TAKES}}
        created = await self.send(replica, "tools/call", call)
        assert created["resultType"] == "task"
        return str(created["taskId"])

    async def ends(self, replica: Replica, task_id: str, *, within: float) -> Json:
        """Poll at another replica until the task has ended."""
        with anyio.fail_after(within):
            while True:
                try:
                    shown = await self.send(replica, "tasks/get", {"taskId": task_id})
                except httpx.TimeoutException:
                    # A busy machine: a poll is sent again.
                    continue
                if shown["status"] not in ("working", "input_required"):
                    return shown
                await asyncio.sleep(0.2)

    @property
    def ran(self) -> list[str]:
        return self._runs.read_text().split()


async def test_the_result_is_there_after_another_replica_was_killed(
    three: list[Replica], tmp_path: Path
) -> None:
    runner, killed, other = three
    async with client_of(tmp_path) as client:
        task_id = await client.begins(runner)
        shown = await client.send(killed, "tasks/get", {"taskId": task_id})
        assert shown["status"] == "working"
        killed.kill()
        ended = await client.ends(other, task_id, within=TAKES + 30)
        assert ended["status"] == "completed"
        assert ended["result"]["content"][0]["text"] == "long"
        assert client.ran == ["long"]


async def test_a_task_whose_runner_was_killed_fails_in_time_and_never_runs_again(
    three: list[Replica], tmp_path: Path
) -> None:
    runner, second, third = three
    async with client_of(tmp_path) as client:
        task_id = await client.begins(runner)
        runner.kill()
        began = time.monotonic()
        # A process without a sign of life is taken for dead after 9 s.
        ended = await client.ends(second, task_id, within=40)
        assert (ended["status"], ended["error"]["code"]) == ("failed", -31012)
        assert await client.ends(third, task_id, within=15) == ended
        runner.start()
        # Longer than the tool would have taken.
        await asyncio.sleep(max(0, began + TAKES + 1 - time.monotonic()))
        assert await client.ends(runner, task_id, within=15) == ended
        assert client.ran == ["long"]
