"""Reading files again: when it is asked for, and when one has changed."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from mcp_sessions.background import stopped
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.serve.reloading import Reloading, handle_early
from mcp_sessions.serve.systemd import READY, VARIABLE

WITHIN = 20


class Reloads:
    """Counts reloads, each of which can be held up."""

    def __init__(self) -> None:
        self.begun = 0
        self.continues = asyncio.Event()
        self.continues.set()
        self.seen = asyncio.Condition()
        self.fails: ConfigurationError | None = None

    async def __call__(self) -> str:
        async with self.seen:
            self.begun += 1
            self.seen.notify_all()
        await self.continues.wait()
        if self.fails is not None:
            raise self.fails
        return "all"

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WITHIN), self.seen:
            await self.seen.wait_for(lambda: self.begun >= count)


@asynccontextmanager
async def running(reloading: Reloading) -> AsyncGenerator[Reloading]:
    """It runs until the block ends."""
    task = asyncio.create_task(reloading.run())
    try:
        yield reloading
    finally:
        await stopped(task)


@contextmanager
def early() -> Generator[None]:
    """The signal is handled as before a server is ready."""
    before = signal.getsignal(signal.SIGHUP)
    handle_early()
    try:
        yield
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


async def test_asked_a_hundred_times_while_one_runs_one_more_follows() -> None:
    reloads = Reloads()
    reloads.continues.clear()
    async with running(Reloading(reloads)) as reloading:
        reloading.ask()
        await reloads.until(1)
        for _ in range(100):
            reloading.ask()
        reloads.continues.set()
        await reloads.until(2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert reloads.begun == 2


async def test_a_reload_that_fails_is_a_line_in_the_log_and_the_next_one_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mcp_sessions.serve.reloading")
    reloads = Reloads()
    reloads.fails = ConfigurationError("servers.json, line 3, column 4: Expecting value")
    async with running(Reloading(reloads)) as reloading:
        reloading.ask()
        await reloads.until(1)
        await asyncio.sleep(0)
        reloads.fails = None
        reloading.ask()
        await reloads.until(2)
        await asyncio.sleep(0)
    assert [each.getMessage() for each in caplog.records] == [
        "not reloaded, everything is served as before: servers.json, line 3, column 4: "
        "Expecting value",
        "reloaded: all",
    ]


@pytest.mark.parametrize("how", ["written", "replaced", "removed"])
async def test_a_file_that_changed_is_read_again(tmp_path: Path, how: str) -> None:
    file = tmp_path / "servers.json"
    file.write_text("{}")
    reloads = Reloads()
    async with running(Reloading(reloads, [str(file)], every=0.01)):
        if how == "written":
            file.write_text("{ }")
        elif how == "replaced":
            # As editors and Kubernetes do; the time and the size may be equal.
            (tmp_path / "new").write_text("[]")
            os.utime(tmp_path / "new", ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
            (tmp_path / "new").rename(file)
        else:
            file.unlink()
        await reloads.until(1)
        assert reloads.begun == 1


async def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_text("{}")
    reloads = Reloads()
    async with running(Reloading(reloads, [str(file)], every=0.001)) as reloading:
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert reloads.begun == 0
        reloading.ask()
        await reloads.until(1)


async def test_a_signal_before_the_server_is_ready_ends_nothing_and_is_not_lost() -> None:
    reloads = Reloads()
    with early():
        os.kill(os.getpid(), signal.SIGHUP)
        reloading = Reloading(reloads)
        reloading.ask_at_signal()
        async with running(reloading):
            await reloads.until(1)
            os.kill(os.getpid(), signal.SIGHUP)
            await reloads.until(2)
            assert reloads.begun == 2


async def test_without_a_signal_nothing_is_read_again_at_the_start() -> None:
    reloads = Reloads()
    with early():
        reloading = Reloading(reloads)
        reloading.ask_at_signal()
        async with running(reloading):
            for _ in range(20):
                await asyncio.sleep(0)
            assert reloads.begun == 0


async def test_systemd_learns_of_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(str(tmp_path / "notify"))
        reader.settimeout(WITHIN)
        monkeypatch.setenv(VARIABLE, str(tmp_path / "notify"))
        reloads = Reloads()
        async with running(Reloading(reloads)) as reloading:
            reloading.ask()
            await reloads.until(1)
            await asyncio.sleep(0)
        assert reader.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert reader.recv(100) == READY.encode()
