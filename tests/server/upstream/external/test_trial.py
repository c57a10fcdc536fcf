"""One start of a server before a client needs it: what fails is said, and no client notices it."""

import asyncio
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from mcp_sessions import HTTPServer, StdioServer
from mcp_sessions.server.reporting.reached_limits import ReachedLimits
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.command import StdioWire
from mcp_sessions.server.upstream.port import UpstreamError
from tests.server.upstream.external.test_children import starts
from tests.support.children import CHILD, child, child_world, children_of, is_alive, until
from tests.support.puppets import Puppet
from tests.support.world import World, world


def children(w: World) -> Children:
    upstream: Any = w.inside.upstream
    return upstream.children


def scripted(first: str, marker: Path, **options: Any) -> StdioServer:
    """The child server, if a line of shell, whose first argument is the marker, lets it start."""
    script = f'{first}; exec "$@"'
    command = ("-c", script, str(marker), sys.executable, "-S", CHILD)
    return StdioServer("sh", *command, try_at_start=True, **options)


def warnings_of_servers(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Not those about the store, which are others on each store."""
    about = "mcp_sessions.server.upstream"
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    return [each for each in warned if each.name.startswith(about)]


@pytest.mark.parametrize("per", ["session", "shared"])
async def test_a_first_start_that_fails_is_said_and_refuses_no_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, per: str
) -> None:
    """A client that comes at once is served, if the cause is gone."""
    marker = tmp_path / "key"
    fails = 'test -e "$0" || { echo "the key is missing" >&2; exit 3; }'
    server = scripted(fails, marker, per=per, title="the server files")
    async with world(server=server) as w:
        await until(lambda: "failed its first start" in caplog.text, "the warning")
        (said,) = warnings_of_servers(caplog)
        assert said.getMessage() == (
            "the server files failed its first start: it ended with status 3: the key is missing. "
            "Its clients get this error until a start succeeds."
        )
        marker.touch()
        assert await (await w.connected()).text("count") == "1"


class Closed(Puppet):
    """A process that takes no input any more."""

    def __init__(self, *, exits: bool) -> None:
        super().__init__(cast(Any, None))
        self.is_full = True
        self._exits = exits

    async def room(self) -> None:
        raise BrokenPipeError

    async def exits(self) -> bool:
        if self._exits:
            self.kill()
        return self._exits


@pytest.mark.parametrize(("exits", "failure"), [(True, ""), (False, "it closed its input")])
async def test_what_ends_is_not_blamed_for_its_closed_input(exits: bool, failure: str) -> None:
    """If its input closed first, a client and the log read that, and not how the process ended."""
    process = Closed(exits=exits)
    wire = StdioWire(cast(Any, process), 1_000, ReachedLimits(time.monotonic))
    child = Child(wire, cast(Any, None))
    with pytest.raises(UpstreamError):
        await child.request(None, "initialize", {})
    assert (child.has_ended, child.failure) == (True, failure)
    await child.stop()


async def test_a_first_start_that_hangs_takes_no_room_and_ends_with_the_layer(
    tmp_path: Path,
) -> None:
    others, marker = set(children_of(os.getpid())), tmp_path / "began"
    hangs = 'if mkdir "$0" 2>/dev/null; then exec sleep 600; fi'
    server = scripted(hangs, marker, max_children=1, per="shared")
    async with world(server=server) as w:
        await until(marker.exists, "the first start began")
        assert await (await w.connected()).text("count") == "1"
        during = set(children_of(os.getpid())) - others
        assert len(during) == 3, "the guard, the one that is tried, and the client's"
    await until(lambda: not any(is_alive(pid) for pid in during), "all of them ended")


@pytest.mark.parametrize("per", ["session", "principal", "shared"])
async def test_the_first_start_is_kept_and_the_first_client_starts_no_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, per: str
) -> None:
    noted, others = tmp_path / "calls", set(children_of(os.getpid()))
    options = {"env": {"CALLS": str(noted)}, "per": per, "try_at_start": True}
    async with child_world(options=options) as w:

        def living() -> set[int]:
            return {pid for pid in set(children_of(os.getpid())) - others if is_alive(pid)}

        await until(lambda: len(living()) == 2, "the guard, and the process")
        await until(lambda: per != "shared" or _has_child(w), "the slot of all has that child")
        first = living()
        assert await (await w.connected()).text("count") == "1"
        assert starts(noted) == 1 and living() == first
        if per == "session":
            assert await (await w.connected()).text("count") == "1"
            assert starts(noted) == 2, "nobody else gets a process that was used"
    assert not warnings_of_servers(caplog)


async def test_a_process_that_names_its_session_is_tried_and_stopped(tmp_path: Path) -> None:
    noted, others = tmp_path / "calls", set(children_of(os.getpid()))
    env = {"CALLS": str(noted), "OWN": "{session}"}
    async with child_world(options={"env": env, "try_at_start": True}):
        await until(lambda: starts(noted) == 1, "the first start")

        def is_stopped() -> bool:
            return sum(map(is_alive, set(children_of(os.getpid())) - others)) == 1

        await until(is_stopped, "only the guard is left")
        assert starts(noted) == 1


def _has_child(w: World) -> bool:
    slot = children(w).known(None)
    return slot is not None and slot.living is not None


async def test_a_shared_process_that_a_client_started_meanwhile_is_the_only_one(
    tmp_path: Path,
) -> None:
    slow, noted, others = tmp_path / "slow", tmp_path / "calls", set(children_of(os.getpid()))
    options = {"env": {"CALLS": str(noted)}, "per": "shared", "try_at_start": True}
    async with child_world("slow", str(slow), options=options) as w:
        await until(lambda: starts(noted) == 1, "the first start")
        connecting = asyncio.create_task(w.connected())
        await until(lambda: starts(noted) == 2, "the client's")
        slow.touch()
        client = await connecting
        await until(
            lambda: len({p for p in children_of(os.getpid()) if is_alive(p)} - others) == 2,
            "the guard, and one process",
        )
        assert await client.text("count") == "1"
        assert children(w).room.count == 1


async def test_a_url_is_tried_too_and_named_without_its_query(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = HTTPServer(f"http://127.0.0.1:{port}/mcp?key=secret", try_at_start=True)
    async with world(server=server):
        await until(lambda: "failed its first start" in caplog.text, "the warning")
    assert f"the server at http://127.0.0.1:{port}/mcp failed its first start: " in caplog.text
    assert "connection refused" in caplog.text and "secret" not in caplog.text


async def test_nothing_is_started_before_it_is_needed_unless_that_is_wanted(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    async with world(server=child(env={"CALLS": str(noted)})) as w:
        assert await (await w.connected()).text("count") == "1"
    assert starts(noted) == 1
