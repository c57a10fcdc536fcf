"""The lock that says which process serves from a file."""

import contextlib
import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcp_sessions.stores.sqlite.file_lock import FileLock, Locked


def test_of_two_event_loops_that_ask_at_once_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's lock does not keep out its own process."""
    both_ask = threading.Barrier(2)
    lockf = fcntl.lockf
    locks = [FileLock(tmp_path / "lock") for _ in range(2)]

    def ask(file: int, how: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_ask.wait(0.5)
        lockf(file, how)

    def take(lock: FileLock) -> bool:
        try:
            lock.acquire()
        except Locked:
            return False
        return True

    monkeypatch.setattr(fcntl, "lockf", ask)
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(take, locks)) == [False, True]
    for lock in locks:
        lock.release()
