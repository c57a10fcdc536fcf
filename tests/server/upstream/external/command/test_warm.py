"""Processes that wait for somebody who needs one: `warm.py`."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from mcp_sessions import ConfigurationError, StdioServer
from mcp_sessions.server.upstream.external import warm
from mcp_sessions.server.upstream.external.process import ChildProcess
from tests.support.children import CHILD, child, child_world, children_of, is_alive, until
from tests.support.raw import in_session, initialize_params
from tests.support.world import world


def servers() -> set[int]:
    return {pid for pid in children_of(os.getpid()) if CHILD in _command(pid) and is_alive(pid)}


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if "trampoline" in words else words


async def test_who_comes_has_one_that_waited_and_the_next_one_waits(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with child_world(options={"warm": 2, "env": {"CALLS": str(notes)}}) as w:
        await until(lambda: len(servers()) == 2, "two wait")
        waiting = servers()
        assert not notes.exists(), "they were told nothing"
        client = await w.connected()
        assert int(await client.text("pid")) in waiting
        await until(lambda: len(servers()) == 3, "another waits")
        meta = in_session((await client.start())["sessionId"])
        assert int(await client.text("pid", meta=meta)) in waiting


async def test_one_that_dies_while_it_waits_is_replaced_and_nobody_is_given_it() -> None:
    async with child_world(options={"warm": 1}) as w:
        await until(lambda: len(servers()) == 1, "one waits")
        (first,) = servers()
        os.kill(first, signal.SIGKILL)
        await until(lambda: servers() - {first}, "another waits")
        (second,) = servers()
        assert int(await (await w.connected()).text("pid")) == second


async def test_they_count_and_never_take_the_room_of_a_session() -> None:
    async with child_world(options={"warm": 2, "max_children": 2}) as w:
        await until(lambda: len(servers()) == 2, "two wait")
        first, second = await w.connected(), await w.connected()
        assert len({await each.text("pid") for each in (first, second)}) == 2
        params = initialize_params("another")
        assert (await w.client().error("initialize", params))["data"]["limit"] == "max_children"
        assert len(servers()) == 2


async def test_many_at_once_are_never_more_than_may_be() -> None:
    async with child_world(options={"warm": 3, "max_children": 4}) as w:
        most = 0

        async def connect() -> str:
            nonlocal most
            client = await w.connected()
            most = max(most, len(servers()))
            return await client.text("pid")

        assert len(set(await asyncio.gather(*(connect() for _ in range(4))))) == 4
        assert most <= 4


async def test_one_that_ends_at_once_is_not_started_in_a_loop(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    async with child_world("dies", "key", options={"warm": 1, "env": {"CALLS": str(notes)}}):
        await until(lambda: notes.exists(), "it was started")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await until(lambda: len(notes.read_text().split()) > 2, "it is started twice more", 30)
        assert loop.time() - begun > 1.0, "after 1 and after 2 seconds"


class Dying:
    """A process that has ended, and whose last words are still being read."""

    has_ended = True

    def __init__(self) -> None:
        self.asked, self.stopped = asyncio.Event(), asyncio.Event()

    async def ended(self) -> None: ...

    async def last_words(self) -> str:
        """Not before the layer stops."""
        self.asked.set()
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        self.stopped.set()


async def test_what_one_that_died_has_left_is_ended_when_the_layer_stops() -> None:
    process = Dying()

    async def start(_: warm.Label) -> ChildProcess:
        return cast(ChildProcess, process)

    waiting = warm.WarmProcesses(1, 60, start, lambda _: None)
    waiting.run(lambda: 1)
    await until(process.asked.is_set, "it is found to be over")
    assert await waiting.take(lambda: "somebody's") is None
    await waiting.close()
    assert process.stopped.is_set()


async def test_they_end_when_nobody_needs_one_and_come_back_with_who_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm, "_LOOK_EVERY", 0.05)
    async with child_world(options={"warm": 1, "child_idle": 2}) as w:
        await until(lambda: len(servers()) == 1, "one waits")
        before = servers()
        await until(lambda: not servers(), "it is not needed")
        client = await w.connected()
        own = int(await client.text("pid"))
        await until(lambda: servers() - {own}, "another waits")
        assert own not in before


async def test_none_of_them_survives_the_layer() -> None:
    async with world(server=child(warm=2)):
        await until(lambda: len(servers()) == 2, "two wait")
    assert not servers()


@pytest.mark.parametrize(
    "options",
    [{"warm": -1}, {"warm": 3, "max_children": 2}, {"warm": 1, "env": {"T": "{principal}"}}],
)
def test_what_cannot_wait_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="warm"):
        StdioServer(sys.executable, CHILD, **options)
