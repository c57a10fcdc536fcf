"""Many ask for pages at once: the work has a bound, and others have their turn."""

import asyncio
from collections import Counter

import anyio
import pytest
from starlette.exceptions import HTTPException

from mcp_sessions.dashboard import application, snapshots
from mcp_sessions.dashboard.application import MOST_STREAMS, MOST_WAITING, Turns
from mcp_sessions.ids import digest
from mcp_sessions.stores.memory import MemoryStore
from tests.dashboard.pages import made, opened, pages_of
from tests.support.children import until


async def test_a_burst_of_pages_opens_no_more_streams_than_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were counted after the first snapshot had come, so all that waited for it got in."""
    monkeypatch.setattr(application, "STREAM_LASTS", 0.0)
    statuses = Counter[int]()
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        pages.store.may_answer = anyio.Event()

        async def ask() -> None:
            statuses[(await pages.client.get("/live/now")).status_code] += 1

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(MOST_STREAMS + 18):
                    tasks.start_soon(ask)
        assert statuses == {200: MOST_STREAMS, 503: 18}
        # Each has left.
        pages.store.may_answer.set()
        assert (await pages.client.get("/live/now")).status_code == 200


async def test_a_stream_ends_so_that_its_credential_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream of a key that was revoked went on for as long as the page was open."""
    monkeypatch.setattr(application, "STREAM_LASTS", 0.1)
    monkeypatch.setattr(snapshots, "EVERY", 0.02)
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        await made(store)
        with anyio.fail_after(20):
            answer = await pages.client.get("/live/sessions")
        assert answer.status_code == 200 and answer.text.startswith("data: ")
        assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_process_that_stops_does_not_wait_for_pages_that_are_open() -> None:
    """It waited five seconds, and then logged an error with its traceback for each of them."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pages.client.get, "/live/now")
                await until(lambda: pages.snapshots.watchers == 1, "the page is open")
                pages.leaving.append(True)
        assert pages.snapshots.watchers == 0


async def test_between_two_pages_others_have_their_turn() -> None:
    turns, done = Turns(1), list[str]()
    is_over = False

    async def other() -> None:
        while not is_over:
            done.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    await asyncio.gather(*(turns.made(lambda: done.append("page")) for _ in range(50)))
    is_over = True
    await running

    pairs = list(zip(done, done[1:], strict=False))
    assert done.count("page") == 50 and ("page", "page") not in pairs


async def test_few_pages_wait_to_be_made() -> None:
    turns = Turns(1)
    asked = (turns.made(lambda: "page") for _ in range(MOST_WAITING + 100))
    made = await asyncio.gather(*asked, return_exceptions=True)

    refused = [each for each in made if isinstance(each, HTTPException)]
    assert len(refused) == len(made) - made.count("page") > 0
    assert {each.status_code for each in refused} == {503}
    assert await turns.made(lambda: "later") == "later"


async def test_pages_of_sessions_that_are_gone_share_what_the_store_says() -> None:
    """Each read all ends with their stories, which are 20 MB. So did the changes of each page."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        for number in range(40):
            await pages.get(f"/session/{number:012x}", status=404)
        assert pages.store.ends_read == 1


async def test_the_end_of_a_session_is_on_its_page_at_once() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        session_id = await made(store)
        name = digest(session_id)
        assert "It ended" not in await pages.get(f"/session/{name}")
        await pages.store.end(session_id)
        assert "an operator ended it" in await pages.get(f"/session/{name}")


@pytest.mark.parametrize("path", ["/session", "/live/session", "/static", "/live"])
async def test_half_an_address_is_not_there(path: str) -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        await pages.get(path, status=404)


async def test_nothing_is_no_name_of_a_client() -> None:
    """A client without a version was found by it."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        await made(store, client="nameless")
        for name in ("", "  "):
            moved = await pages.post("/find", 303, name=name)
            assert "client" not in moved.headers["location"]
