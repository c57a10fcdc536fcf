from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.rows import Row
from tests.support.redis_server import RedisServer, redis_server

STORES = "memory,sqlite,redis"


@dataclass(frozen=True)
class Stores:
    names: list[str]
    """In the order in which they were asked for, without what is absent."""

    absent: list[str]
    _directory: Path
    _redis: RedisServer | None

    def url(self, store: str, name: str) -> str:
        """A URL that was not used so far: ``name`` is new to this run."""
        if store == "redis":
            assert self._redis is not None
            return f"{self._redis.url}?namespace={name}"
        return "memory://" if store == "memory" else f"sqlite:///{self._directory}/{name}.db"

    def cpu(self, store: str) -> float:
        """Seconds of CPU of the store's own process; 0 if it has none."""
        return cpu_of(self._redis.pid) if store == "redis" and self._redis is not None else 0.0

    def executed(self, command: str) -> int:
        return self._redis.executed(command) if self._redis is not None else 0

    def missing(self, name: str = "") -> Iterator[Row]:
        for store in self.absent:
            yield Row(
                name=f"{store}{name and f', {name}'}", absent="no redis-server, no valkey-server"
            )


def is_there(store: str) -> bool:
    return store != "redis" or any(map(shutil.which, ("redis-server", "valkey-server")))


@contextmanager
def stores(wanted: str = STORES) -> Generator[Stores]:
    """The wanted stores for one run: a directory, and a Redis of its own without persistence."""
    names = wanted.split(",")
    absent = [name for name in names if not is_there(name)]
    present = [name for name in names if name not in absent]
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-bench-") as directory:
        if "redis" in present:
            with redis_server() as redis:
                yield Stores(present, absent, Path(directory), redis)
        else:
            yield Stores(present, absent, Path(directory), None)


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process used so far, all its threads, to the nanosecond.

    ``/proc`` counts in hundredths of a second: an echo takes less than that in 100 calls.
    """
    # clock_getcpuclockid(3), which Python has for threads only.
    return time.clock_gettime((~pid << 3) | 2)
