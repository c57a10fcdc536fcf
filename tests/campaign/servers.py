"""The processes of a campaign: ``mcp-sessions serve``, and what they store in."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from mcp_sessions.security import mint_key
from tests.support.disks import full, mounted, unmount
from tests.support.postgres_server import PostgresServer
from tests.support.processes import ROOT, free_port, wait_until_it_listens
from tests.support.proxy import TcpProxy
from tests.support.redis_server import RedisServer

_FAKETIME: Final = [
    *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    *Path("/usr/lib").glob("faketime/libfaketime.so.1"),
]

CLOCKS_JUMP: Final = bool(_FAKETIME)
"""Whether libfaketime is here."""

_READY_WITHIN: Final = 90.0


class Replica:
    """One process that serves. It keeps its port and its clock over restarts."""

    def __init__(self, number: int, folder: Path, store: str, key: str) -> None:
        self.port = free_port()
        self.is_up = False
        self._clock = folder / f"clock-{number}"
        self._log = folder / f"log-{number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT}/transports",
            "HISTORY": str(folder),
            "STORE": store,
            "MCP_SESSIONS_KEYS": key,
        }
        if _FAKETIME:
            self._env |= {
                "LD_PRELOAD": str(_FAKETIME[0]),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        self.skew(0)

    def skew(self, seconds: int) -> None:
        """Set its clock so much ahead; that a clock never goes back is nobody's promise."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds:+d}")
        new.replace(self._clock)

    async def start(self) -> None:
        await asyncio.to_thread(self._start)
        self.is_up = True

    def _start(self) -> None:
        app = f"{ROOT / 'tests/campaign/app.py'}:layer"
        serve = ["serve", app, "--port", str(self.port), "--log-level", "warning"]
        serve += ["--health", "/health"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mcp_sessions.cli", *serve],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, cwd=ROOT,
            )  # fmt: skip
        wait_until_it_listens(self._process, self.port, lambda: self._log.read_text()[-2000:])

    async def revive(self) -> bool:
        """Return once it is ready; whether it had ended, as it does if its store refuses it.

        Raises:
            AssertionError: It is not ready within ``_READY_WITHIN`` seconds.
        """
        has_ended, until = False, time.monotonic() + _READY_WITHIN
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                has_ended, self.is_up = True, False
                await self.start()
            if await asyncio.to_thread(self._is_ready):
                return has_ended
            await asyncio.sleep(0.1)
        raise AssertionError(f"a replica is not ready: {self._log.read_text()[-2000:]}")

    def _is_ready(self) -> bool:
        asking = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            asking.request("GET", "/health/readyz")
            return asking.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            asking.close()

    def kill(self) -> None:
        """``kill -9``."""
        self.is_up = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """SIGTERM: it drains."""
        process = self._process
        assert process is not None
        process.terminate()
        self.is_up = False
        try:
            await asyncio.to_thread(process.wait, 30)
        finally:
            self.kill()

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class Redis:
    """A Redis that writes each change to its file before it answers, and its replica.

    Args:
        address: Leads to the primary, whichever that is.
    """

    kinds = (
        "redis killed", "redis paused", "redis clients killed", "redis subscribers killed",
        "redis full", "redis scripts flushed", "redis handed over", "redis failed over",
    )  # fmt: skip

    def __init__(self, folder: Path, address: TcpProxy) -> None:
        self._address = address
        self.url = f"redis://{address.host}:{address.port}"
        self._primary, self._replica = (_redis(folder / name) for name in ("one", "other"))
        self._primary.start()
        self._leads_to(self._primary)
        self._replica.start()
        self._follow()

    async def fault(self, kind: str, seconds: float) -> None:
        """Make it, and heal it after so long."""
        server = self._primary
        match kind:
            case "redis killed":
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(seconds)
                await asyncio.to_thread(server.start)
            case "redis paused":
                server.suspend()
                await asyncio.sleep(seconds)
                server.resume()
            case "redis clients killed":
                await self._asked("CLIENT KILL TYPE normal SKIPME yes")
            case "redis subscribers killed":
                await self._asked("CLIENT KILL TYPE pubsub")
            case "redis full":
                await self._asked("CONFIG SET maxmemory 1")
                await asyncio.sleep(seconds)
                await self._asked("CONFIG SET maxmemory 0")
            case "redis scripts flushed":
                await self._asked("SCRIPT FLUSH")
            case "redis handed over":
                await asyncio.to_thread(self._is_followed)
                await self._asked("FAILOVER")
                await asyncio.to_thread(server.wait_for, _ROLE, "role:slave")
                await asyncio.sleep(seconds)
                self._change_places()
            case "redis failed over":
                await asyncio.to_thread(self._is_followed)
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(seconds)
                await asyncio.to_thread(self._replica.ask, "REPLICAOF NO ONE")
                self._change_places()
                await asyncio.to_thread(self._replica.start)
                await asyncio.to_thread(self._follow)
            case _:
                raise AssertionError(kind)

    def _change_places(self) -> None:
        self._primary, self._replica = self._replica, self._primary
        self._leads_to(self._primary)

    def _leads_to(self, server: RedisServer) -> None:
        self._address.retarget("127.0.0.1", server.port)

    def _follow(self) -> None:
        self._replica.ask(f"REPLICAOF 127.0.0.1 {self._primary.port}")
        self._is_followed()

    def _is_followed(self) -> None:
        self._replica.wait_for(_ROLE, "master_link_status:up")

    async def _asked(self, command: str) -> None:
        """Another fault may last just now: ask until it answers."""
        for _ in range(60):
            try:
                await asyncio.to_thread(self._primary.ask, command)
            except OSError:
                await asyncio.sleep(0.5)
            else:
                return
        raise AssertionError(f"Redis did not take {command}")

    def end(self) -> None:
        for server in (self._primary, self._replica):
            server.kill()


