"""A Redis with a replica and Sentinels of the tests' own: who is the primary may change."""

import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.redis_server import RedisServer, binary

SERVICE = "sessions"

FAILOVER = 120.0
"""Seconds for a failover. A Sentinel whose process waited for 2 s does nothing for 30 s."""


class SentinelServer(RedisServer):
    """A Sentinel that watches one primary."""

    def __init__(
        self, directory: Path, primary: RedisServer, quorum: int, down_after: int, *lines: str
    ) -> None:
        super().__init__(directory)
        watches = [
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} {quorum}",
            f"sentinel down-after-milliseconds {SERVICE} {down_after}",
            f"sentinel failover-timeout {SERVICE} 5000",
        ]
        own = [f"port {self.port}", "bind 127.0.0.1", f"dir {directory}", "logfile redis.log"]
        self._file = directory / "sentinel.conf"
        self._file.write_text("\n".join([*own, *watches, *lines]) + "\n")

    def start(self) -> None:
        self._process = subprocess.Popen(
            [binary(), str(self._file), "--sentinel"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.wait_for("PING", "PONG")


class Sentinels:
    """One primary, its replicas, and Sentinels.

    Args:
        sentinels: More than half of them decide.
        replicas: Servers that may take over.
        lines: More lines for each Sentinel's configuration.
    """

    def __init__(
        self, directory: Path, sentinels: int = 1, replicas: int = 1, lines: Sequence[str] = ()
    ) -> None:
        def folder(name: str) -> Path:
            own = directory / name
            own.mkdir()
            return own

        first = RedisServer(folder("server-0"), "--repl-diskless-sync-delay", "0")
        self.servers = [first]
        for number in range(1, replicas + 1):
            follows = ("--replicaof", "127.0.0.1", str(first.port))
            own = (*follows, "--repl-diskless-sync-delay", "0")
            self.servers.append(RedisServer(folder(f"server-{number}"), *own))
        quorum = sentinels // 2 + 1
        # Where nobody can take over, a primary that is busy is not down.
        down_after = 1_000 if replicas else 60_000
        self.sentinels = [
            SentinelServer(folder(f"sentinel-{number}"), first, quorum, down_after, *lines)
            for number in range(sentinels)
        ]

    @property
    def url(self) -> str:
        """For ``--store``."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    def start(self) -> None:
        """Start all, and wait until the Sentinels may replace the primary."""
        for server in self.servers:
            server.start()
        for server in self.servers[1:]:
            server.wait_for("INFO replication", "master_link_status:up")
        for sentinel in self.sentinels:
            sentinel.start()
        others = len(self.sentinels) - 1, len(self.servers) - 1
        for sentinel in self.sentinels:
            until = time.monotonic() + FAILOVER
            while self._known_to(sentinel) != others:
                assert time.monotonic() < until, "the Sentinels do not find each other"
                # Nothing says when they do; this is a bounded wait on the condition above.
                time.sleep(0.05)

    def _known_to(self, sentinel: SentinelServer) -> tuple[int, int]:
        """The number of other Sentinels, and of replicas."""
        answer = sentinel.ask(f"SENTINEL MASTER {SERVICE}").split("\r\n")
        told = {name: int(answer[at + 2]) for at, name in enumerate(answer) if name[:4] == "num-"}
        return told["num-other-sentinels"], told["num-slaves"]

    @property
    def primary(self) -> RedisServer:
        """The server that the Sentinels name."""
        answer = self.sentinels[-1].ask(f"SENTINEL get-master-addr-by-name {SERVICE}")
        port = int(answer.split("\r\n")[4])
        return next(each for each in self.servers if each.port == port)

    def until_primary_is_not(self, before: RedisServer) -> None:
        """Wait until another server has taken over."""
        until = time.monotonic() + FAILOVER
        while self.primary is before:
            assert time.monotonic() < until, "no other server takes over"
            time.sleep(0.05)
        self.primary.wait_for("INFO replication", "role:master")

    def kill(self) -> None:
        """End all."""
        for each in (*self.sentinels, *self.servers):
            each.kill()


@contextmanager
def behind_sentinels(
    sentinels: int = 1, replicas: int = 1, lines: Sequence[str] = ()
) -> Generator[Sentinels]:
    with ExitStack() as stack:
        yield _started(stack, sentinels, replicas, lines)


def _started(stack: ExitStack, sentinels: int, replicas: int, lines: Sequence[str]) -> Sentinels:
    """A port may be somebody else's by the time that a server wants it: then again, with others."""
    for left in (2, 1, 0):
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="mcp-sessions-sentinel-")
        )
        servers = Sentinels(Path(directory), sentinels, replicas, lines)
        stack.callback(servers.kill)
        try:
            servers.start()
        except AssertionError:
            servers.kill()
            if not left:
                raise
        else:
            return servers
    raise AssertionError("the last time raises")
