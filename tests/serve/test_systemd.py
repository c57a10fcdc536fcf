"""What systemd learns of a server: sd_notify(3)."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_sessions.serve.systemd import READY, STOPPING, VARIABLE, notify, reloading
from tests.support.redis_server import namespace, shared_redis
from tests.support.serving import serving

APP = 'from mcp.server import MCPServer\nmcp = MCPServer("notes")\n'


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(str(tmp_path / "notify"))
        reader.settimeout(40)
        monkeypatch.setenv(VARIABLE, str(tmp_path / "notify"))
        yield reader


@pytest.mark.parametrize(
    "shared", [False, pytest.param(True, marks=pytest.mark.redis)], ids=["alone", "workers"]
)
def test_a_start_is_done_when_connections_are_taken(
    received: socket.socket, tmp_path: Path, shared: bool
) -> None:
    """Of several processes the one that systemd started says so, and no other one."""
    (tmp_path / "app.py").write_text(APP)
    workers = ["--workers", "2", "--drain-delay", "0", "--store"]
    more = [*workers, f"{shared_redis().url}?namespace={namespace()}"] if shared else []
    with serving(tmp_path, "app.py", *more) as process:
        assert received.recv(100) == READY.encode()
        process.send_signal(signal.SIGTERM)
        assert received.recv(100) == STOPPING.encode()
        assert process.wait(timeout=40) == 0
        received.setblocking(False)
        with pytest.raises(BlockingIOError):
            received.recv(100)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such addresses, and systemd")
def test_an_abstract_address_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(f"\0mcp-sessions-{os.getpid()}")
        reader.settimeout(10)
        monkeypatch.setenv(VARIABLE, f"@mcp-sessions-{os.getpid()}")
        notify(reloading())
        state, clock = reader.recv(100).decode().splitlines()
    assert state == "RELOADING=1" and int(clock.removeprefix("MONOTONIC_USEC=")) > 0


def test_a_systemd_that_does_not_listen_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    notify(READY)
    [record] = caplog.records
    assert record.getMessage().startswith("systemd was not notified of READY=1: ")
    monkeypatch.delenv(VARIABLE)
    notify(READY)
    assert len(caplog.records) == 1
