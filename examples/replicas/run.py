"""Three replicas on one Redis, a round-robin proxy, a stock client; one replica is killed.

    python examples/replicas/run.py
    python examples/replicas/run.py --store redis://localhost:6379

The replicas are ``mcp-sessions serve`` of the notes server next to this folder. The client is
the SDK's own and knows nothing of any of this: it subscribes to a note, writes it again and
again, and watches. Every request of it comes to another replica. In the middle the replica
that its stream hangs on is killed.
"""

import argparse
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp import Client

from mcp_sessions.security import mint_key

HERE = Path(__file__).resolve().parent
NOTES_SERVER = HERE.parent / "notes_server.py"
NOTE = "note://today"
CALLS = 30
"""Calls before the replica is killed, and as many after."""

WITHIN = 30.0
"""Seconds that anything may take to start, or an update to arrive."""


@contextmanager
def process(*command: str, port: int, **environment: str) -> Generator["subprocess.Popen[bytes]"]:
    running = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + WITHIN
        while running.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise SystemExit(f"{command[0]} did not start")
        yield running
    finally:
        running.kill()
        running.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Watcher:
    def __init__(self) -> None:
        self.updates = 0
        self._received = asyncio.Event()

    async def on_message(self, message: Any) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            self.updates += 1
            self._received.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(WITHIN):
            while self.updates < count:
                self._received.clear()
                await self._received.wait()


def holder(ports: list[int]) -> int:
    """Return the replica that has a client's stream: its connection stays open."""
    table = Path("/proc/net/tcp")
    lines = table.read_text().splitlines() if table.exists() else []
    for number, port in enumerate(ports):
        # Its remote end is the port, and 01 means established.
        if any(f":{port:04X} 01 " in line for line in lines):
            return number
    return 0


async def watch(url: str, kill_one: Callable[[], None]) -> None:
    watcher = Watcher()
    client = Client(url, mode="legacy", message_handler=watcher.on_message)
    async with client:
        await client.call_tool("write_note", {"name": "today", "text": "begun"})
        # The transport of the handshake era, which most clients speak.
        await client.session.subscribe_resource(NOTE)  # pyright: ignore[reportDeprecated]
        # Its stream opens a moment after the handshake; what is sent by then waits for it.
        for number in range(CALLS):
            await client.call_tool("append_note", {"name": "today", "text": f"line {number}"})
        await watcher.wait_for(1)
        print(f"{CALLS} calls, every one to the next of three replicas")
        kill_one()
        for number in range(CALLS, 2 * CALLS):
            await client.call_tool("append_note", {"name": "today", "text": f"line {number}"})
        before = watcher.updates
        await client.call_tool("append_note", {"name": "today", "text": "the end"})
        await watcher.wait_for(before + 1)
        text = (await client.read_resource(NOTE)).contents[0]
        assert isinstance(text, types.TextResourceContents)
        lines = text.text.splitlines()
        assert (
            lines[-1] == "the end" and len([line for line in lines if "line" in line]) == 2 * CALLS
        )
        print(f"{CALLS} calls more, and the client still hears of every change")


def main() -> None:
    """Run it; exit code 0 if the client noticed nothing."""
    parser = argparse.ArgumentParser(description="Three replicas; one of them is killed.")
    parser.add_argument("--store", help="a Redis or Valkey; else one is started for this run")
    store = parser.parse_args().store
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        if store is None:
            server = shutil.which("redis-server") or shutil.which("valkey-server")
            if server is None:
                raise SystemExit(
                    "redis-server is missing: apt install redis-server, or --store URL"
                )
            port = free_port()
            options = ("--port", str(port), "--save", "", "--bind", "127.0.0.1")
            stack.enter_context(process(server, *options, port=port))
            store = f"redis://127.0.0.1:{port}"
        # All replicas seal what they give to clients with the same key.
        shared = {"MCP_SESSIONS_KEYS": mint_key(), "NOTES_DIR": directory}
        ports = [free_port() for _ in range(3)]
        replicas: list[subprocess.Popen[bytes]] = []
        for port in ports:
            serve = ("-m", "mcp_sessions.cli", "serve", str(NOTES_SERVER), "--store", store)
            command = (sys.executable, *serve, "--port", str(port))
            replicas.append(stack.enter_context(process(*command, port=port, **shared)))
        entrance = free_port()
        origins = [f"http://127.0.0.1:{port}" for port in ports]
        robin = (sys.executable, str(HERE / "round_robin.py"), str(entrance), *origins)
        stack.enter_context(process(*robin, port=entrance))
        print(f"three replicas on {ports}, a proxy on {entrance}, one store")

        def kill_one() -> None:
            number = holder(ports)
            replicas[number].kill()
            replicas[number].wait()
            print(f"replica {number + 1} of 3 is killed")

        asyncio.run(watch(f"http://127.0.0.1:{entrance}/mcp", kill_one))
        print("the client noticed nothing")


if __name__ == "__main__":
    main()
