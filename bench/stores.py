from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.rows import Row
from tests.support.postgres_server import PostgresServer, has_postgres, postgres_server
from tests.support.redis_server import RedisServer, redis_server

STORES = "memory,sqlite,redis"
WITH_POSTGRES = f"{STORES},postgres"


@dataclass(frozen=True)
class Stores:
    names: list[str]
    """In the order in which they were asked for, without what is absent."""

    absent: list[str]
    _directory: Path
    _redis: RedisServer | None
    _postgres: PostgresServer | None

    def url(self, store: str, name: str) -> str:
        """A URL that was not used so far: ``name`` is new to this run."""
        if store == "redis":
            assert self._redis is not None
            return f"{self._redis.url}?namespace={name}"
        if store == "postgres":
            assert self._postgres is not None
            return f"{self._postgres.url}?schema={name.replace(' ', '_')}"
        return "memory://" if store == "memory" else f"sqlite:///{self._directory}/{name}.db"

    def cpu(self, store: str) -> float:
        """Seconds of CPU of the store's own process; 0 if it has none."""
        return cpu_of(self._redis.pid) if store == "redis" and self._redis is not None else 0.0

    def executed(self, command: str) -> int:
        return self._redis.executed(command) if self._redis is not None else 0

    def missing(self, name: str = "") -> Iterator[Row]:
        for store in self.absent:
            yield Row(name=f"{store}{name and f', {name}'}", absent=f"no server of {store}")


def is_there(store: str) -> bool:
    if store == "postgres":
        return has_postgres()
    return store != "redis" or any(map(shutil.which, ("redis-server", "valkey-server")))


@contextmanager
def stores(wanted: str = STORES) -> Generator[Stores]:
    """The wanted stores for one run: a directory, a Redis of its own without persistence, and a
    Postgres of its own that does not wait for its disk.
    """
    names = wanted.split(",")
    absent = [name for name in names if not is_there(name)]
    present = [name for name in names if name not in absent]
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-bench-") as directory:
        with ExitStack() as stack:
            redis = postgres = None
            if "redis" in present:
                redis = stack.enter_context(redis_server())
            if "postgres" in present:
                postgres = stack.enter_context(postgres_server("-c", "synchronous_commit=off"))
            yield Stores(present, absent, Path(directory), redis, postgres)


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process used so far, all its threads, to the nanosecond.

    ``/proc`` counts in hundredths of a second: an echo takes less than that in 100 calls.
    """
    # clock_getcpuclockid(3), which Python has for threads only.
    return time.clock_gettime((~pid << 3) | 2)
