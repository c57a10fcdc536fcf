"""A store that is back is one line, for each outage and process."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcp_sessions.core.log import Draft
from mcp_sessions.errors import StoreRefused, StoreUnavailable
from mcp_sessions.server.reporting.store_watch import StoreWatch
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.outage import Outage
from mcp_sessions.stores.postgres import PostgresStore
from mcp_sessions.stores.redis import RedisStore
from tests.stores.opening import NOW, new, opened
from tests.support.postgres_server import postgres_server
from tests.support.redis_server import redis_server
from tests.support.virtual_time import VIRTUAL, Backend


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    """Real time for real servers."""
    return ("asyncio", {}) if "server_and_store" in request.fixturenames else VIRTUAL


class Failing(MemoryStore):
    """A store whose calls fail as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.outage = Outage("failing")
        self.failure: StoreUnavailable | None = None
        self.probes = 0

    def call(self) -> None:
        """One call of somebody."""
        if self.failure is not None:
            self.outage.failed(self.failure)

    async def probe(self) -> None:
        self.probes += 1
        self.call()
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def watched(store: Any) -> AsyncGenerator[StoreWatch]:
    watch = StoreWatch(store, lambda: NOW)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    try:
        yield watch
    finally:
        task.cancel()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.endswith("store_watch")]


async def test_many_calls_fail_and_one_line_says_when_the_store_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And how long it was away: from the first call that failed."""
    store = Failing()
    async with watched(store) as watch:
        await asyncio.sleep(60)
        assert (watch.away, store.probes) == (0, 0)
        store.failure = StoreUnavailable("it is away")
        for _ in range(50):
            store.call()
            await asyncio.sleep(0.5)
        assert watch.away == pytest.approx(25, abs=0.1) and not said(caplog)
        store.failure = None
        await asyncio.sleep(1)
        assert said(caplog) == ["the store is back: it was away for 25.0 s"]
        probes = store.probes
        await asyncio.sleep(60)
        assert (watch.away, store.probes) == (0, probes)
        # Another outage has a line of its own.
        store.failure = StoreUnavailable("it is away")
        store.call()
        await asyncio.sleep(3)
        store.failure = None
        await asyncio.sleep(1)
        assert len(said(caplog)) == 2


async def test_a_store_that_refuses_one_call_and_takes_others_was_not_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that refuses each, as a full one does, was."""
    store = Failing()
    async with watched(store):
        store.outage.failed(StoreRefused("a value of another program"))
        await asyncio.sleep(5)
        assert said(caplog) == [] and store.probes == 1
        store.failure = StoreRefused("it is full")
        store.call()
        await asyncio.sleep(5)
        store.failure = None
        await asyncio.sleep(1)
        assert said(caplog) == ["the store is back: it was away for 5.0 s"]


def away_redis() -> Any:
    def made(url: str) -> RedisStore:
        return RedisStore(f"{url}?timeout=1")

    return redis_server("--appendonly", "yes"), made


def away_postgres() -> Any:
    def made(url: str) -> PostgresStore:
        return PostgresStore(url, timeout=1)

    return postgres_server(), made


@pytest.mark.parametrize(
    "server_and_store",
    [
        pytest.param(away_redis, marks=pytest.mark.redis, id="redis"),
        pytest.param(away_postgres, marks=pytest.mark.postgres, id="postgres"),
    ],
)
async def test_a_real_server_that_was_killed_is_back(
    server_and_store: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    running, made = server_and_store()
    with running as server:
        async with opened(made(server.url)) as store, watched(store) as watch:
            session = await new(store)
            server.kill()
            with pytest.raises(StoreUnavailable):
                await store.append(session, Draft(b"{}"), now=NOW)
            await until(lambda: watch.away > 0)
            server.start()
            await until(lambda: bool(said(caplog)))
    [line] = said(caplog)
    assert re.fullmatch(r"the store is back: it was away for [0-9]+\.[0-9] s", line)


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not look():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
