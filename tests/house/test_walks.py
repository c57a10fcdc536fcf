"""The files that a message goes through are those that ``docs/how-it-works.md`` lists.

Each walk of its section "Three walks" is done here, once warm, and the files of the packages in
which a function is called or returned to are noted, in the order in which it comes to them first.
Left out is what a reader need not open on the way: what stores, what only decides or only holds
values, and the bus of a process that is alone, which does nothing.
"""

import re
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import mcp_sessions
import mcp_sessions_transports
from tests.house.source import ROOT
from tests.support.duplex import DECLARED, WITHIN, duplex_world
from tests.support.raw import at_most, uris
from tests.support.replicas import cluster
from tests.support.world import STORES, world

PAGE = ROOT / "docs/how-it-works.md"

LEFT_OUT = (
    "mcp_sessions/core/",
    "mcp_sessions/stores/",
    # Where there are others, the bus to them is a file of its own, and is counted.
    "mcp_sessions/server/cluster/bus.py",
    *(
        f"mcp_sessions/{name}.py"
        for name in ("background", "errors", "ids", "locks", "metrics", "policy", "principal")
    ),
    *(f"mcp_sessions/{name}.py" for name in ("sealing", "security")),
)
"""Beginnings of paths."""

Measured = Callable[[], Any]
"""A block in which files are noted: ``with measured(): …``."""

Walk = Callable[[Measured], Awaitable[None]]


@contextmanager
def noted(files: list[str]) -> Generator[None]:
    """Add each file of the packages that this thread comes to, unless it is there."""
    # Where they are installed: in this checkout, or from a wheel.
    folders = {
        f"{package.__path__[0]}/": folder
        for package, folder in (
            (mcp_sessions, "mcp_sessions/"),
            (mcp_sessions_transports, "transports/mcp_sessions_transports/"),
        )
    }
    short: dict[str, str] = {}

    def shortened(path: str) -> str:
        for folder, name in folders.items():
            if path.startswith(folder) and not (name + path[len(folder) :]).startswith(LEFT_OUT):
                return name + path[len(folder) :]
        return ""

    def note(frame: FrameType, event: str, _: object) -> None:
        seen = frame if event == "call" else frame.f_back if event == "return" else None
        if seen is None:
            return
        path = seen.f_code.co_filename
        if path not in short:
            short[path] = shortened(path)
        if short[path] and short[path] not in files:
            files.append(short[path])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def listed(page: str, heading: str) -> list[str]:
    """The files in the table below a heading of the page, in its order."""
    section = re.search(rf"^### {re.escape(heading)}$(.*?)(?=^##|\Z)", page, re.M | re.S)
    assert section is not None, f"no section {heading!r}"
    return re.findall(r"^\| `([^`]+\.py)` \|", section[1], re.M)


# --- the walks ----------------------------------------------------------------------------


async def tools_call(measured: Measured) -> None:
    """In a transport-mode session, answered as JSON."""
    async with world(store=STORES["memory"]()) as w:
        client = await w.connected()
        assert await client.text("echo", text="cold") == "cold"
        with measured():
            assert await client.text("echo", text="warm") == "warm"


async def update(measured: Measured) -> None:
    """Of a resource that a session subscribed to, whose GET stream another replica has open."""
    async with cluster(2, seed=1) as c:
        client = await c[0].connected()
        await client.start()
        await client.result("resources/subscribe", {"uri": "a:1"})
        stream = await c.at(1, client).get().started()
        await c[0].layer.notify_resource_updated("a:1")
        assert uris(await at_most(WITHIN, stream.has(1))) == ["a:1"]
        with measured():
            await c[0].layer.notify_resource_updated("a:1")
            assert uris(await at_most(WITHIN, stream.has(2))) == ["a:1", "a:1"]


async def takeover(measured: Measured) -> None:
    """Of a session with an event since, whose old connection has its GET stream open."""
    async with duplex_world() as w:
        http = await w.inner.connected(capabilities=DECLARED)
        stream = await http.get().started()
        started = await http.start()
        await http.result("resources/subscribe", {"uri": "a:1"})
        await w.layer.notify_resource_updated("a:1")
        await at_most(WITHIN, stream.has(1))
        socket = await w.connected("websocket", capabilities=DECLARED)
        await socket.start()
        with measured():
            await socket.resume(started["sessionId"], started["sessionEventId"])
            assert uris(await socket.has_events(1)) == ["a:1"]
            *_, told = await at_most(WITHIN, stream.has(2))
        assert told["params"]["reason"] == "taken_over"


WALKS: dict[str, Walk] = {
    "A `tools/call` over HTTP": tools_call,
    "An update on one replica to a GET stream on another": update,
    "A WebSocket `session/resume` that takes over from HTTP": takeover,
}
"""Its heading on the page → does it, and measures the part that the page is about."""


@pytest.mark.anyio
@pytest.mark.parametrize("heading", WALKS)
async def test_a_message_goes_through_the_files_that_the_page_lists(heading: str) -> None:
    files: list[str] = []
    await WALKS[heading](lambda: noted(files))

    assert files == listed(PAGE.read_text("utf-8"), heading)


def test_every_walk_of_the_page_is_measured() -> None:
    section = PAGE.read_text("utf-8").partition("\n## Three walks\n")[2].partition("\n## ")[0]

    assert re.findall(r"^### (.*)$", section, re.M) == [*WALKS]


def test_a_file_that_the_page_does_not_list_is_seen() -> None:
    page = "## Three walks\n\n### One\n\n| file | does |\n|---|---|\n| `a/b.py` | x |\n\n### Two\n"

    assert listed(page, "One") == ["a/b.py"]
    assert listed(page, "Two") == []
    with pytest.raises(AssertionError, match="no section"):
        listed(page, "Three")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_a_file_that_a_page_names_by_its_path_is_there(page: str) -> None:
    named = re.findall(
        r"`((?:mcp_sessions|transports|tests)/[\w/.]+\.py)`", (ROOT / page).read_text()
    )

    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []
