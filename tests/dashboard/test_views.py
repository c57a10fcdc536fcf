"""The views over each store: what an operator reads, and what no answer contains."""

import asyncio
import hashlib
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mcp_sessions.core.ends import EndReason
from mcp_sessions.core.log import Draft
from mcp_sessions.core.states import Mode
from mcp_sessions.core.story import Entry
from mcp_sessions.dashboard.access_control import HEADERS
from mcp_sessions.ids import GET_STREAM, ConnectionId, digest
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.testing import MakeStore
from tests.dashboard.pages import ALICE, Pages, attached, made, opened, pages_of
from tests.stores.every_store import every_store

STATIC = Path(__file__).parents[2] / "mcp_sessions" / "dashboard" / "static"
SECRET = "a-secret-of-the-application"
ALL = ("/", "/sessions", "/ended", "/replicas", "/servers", "/tasks")


@pytest.mark.parametrize("make", every_store())
async def test_each_view_shows_the_store_and_no_answer_has_a_credential(make: MakeStore) -> None:
    """SEC2: an id, an event, data, state and a resource's URI are in no answer."""
    async with opened(make) as store, pages_of(store) as pages:
        first = await made(store)
        second = await made(store, client="cursor 1.2", principal=ANONYMOUS, mode=Mode.TRANSPORT)
        await attached(store, first)
        now = pages.snapshots.clock()
        await store.append(first, Draft(f'{{"{SECRET}": 1}}'.encode(), None), now=now)
        await store.append(second, Draft(b"{}", None), now=now, stream=GET_STREAM)
        await store.replace_data(first, {SECRET: 1}, expected_version=0)
        await store.change_state(first, {SECRET: 1}, ())
        await store.subscribe(first, f"file:///{SECRET}")

        overview = await pages.get()
        listed = await pages.get("/sessions")
        one = await pages.get(f"/session/{digest(first)}")
        other = await pages.get(f"/session/{digest(second)}")
        for path in ALL[2:]:
            await pages.get(path)
        moved = await pages.post("/find", 303, name=second)

        assert re.search(r">2</div><div class=\"label\">sessions", overview)
        assert re.search(r">2</div><div class=\"label\">attached", overview)
        for name in (digest(first), digest(second), "claude-code 2.1.0", "cursor 1.2", "alice"):
            assert name in listed
        assert "attached by websocket at replica abcdefgh at its start" in one
        assert "1 kept, newest 1" in one and "1 kept, newest 1" in other
        assert moved.headers["location"] == f"/session/{digest(second)}"
        for body in pages.bodies:
            assert not {first, second, SECRET} & set(re.findall(r"[\w-]+", body))
            assert first not in body and second not in body and SECRET not in body


@pytest.mark.parametrize("make", every_store())
async def test_a_session_is_attached_by_http_as_long_as_that_connection_is_there(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own record was as before, so the page kept saying ``http`` after the connection's end."""
    monkeypatch.setattr("mcp_sessions.dashboard.snapshots._FRESH", 0.0)
    monkeypatch.setattr("mcp_sessions.dashboard.snapshots._SHARE", 0)
    async with opened(make) as store, pages_of(store) as pages:
        connection, session = await made(store, mode=Mode.TRANSPORT), await made(store)
        where, now = ConnectionId(connection), pages.snapshots.clock()
        assert await store.attach(session, where, now=now, entry=Entry(now, "attached")) is not None
        # The second snapshot keeps the row of the first one.
        before = [await pages.snapshots.now() for _ in range(2)]
        attached_before = [each.sums.transports.total() for each in before]
        assert await store.end(connection) is not None
        after = await pages.snapshots.now()

        assert attached_before == [2, 2]
        assert after.by_digest[digest(session)].transport == "none"
        assert after.sums.transports.total() == 0


async def ended_session(pages: Pages, client: str) -> str:
    """End a session as an operator does; its digest."""
    store = pages.store
    session_id = await made(store._store, client=client)  # pyright: ignore[reportPrivateUsage]
    assert await store.end(session_id)
    return digest(session_id)


@pytest.mark.parametrize("make", every_store())
async def test_a_session_that_ended_is_found_by_its_digest_and_by_its_client(
    make: MakeStore,
) -> None:
    async with opened(make) as store, pages_of(store) as pages:
        name = await ended_session(pages, "gone-client 1.0")
        # The page reads ends now and then.
        moved = await pages.post("/find", 303, name=name)
        found = await pages.get(moved.headers["location"])
        by_client = await pages.post("/find", 303, name="gone-client")
        listed = await pages.get(by_client.headers["location"])

        assert "an operator ended it" in found and "ended: an operator ended it" in found
        assert name in listed and name in await pages.get("/ended")


async def test_the_age_of_a_session_is_as_of_now() -> None:
    """With many sessions it was as old as the last snapshot."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        name = digest(await made(store))
        now, snapshot = time.time(), await pages.snapshots.whole()
        pages.snapshots._last = replace(snapshot, took=100.0)  # pyright: ignore[reportPrivateUsage]
        pages.snapshots.clock = lambda: now + 60
        said = await pages.get(f"/session/{name}")
        assert re.search("<dt>Age</dt><dd>(1m|59s|1m1s)</dd>", said)


async def test_a_digest_that_nobody_knows_says_what_that_can_mean() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        await store.made(now=pages.snapshots.clock())
        said = await pages.get("/session/0123456789ab", status=404)

        assert "No session 0123456789ab: none is there, and none has ended since" in said
        assert "The store is new since then" in said
        await pages.get("/session/not-hexadecimal", status=404)
        await pages.get("/nothing", status=404)


async def test_the_list_is_filtered_sorted_and_paged() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        for number in range(120):
            user = Principal(subject=f"u{number}")
            await made(store, client=f"client-{number % 2} 1", principal=user)

        first = await pages.get("/sessions?client=CLIENT-1&sort=principal")
        last = await pages.get("/sessions?client=client-1&sort=principal&page=2")
        back = await pages.get("/sessions?client=client-1&sort=principal&reversed=1")

        def users(text: str) -> list[str]:
            return re.findall(r"<td>(u[0-9]+)</td>", text)

        assert "60 of 120 sessions" in first and "Page 1 of 2" in first
        assert [len(users(first)), len(users(last))] == [50, 10]
        assert users(first) + users(last) == sorted(f"u{n}" for n in range(1, 120, 2))
        assert users(back)[0] == users(last)[-1]
        assert "No session is like that" in await pages.get("/sessions?mode=conversation")


async def test_a_filter_that_is_an_id_is_not_said_again() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        session_id = await made(store)
        said = await pages.get(f"/sessions?client={session_id}")

        assert session_id not in said


async def test_what_a_client_calls_itself_is_text() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        session_id = await made(store, client="<script>alert(1)</script>\x1b[31m 1")
        for path in ("/", "/sessions", f"/session/{digest(session_id)}"):
            assert "<script>alert" not in await pages.get(path)


async def test_each_answer_has_the_strict_headers() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        for path in (*ALL, "/nothing", "/static/app.css", "/session/0123456789ab"):
            answer = await pages.client.get(path)
            assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS), path
    assert "unsafe" not in HEADERS["content-security-policy"]


async def test_no_page_has_a_script_or_a_style_of_its_own() -> None:
    """The policy would refuse it."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        session_id = await made(store)
        for path in (*ALL, f"/session/{digest(session_id)}"):
            text = await pages.get(path)
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text)
            assert re.findall(r"<script(?![^>]* src=)", text) == []


