"""The files that a message goes through are those that ``docs/read-the-code.md`` lists.

Each walk of its section "Three walks" is done here, once warm (`tests.support.walks`). The files of
the packages in which a function is called or returned to are noted, in the order in which it comes
to them first. Left out is what a reader need not open on the way: what stores, what only decides or
only holds values, and the bus of a process that is alone, which does nothing.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType

import pytest

from tests.house.source import ROOT
from tests.support.recorded import file_of, profiled
from tests.support.walks import WALKS

PAGE = ROOT / "docs/read-the-code.md"

LEFT_OUT = (
    "mcp_sessions/core/",
    "mcp_sessions/stores/",
    # Where there are others, the bus to them is a file of its own, and is counted.
    "mcp_sessions/server/cluster/replica.py",
    *(
        f"mcp_sessions/{name}.py"
        for name in ("background", "errors", "ids", "locks", "metrics", "policy", "principal")
    ),
    *(f"mcp_sessions/{name}.py" for name in ("sealing", "security")),
    # It looks at the event loop from time to time.
    "mcp_sessions/server/requests/blocking.py",
)
"""Beginnings of paths."""


@contextmanager
def noted(files: list[str]) -> Generator[None]:
    """Add each file of the packages that this thread comes to, unless it is there."""
    short: dict[str, str] = {}

    def shortened(code: CodeType) -> str:
        file = file_of(code)
        return "" if file.startswith(LEFT_OUT) else file

    def note(frame: FrameType, event: str, _: object) -> None:
        seen = frame if event == "call" else frame.f_back if event == "return" else None
        if seen is None:
            return
        path = seen.f_code.co_filename
        if path not in short:
            short[path] = shortened(seen.f_code)
        if short[path] and short[path] not in files:
            files.append(short[path])

    with profiled(note):
        yield


def listed(page: str, heading: str) -> list[str]:
    """The files in the table below a heading of the page, in its order."""
    section = re.search(rf"^### {re.escape(heading)}$(.*?)(?=^##|\Z)", page, re.M | re.S)
    assert section is not None, f"no section {heading!r}"
    return re.findall(r"^\| `([^`]+\.py)` \|", section[1], re.M)


PAGES: dict[str, str] = {
    "A `tools/call` over HTTP": "http",
    "An update on one replica to a GET stream on another": "update",
    "A WebSocket `session/resume` that takes over from HTTP": "takeover",
}
"""A heading of the page → the walk that it is about."""


@pytest.mark.parametrize("heading", PAGES)
async def test_a_message_goes_through_the_files_that_the_page_lists(heading: str) -> None:
    files: list[str] = []
    async with WALKS[PAGES[heading]]() as once:
        await once(nullcontext)
        await once(lambda: noted(files))

    assert files == listed(PAGE.read_text("utf-8"), heading)


def test_every_walk_of_the_page_is_measured() -> None:
    section = PAGE.read_text("utf-8").partition("\n## Three walks\n")[2].partition("\n## ")[0]

    assert re.findall(r"^### (.*)$", section, re.M) == [*PAGES]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/read-the-code.md"])
def test_a_file_that_a_page_names_by_its_path_is_there(page: str) -> None:
    named = re.findall(
        r"`((?:mcp_sessions|transports|tests)/[\w/.]+\.py)`", (ROOT / page).read_text()
    )

    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []
