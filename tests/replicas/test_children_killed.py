"""Replicas in processes of their own, over a command: one is killed, one stands still."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from mcp_sessions.security import mint_key
from tests.support.children import CHILD, children_of, is_alive, until
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.raw import RawClient, SocketCarrier, in_session, keyed
from tests.support.store_servers import on_each_server, store_server

pytestmark = [
    pytest.mark.full,
    pytest.mark.in_process,
    pytest.mark.on_network,
    pytest.mark.timeout(180),
]

UNKNOWN = -31012


@asynccontextmanager
async def two_replicas(
    store: str, notes: Path
) -> AsyncGenerator[list[tuple["subprocess.Popen[bytes]", SocketCarrier]]]:
    """That serve the child server; afterwards none of its processes is left."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(store_server(store))
        environment = {**os.environ, "MCP_SESSIONS_KEYS": mint_key()}
        served: list[tuple[subprocess.Popen[bytes], SocketCarrier]] = []
        pids: set[int] = set()
        try:
            for _ in range(2):
                port = free_port()
                command = [
                    sys.executable, "-m", "mcp_sessions.cli", "serve", "--store", server.url,
                    "--port", str(port), "--log-level", "warning", "--env", f"CALLS={notes}",
                    "--", sys.executable, "-S", CHILD,
                ]  # fmt: skip
                process = subprocess.Popen(command, env=environment)  # noqa: ASYNC220
                carrier = SocketCarrier("127.0.0.1", port)
                served.append((process, carrier))
                stack.push_async_callback(carrier.aclose)
                wait_until_it_listens(process, port)
            yield served
            pids = {pid for process, _ in served for pid in children_of(process.pid)}
        finally:
            for process, _ in served:
                process.kill()
                process.wait(10)
        await until(lambda: not any(map(is_alive, pids)), "nothing is left")


def calls(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


@on_each_server
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGSTOP])
async def test_who_takes_over_runs_nothing_twice_and_who_wakes_asks_its_old_process_nothing(
    store: str, tmp_path: Path, ends: signal.Signals
) -> None:
    """What ran there is -31012; what comes next has one new process, at both replicas."""
    notes = tmp_path / "notes"
    async with two_replicas(store, notes) as ((owner, first), (_, second)):
        client, other = RawClient(first), RawClient(second)
        await client.initialize()
        other.session_id, other.numbers = client.session_id, client.numbers
        session_id = (await client.start())["sessionId"]
        meta = in_session(session_id)
        old = int(await client.text("pid", meta=meta))
        running = [other.call("wait", meta=keyed("once", session_id))]
        if ends == signal.SIGSTOP:
            # Its client learns of it when it goes on.
            running.append(client.call("wait", meta=meta))
        await until(lambda: "wait" in calls(notes), "it runs")
        owner.send_signal(ends)

        await running[0].reply.until(lambda: running[0].reply.ended, "it is given up", within=40)
        assert (await running[0].error())["code"] == UNKNOWN
        new = await other.text("pid", meta=meta)
        assert int(new) != old
        assert (await other.call("wait", meta=keyed("once", session_id)).error())["code"] == UNKNOWN
        if ends == signal.SIGKILL:
            await until(lambda: not is_alive(old), "the layer's death is its process's")
        else:
            owner.send_signal(signal.SIGCONT)
            counts = [await each.text("count", meta=meta) for each in (client, other, client)]
            assert counts == ["2", "3", "4"], "one process has all of them"
            await until(lambda: not is_alive(old), "its old process ended")
            assert (await running[1].error())["code"] == UNKNOWN
        assert calls(notes).count("wait") == 1
        assert json.loads(await other.text("state", meta=meta))["subscribed"] == []
