"""Postgres servers of the tests' own: private processes on free ports, gone with the run.

``shared_postgres()`` is one for all tests that need a Postgres that works; each uses a schema of
its own. What stops, kills or restarts its Postgres starts a ``PostgresServer`` of its own.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.stores.postgres import PostgresStore

MISSING = (
    "these tests need a Postgres 14 or later: sudo apt install postgresql, or brew install "
    "postgresql; or leave them out: pytest -m 'not postgres and not full'"
)
WITHIN = 30.0
"""Seconds for a server to start, or to stop."""


def has_postgres() -> bool:
    return _folder() is not None


def _programs() -> Path:
    """The folder of the server's programs; the test that asked for it fails if there is none."""
    folder = _folder()
    if folder is None:
        pytest.fail(MISSING, pytrace=False)
    return folder


def _folder() -> Path | None:
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found is not None else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


class PostgresServer:
    """A server process that keeps its port and its directory over restarts.

    A Postgres refuses to run as root. Then it runs as the user ``postgres``.
    """

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._data = directory / "data"
        self._options = options
        self._programs = _programs()
        self._user: Sequence[int] | None = None
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            self._user = (user.pw_uid, user.pw_gid)
            directory.chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For ``--store``."""
        return f"postgresql://sessions@127.0.0.1:{self.port}/postgres"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it answers.

        Raises:
            AssertionError: It does not, within ``WITHIN`` seconds.
        """
        if not self._data.exists():
            self._begin_empty()
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        options += ["-c", "fsync=off", "-c", "max_connections=200", "-c", "shared_buffers=32MB"]
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        with (self.directory / "postgres.log").open("ab") as log:
            process = subprocess.Popen[bytes](
                [*command, *options, *self._options],
                cwd=self._data,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                **self._as_user(),
            )
        self._process = process
        until = time.monotonic() + WITHIN
        while time.monotonic() < until and process.poll() is None:
            # The last line of this file says whether it takes connections.
            state = self._data / "postmaster.pid"
            if state.exists() and state.read_text().rstrip().endswith(("ready", "standby")):
                return
            # Nothing says when it listens; this is a bounded wait on the condition above.
            time.sleep(0.02)
        tail = (self.directory / "postgres.log").read_text()[-2000:]
        raise AssertionError(f"postgres did not start within {WITHIN:g} s: {tail}")

    def _begin_empty(self) -> None:
        """Copy the data of a server without any. They are made once in a process: that takes ten
        times as long. Short pieces of its log: fifteen more megabytes would be copied.
        """
        if _Empty.server is None:
            _Empty.directory = tempfile.TemporaryDirectory(prefix="mcp-sessions-postgres-")
            server = PostgresServer(Path(_Empty.directory.name))
            server._own(server._data)
            who = ("-U", "sessions", "-A", "trust")
            server._run("initdb", "-D", str(server._data), *who, "-N", "--wal-segsize=1")
            _Empty.server = server
        subprocess.run(["cp", "-Rp", str(_Empty.server._data), str(self._data)], check=True)

    def follow(self, primary: "PostgresServer") -> None:
        """Become a standby of that one, with its data of now, and start."""
        shutil.rmtree(self._data, ignore_errors=True)
        self._own(self._data)
        self._run(
            "pg_basebackup", "-D", str(self._data), "-d", primary.url, "-R", "-c", "fast", "-N"
        )  # fmt: skip
        self.start()

    def wait_until_followed(self) -> None:
        """A standby has all that this one wrote."""
        behind = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()"
        until = time.monotonic() + WITHIN
        while self.ask(behind) == "0":
            assert time.monotonic() < until, "no standby follows"
            time.sleep(0.05)

    def promote(self) -> None:
        """A standby takes the place of its primary."""
        assert self.ask("SELECT pg_promote()") == "t"

    def ask(self, sql: str) -> str:
        """What ``psql`` prints.

        Raises:
            OSError: The server answers with an error, or not at all.
        """
        done = subprocess.run(
            [str(self._programs / "psql"), "-X", "-q", "-t", "-A", "-d", self.url, "-c", sql],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN, check=False,
        )  # fmt: skip
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    def _own(self, folder: Path) -> None:
        """Make a folder for the server alone."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if self._user is not None:
            os.chown(folder, *self._user)

    def stop(self) -> None:
        """SIGINT: it ends all connections, and saves."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL of the server and of what serves its connections."""
        self._signal(signal.SIGKILL)
        self._end(signal.SIGKILL)
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def suspend(self) -> None:
        """SIGSTOP: its port takes connections, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, then to what serves its connections."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [process.pid, *map(int, listed)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _as_user(self) -> dict[str, Any]:
        own: dict[str, Any] = {"start_new_session": True}
        if self._user is not None:
            own |= {"user": self._user[0], "group": self._user[1], "extra_groups": []}
        return own

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self._data,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN * 2,
            check=False,
            **self._as_user(),
        )
        assert done.returncode == 0, done.stderr

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(number)
            process.wait(WITHIN)


@contextmanager
def postgres_server(*options: str) -> Generator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-postgres-") as directory:
        server = PostgresServer(Path(directory), *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


class _Empty:
    """What a new server has, made when the first one starts."""

    server: PostgresServer | None = None
    directory: tempfile.TemporaryDirectory[str] | None = None


class _Shared:
    """The server of this run, started when the first test wants it."""

    server: PostgresServer | None = None
    directory: tempfile.TemporaryDirectory[str] | None = None
    numbers = count(1)


def shared_postgres() -> PostgresServer:
    """The server that all tests of this run share; never stop it."""
    if _Shared.server is None:
        _Shared.directory = tempfile.TemporaryDirectory(prefix="mcp-sessions-postgres-")
        server = PostgresServer(Path(_Shared.directory.name), "-c", "synchronous_commit=off")
        server.start()
        _Shared.server = server
    return _Shared.server


def stop_shared_postgres() -> None:
    """At the end of the run."""
    if _Shared.server is not None:
        _Shared.server.kill()
        _Shared.server = None
    if _Shared.directory is not None:
        _Shared.directory.cleanup()
        _Shared.directory = None
    if _Empty.directory is not None:
        _Empty.directory.cleanup()
        _Empty.directory = _Empty.server = None


def schema() -> str:
    """One that no other test of this run has."""
    return f"test_{next(_Shared.numbers)}"


def postgres_store(*, own: str | None = None) -> PostgresStore:
    """A store on the shared server, not open yet; empty, or with another's schema."""
    name = own.replace("-", "_") if own is not None else schema()
    return PostgresStore(shared_postgres().url, schema=name)


def two_postgres_stores() -> tuple[PostgresStore, PostgresStore]:
    """Two on the shared server that share everything."""
    own = schema()
    url = shared_postgres().url
    return PostgresStore(url, schema=own), PostgresStore(url, schema=own)
