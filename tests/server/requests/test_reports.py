"""The reports of progress that a repetition gets, and their order (KEY21)."""

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from mcp_sessions.server.requests.reports import MOST, MOST_BYTES, Reports


class Sending:
    """One sending of a request, and its reports."""

    def __init__(self) -> None:
        self.notified: list[Any] = []

    async def notify(self, params: Mapping[str, Any]) -> None:
        """For `Reports.repeat`."""
        await anyio.lowlevel.checkpoint()
        self.notified.append(params["progress"])


async def test_all_that_was_reported_is_repeated_in_order() -> None:
    reports, again = Reports(), Sending()
    assert all(reports.add({"progress": n}) for n in range(5))
    await reports.repeat(again.notify)
    assert again.notified == [0, 1, 2, 3, 4]
    assert reports.add({"progress": 5}), "from now on whoever reports tells it"


async def test_what_is_reported_meanwhile_follows_and_does_not_overtake() -> None:
    reports, again = Reports(), Sending()
    for n in range(3):
        reports.add({"progress": n})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.repeat, again.notify)
        while not again.notified:
            await anyio.lowlevel.checkpoint()
        assert not reports.add({"progress": 3})
    assert again.notified == [0, 1, 2, 3]


async def test_a_newer_repetition_replaces_an_older_one() -> None:
    reports, older, newer = Reports(), Sending(), Sending()
    for n in range(50):
        reports.add({"progress": n})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.repeat, older.notify)
        while not older.notified:
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(reports.repeat, newer.notify)
    assert newer.notified == list(range(50))
    assert len(older.notified) < 50
    assert reports.add({"progress": 50})


@pytest.mark.parametrize(("text", "most"), [("", MOST), ("x" * 10_000, MOST_BYTES // 10_000)])
async def test_the_newest_are_kept_by_number_and_bytes(text: str, most: int) -> None:
    reports, again = Reports(), Sending()
    for n in range(1_000):
        reports.add({"progress": n, "message": text})
    await reports.repeat(again.notify)
    assert again.notified == list(range(1_000 - most, 1_000))