def _redis(folder: Path) -> RedisServer:
    folder.mkdir()
    return RedisServer(
        folder, "--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"
    )


_ROLE: Final = "INFO replication"


class Postgres:
    """A Postgres that waits for its disk before it answers, and its standby.

    Args:
        address: Leads to the primary, whichever that is.
    """

    kinds = (
        "postgres killed", "postgres paused", "postgres connections ended",
        "postgres listeners ended", "postgres full", "postgres read-only",
        "postgres handed over", "postgres failed over",
    )  # fmt: skip

    def __init__(self, folder: Path, address: TcpProxy) -> None:
        self._address = address
        self.url = f"postgresql://sessions@{address.host}:{address.port}/postgres"
        # Its user has to come to its own folders.
        folder.chmod(0o711)
        folders = [folder / name for name in ("one", "other")]
        self._disks = [each for each in folders if mounted(each, 256)]
        if len(self._disks) < len(folders):
            self.kinds = tuple(kind for kind in self.kinds if kind != "postgres full")
        # So few that what it writes to its disk is new: it has nowhere to write if that is full.
        options = ("-c", "min_wal_size=32MB", "-c", "max_wal_size=32MB")
        self._primary, self._standby = (PostgresServer(each, *options) for each in folders)
        self._primary.start()
        self._leads_to(self._primary)
        self._standby.follow(self._primary)

    async def fault(self, kind: str, seconds: float) -> None:
        """Make it, and heal it after so long."""
        server = self._primary
        match kind:
            case "postgres killed":
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(seconds)
                await asyncio.to_thread(server.start)
            case "postgres paused":
                server.suspend()
                await asyncio.sleep(seconds)
                server.resume()
            case "postgres connections ended":
                await self._asked(f"{_END} WHERE application_name = 'mcp-sessions'")
            case "postgres listeners ended":
                # What such a connection did last: it listens, and gives signs of life.
                await self._asked(f"{_END} WHERE query ~ '^(LISTEN|SELECT 1$)'")
            case "postgres full":
                with full(server.directory):
                    await asyncio.sleep(seconds)
                if not server.is_running:
                    # It ends if there is no room for its log.
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
            case "postgres read-only":
                for value in ("on", "off"):
                    await self._asked(f"ALTER SYSTEM SET default_transaction_read_only TO {value}")
                    await self._asked("SELECT pg_reload_conf()")
                    await asyncio.sleep(seconds if value == "on" else 0)
            case "postgres handed over":
                await asyncio.to_thread(server.wait_until_followed)
                await asyncio.to_thread(server.stop)
                await self._change_places(seconds)
            case "postgres failed over":
                await asyncio.to_thread(server.kill)
                await self._change_places(seconds)
            case _:
                raise AssertionError(kind)

    async def _change_places(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._standby.promote)
        self._primary, self._standby = self._standby, self._primary
        self._leads_to(self._primary)
        await asyncio.to_thread(self._standby.follow, self._primary)

    def _leads_to(self, server: PostgresServer) -> None:
        self._address.retarget("127.0.0.1", server.port)

    async def _asked(self, sql: str) -> None:
        """Another fault may last just now: ask until it answers."""
        for _ in range(60):
            try:
                await asyncio.to_thread(self._primary.ask, sql)
            except (OSError, subprocess.TimeoutExpired):
                await asyncio.sleep(0.5)
            else:
                return
        raise AssertionError(f"Postgres did not take {sql}")

    def end(self) -> None:
        for server in (self._primary, self._standby):
            server.kill()
        for disk in self._disks:
            unmount(disk)


