"""Redis servers of the tests' own: private processes on free ports, gone with the run.

``shared_redis()`` is one for all tests that need a Redis that works; each uses a namespace of its
own. It runs as a cluster of one node, so that a script that touches keys of two slots fails
here and not at the first user who has a cluster. What stops, kills or restarts its Redis
starts a ``RedisServer`` of its own.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.stores.redis.commands import SCRIPTS
from mcp_sessions.stores.redis.redis_connection import RedisLink, Value
from mcp_sessions.stores.redis.redis_store import RedisStore

MISSING = (
    "these tests need a Redis 7 or later, or a Valkey: sudo apt install redis-server, or brew "
    "install redis; or leave them out: pytest -m 'not redis and not full'"
)
WITHIN = 30.0
"""Seconds for a server to start, or to stop."""


class RedisServer:
    """A server process that keeps its port and its directory over restarts."""

    def __init__(self, directory: Path, *options: str, port: int = 0) -> None:
        self.directory = directory
        self.port = port or _port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For ``--store``."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it answers.

        Raises:
            AssertionError: It does not, within ``WITHIN`` seconds.
        """
        command = [
            binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--dir", str(self.directory), "--logfile", "redis.log", *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.wait_for("PING", "+PONG")

    def stop(self) -> None:
        """SIGTERM: it saves what it is asked to save."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def suspend(self) -> None:
        """SIGSTOP: its port takes connections, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, command: str) -> str:
        """Send one inline command; what comes back within a moment, undecoded.

        Raises:
            OSError: It does not answer.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(command.encode() + b"\r\n")
            answer = connection.recv(65_536)
            if answer.startswith(b"$") and not answer.startswith(b"$-1"):
                size = int(answer[1 : answer.index(b"\r\n")])
                while len(answer) < size:
                    more = connection.recv(65_536)
                    if not more:
                        raise ConnectionError("it closed within an answer")
                    answer += more
            return answer.decode()

    def executed(self, command: str) -> int:
        """How often a command was executed, of any client."""
        for line in self.ask("INFO commandstats").splitlines():
            name, _, values = line.partition(":calls=")
            if name == f"cmdstat_{command.lower()}":
                return int(values.partition(",")[0])
        return 0

    def wait_for(self, command: str, answer: str) -> None:
        """Ask until it answers that, or fail after ``WITHIN`` seconds."""
        assert self._process is not None
        until = time.monotonic() + WITHIN
        while time.monotonic() < until and self._process.poll() is None:
            try:
                if answer in self.ask(command):
                    return
            except OSError:
                pass  # not listening yet
            # Nothing says when it listens; this is a bounded wait on the condition above.
            time.sleep(0.02)
        log = self.directory / "redis.log"
        tail = log.read_text()[-2000:] if log.exists() else ""
        raise AssertionError(f"redis did not start within {WITHIN:g} s: {tail}")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(number)
            # Who is stopped takes no other signal.
            process.send_signal(signal.SIGCONT)
            process.wait(WITHIN)


def binary() -> str:
    """The server's program; the test that asked for it fails if there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.fail(MISSING, pytrace=False)
    return found


def _port() -> int:
    """A port that was free a moment ago, and so was that of a cluster's bus, 10000 above."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        port = port if port <= 55_535 else port - 20_000
        try:
            for each in (port, port + 10_000):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no two ports of this machine are free")


@contextmanager
def redis_server(*options: str) -> Generator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-redis-") as directory:
        server = RedisServer(Path(directory), *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


class _Shared:
    """The server of this run, started when the first test wants it."""

    server: RedisServer | None = None
    directory: tempfile.TemporaryDirectory[str] | None = None
    numbers = count(1)


def shared_redis() -> RedisServer:
    """The server that all tests of this run share; never stop it, never flush it."""
    if _Shared.server is None:
        _Shared.directory = tempfile.TemporaryDirectory(prefix="mcp-sessions-redis-")
        own = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
        server = RedisServer(Path(_Shared.directory.name), *own)
        server.start()
        _Shared.server = server
        assert "OK" in server.ask("CLUSTER ADDSLOTSRANGE 0 16383")
        server.wait_for("CLUSTER INFO", "cluster_state:ok")
    return _Shared.server


def stop_shared_redis() -> None:
    """At the end of the run."""
    if _Shared.server is not None:
        _Shared.server.kill()
        _Shared.server = None
    if _Shared.directory is not None:
        _Shared.directory.cleanup()
        _Shared.directory = None


def namespace() -> str:
    """One that no other test of this run has."""
    return f"test-{next(_Shared.numbers)}"


def redis_store(*, own: str | None = None) -> RedisStore:
    """A store on the shared server, not open yet; empty, or with another's namespace."""
    return RedisStore(shared_redis().url, namespace=own or namespace())


def two_redis_stores() -> tuple[RedisStore, RedisStore]:
    """Two on the shared server that share everything."""
    own = namespace()
    url = shared_redis().url
    return RedisStore(url, namespace=own), RedisStore(url, namespace=own)


def link_of(store: RedisStore) -> RedisLink:
    """The store's connection to a server that is no cluster."""
    link = store._link  # pyright: ignore[reportPrivateUsage]
    assert isinstance(link, RedisLink)
    return link


async def asked(store: RedisStore, *command: Value) -> Any:
    """What the store's server answers to a command."""
    return await store._command(*command)  # pyright: ignore[reportPrivateUsage]


async def keys_of(store: RedisStore) -> list[str]:
    own: str = store._namespace  # pyright: ignore[reportPrivateUsage]
    return [key.decode() for key in await asked(store, "KEYS", "*") if own in key.decode()]


def dies_after(store: RedisStore, commands: int) -> Callable[[], bool]:
    """From now on the store's process sends that many commands more, and then no other.

    Returns:
        Tells whether it wanted to send another one.
    """
    link = store._link  # pyright: ignore[reportPrivateUsage]
    call, left, refused = link.call, count(commands, -1), list[Value]()

    async def dying(*command: Value) -> Any:
        if command[0] != "TIME" and next(left) <= 0:
            refused.append(command[0])
            raise StoreUnavailable("this process is dead")
        return await call(*command)

    link.call = dying
    return lambda: bool(refused)


_NAMES = {each.sha: each.name for each in SCRIPTS.values()}


def name_of(command: Sequence[Value]) -> str:
    return _NAMES.get(str(command[-1 if len(command) == 1 else 1]), str(command[0]))


def sent_by(store: RedisStore) -> list[str]:
    """The commands that the store's process sends from now on: of a script its name, else the
    command's; but for its looks at the server's clock, which it takes every few seconds.
    """
    link = store._link  # pyright: ignore[reportPrivateUsage]
    call, names = link.call, list[str]()

    async def noting(*command: Value) -> Any:
        if command[0] != "TIME":
            names.append(name_of(command))
        return await call(*command)

    link.call = noting
    return names


def answers_of(store: RedisStore) -> list[object]:
    """What the server answers to the store's process from now on, but what time it is."""
    link = store._link  # pyright: ignore[reportPrivateUsage]
    call, answers = link.call, list[object]()

    async def noting(*command: Value) -> Any:
        answer = await call(*command)
        if command[0] != "TIME":
            answers.append(answer)
        return answer

    link.call = noting
    return answers