async def test_a_page_with_ten_thousand_sessions_is_read_in_small_pages_and_once() -> None:
    """A hundred at a time, and one snapshot for all pages that are open."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        for _ in range(10_000):
            await store.create(Mode.PROTOCOL, ALICE, peer=None, now=pages.snapshots.clock())
        # No time passes, so that the three pages share a snapshot.
        now = pages.snapshots.clock()
        pages.snapshots.clock = lambda: now
        await pages.snapshots.whole()
        texts = [await pages.get(path) for path in ("/", "/sessions", "/sessions?page=200")]

        assert "10,000" in texts[0] and "10,000 of 10,000 sessions" in texts[1]
        assert max(pages.store.pages) <= 100
        assert sum(pages.store.pages) == 10_000
        assert max(map(len, texts)) < 40_000


async def test_the_first_view_of_ten_thousand_sessions_reads_five_hundred(tmp_path: Path) -> None:
    """It takes six calls of the store, and little of the processor. The rest follows live."""
    async with opened(lambda: SQLiteStore(tmp_path / "many.db")) as store, pages_of(store) as pages:
        for _ in range(100):
            new = (
                store.create(Mode.PROTOCOL, ALICE, peer=None, now=time.time()) for _ in range(100)
            )
            await asyncio.gather(*new)
        began = time.process_time()
        text = await pages.get()
        used = time.process_time() - began

        assert '>10,000</div><div class="label">sessions' in text
        assert "counted from the first 500, and the page is still reading" in text
        # The snapshot goes on while the page is rendered.
        assert 5 <= len(pages.store.pages) < 50 and pages.store.others == 1
        assert used < 0.3
        snapshot = await pages.snapshots.whole()
        assert len(snapshot.rows) == 10_000 and not snapshot.is_begun


async def test_nothing_is_asked_while_no_page_is_open() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        await made(store)
        assert pages.store.pages == [] and pages.snapshots.watchers == 0


async def test_a_store_that_is_away_is_said_and_what_was_known_stays() -> None:
    from mcp_sessions.errors import StoreUnavailable

    async with opened(MemoryStore) as store, pages_of(store) as pages:
        session_id = await made(store)
        await pages.get("/sessions")

        async def away(after: str | None, limit: int) -> object:
            raise StoreUnavailable("the store is away for this test")

        async def gone(session_id: str) -> object:
            raise StoreUnavailable("the store is away for this test")

        pages.store.some_sessions = away  # type: ignore[method-assign]
        pages.store.whole = gone  # type: ignore[method-assign]
        clock = pages.snapshots.clock
        pages.snapshots.clock = lambda: clock() + 60
        said = await pages.get("/sessions")

        assert "the store is away for this test" in said and digest(session_id) in said
        # It said that no such session was there, or that several had this digest.
        one = await pages.get(f"/session/{digest(session_id)}", status=503)
        assert "the store is away for this test" in one and "was there before" in one


def test_what_is_vendored_is_as_its_package_has_it() -> None:
    vendored = tomllib.loads((STATIC / "vendored.toml").read_text())
    assert set(vendored) == {path.name for path in STATIC.glob("*.min.js")}
    for name, facts in vendored.items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == facts["sha256"], name
        assert (STATIC / facts["licence"]).read_text().strip()


def test_each_reason_of_an_end_has_a_word_on_the_page() -> None:
    from mcp_sessions.dashboard.views import SAID_OF_ENDS

    assert set(SAID_OF_ENDS) == set(EndReason)