_END: Final = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"


class File:
    """A SQLite file, on a disk of its own if we may mount one."""

    kinds = ("file locked",)

    def __init__(self, folder: Path, durability: str) -> None:
        self._disk = folder / "disk"
        self._is_mounted = mounted(self._disk, 64)
        if self._is_mounted:
            self.kinds = ("file locked", "disk full")
        self._path = self._disk / "sessions.db"
        self.url = f"sqlite:///{self._path}?durability={durability}"

    async def fault(self, kind: str, seconds: float) -> None:
        """Make it, and heal it after so long."""
        if kind == "file locked":
            over = threading.Event()
            locking = asyncio.create_task(asyncio.to_thread(self._lock, over))
            await asyncio.sleep(seconds)
            over.set()
            await locking
            return
        with full(self._disk):
            await asyncio.sleep(seconds)

    def _lock(self, over: threading.Event) -> None:
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            over.wait(60)
            connection.execute("ROLLBACK")
        finally:
            connection.close()

    def end(self) -> None:
        if self._is_mounted:
            unmount(self._disk)


SHARED: Final = {"redis": Redis, "postgres": Postgres}
"""The stores of several replicas."""


class Fleet:
    """All processes of a campaign."""

    def __init__(self, folder: Path, store: "Redis | Postgres | File", replicas: int) -> None:
        self.folder = folder
        self.store = store
        key = mint_key()
        self.replicas = [Replica(n, folder, store.url, key) for n in range(replicas)]

    async def start(self) -> None:
        await asyncio.gather(*(replica.revive() for replica in self.replicas))

    def end(self) -> None:
        for replica in self.replicas:
            replica.kill()
        self.store.end()

    def records(self) -> Generator[str]:
        """What the servers wrote, in no order."""
        for path in sorted(self.folder.glob("*.jsonl")):
            yield from path.read_text().splitlines()


@asynccontextmanager
async def fleet(kind: str) -> AsyncGenerator[Fleet]:
    """Three replicas on Redis or Postgres; or one on a file, ``normal`` or ``full``."""
    async with AsyncExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="mcp-sessions-campaign-"))
        folder = Path(name)
        if kind in SHARED:
            address = await stack.enter_async_context(TcpProxy("127.0.0.1", 0))
            made = Fleet(folder, SHARED[kind](folder, address), 3)
        else:
            made = Fleet(folder, File(folder, kind), 1)
        try:
            yield made
        finally:
            made.end()
