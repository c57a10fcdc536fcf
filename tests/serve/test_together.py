"""Servers that take the place of others while they run, in virtual time."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from mcp_sessions import StdioServer
from mcp_sessions.cli.serve_several import ReloadedFile
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.serve.together import Part, Together
from tests.support.virtual_time import VIRTUAL, Backend

PATH = "/one/mcp"


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


class Life:
    """A layer's lifespan, whose store is away at first, for so many tries."""

    def __init__(self, away: int) -> None:
        self.away = away
        self.runs = False
        self.tries = 0
        self.failure: Exception | None = None

    async def open_store(self) -> None:
        self.tries += 1
        if self.away:
            self.away -= 1
            raise StoreUnavailable("the store is away")

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Run it, once."""
        await self.open_store()
        if self.failure is not None:
            raise self.failure
        self.runs = True
        try:
            yield
        finally:
            self.runs = False


class Drain:
    """A drain that takes until it is allowed to end."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    def announce(self) -> None:
        """Nobody is there to receive it."""

    def needs_listener(self) -> bool:
        return False

    async def drain(self, grace: float) -> None:
        del grace
        await self.ends.wait()


class Server:
    """A server that answers with its name."""

    def __init__(self, name: str, path: str = PATH, *, away: int = 0) -> None:
        self.name = name
        self.life = Life(away)
        self.draining = Drain()
        life, draining, health = (cast("Any", it) for it in (self.life, self.draining, object()))
        self.part = Part(path, self._app, life, draining, health, ())

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode()})


class Setup:
    """Servers on one address."""

    def __init__(self, *servers: Server) -> None:
        self.together = Together([each.part for each in servers], 0.0, 1.0)
        self._app = self.together.app(None)

    async def answer(self, path: str = PATH) -> str | int:
        """The name of the server at a path, or the status."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope: Scope = {
            "type": "http",
            "path": path,
            "method": "GET",
            "headers": [],
            "query_string": b"",
        }
        await self._app({**scope, "root_path": ""}, receive, send)
        status = sent[0]["status"]
        return sent[1]["body"].decode() if status == 200 else status

    async def until(self, answer: str) -> None:
        """Wait until that server is served."""
        async with asyncio.timeout(600):
            while await self.answer() != answer:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The lifespan of the application."""
        asked, said = asyncio.Queue[Message](), asyncio.Queue[Message]()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}

        async def serve() -> None:
            await self._app(scope, asked.get, said.put)

        task = asyncio.create_task(serve())
        await asked.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        try:
            yield
        finally:
            await asked.put({"type": "lifespan.shutdown"})
            await task


async def test_a_changed_server_waits_for_its_store(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the reload was applied, so it cannot be given up half-way."""
    caplog.set_level(logging.INFO, "mcp_sessions")
    before, after, other = Server("before"), Server("after", away=5), Server("other", "/two/mcp")
    setup = Setup(before)
    async with setup.running():
        await setup.together.serve([after.part, other.part])
        assert await setup.answer("/two/mcp") == "other"
        assert await setup.answer() == "before", "it drains, and says so itself"
        before.draining.ends.set()
        await setup.until("after")
        assert (after.life.tries, after.life.runs, before.life.runs) == (7, True, False)
    said = [each.getMessage() for each in caplog.records]
    what = "the store is away, and the changed server waits for it: the store is away"
    assert said == [f"{PATH}: {what}"]


async def test_a_server_that_waits_for_its_store_can_be_replaced_and_stopped() -> None:
    before, never, after = Server("before"), Server("never", away=9_999), Server("after")
    setup = Setup(before)
    async with setup.running():
        await setup.together.serve([never.part])
        before.draining.ends.set()
        await asyncio.sleep(60)
        assert 5 < never.life.tries < 100 and not never.life.runs
        await setup.together.serve([after.part])
        await setup.until("after")
        tries = never.life.tries
        await setup.together.serve([Server("last", away=9_999).part])
        after.draining.ends.set()
        await asyncio.sleep(60)
        assert never.life.tries == tries


async def test_a_new_server_whose_store_is_away_changes_nothing() -> None:
    one, two = Server("one"), Server("two", "/two/mcp", away=1)
    three = Server("three", "/three/mcp")
    setup = Setup(one)
    async with setup.running():
        with pytest.raises(StoreUnavailable):
            await setup.together.serve([three.part, two.part])
        assert [await setup.answer(path) for path in (PATH, "/two/mcp", "/three/mcp")] == [
            "one",
            404,
            404,
        ]
        assert one.life.runs and not three.life.runs


async def test_a_second_change_leaves_a_server_that_drains_where_it_is() -> None:
    """Its clients would else get 404, and forget their sessions."""
    first, second, third = Server("first"), Server("second"), Server("third")
    setup = Setup(first)
    async with setup.running():
        await setup.together.serve([second.part])
        await asyncio.sleep(1)
        await setup.together.serve([third.part])
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert await setup.answer() == "first"
        first.draining.ends.set()
        await setup.until("third")
        assert not second.life.runs and not second.life.tries
        # Removed while another one drains at its path: then nobody is there.
        third.draining.ends.set()
        await setup.together.serve([])
        await asyncio.sleep(1)
        assert await setup.answer() == 404


async def test_a_changed_server_that_fails_after_its_store_opened_is_made_anew() -> None:
    """The next reload makes it again: a layer runs once."""

    def layer_of(server: object) -> Any:
        return SimpleNamespace(external=SimpleNamespace(children=SimpleNamespace(server=server)))

    def part_of(path: str, layer: object) -> Part:
        return next(left).part

    made = [Server("before"), Server("fails"), Server("after")]
    made[1].life.failure = StoreUnavailable("the bus of the store is away")
    setup = Setup(made[0])
    left = iter(made[1:])
    changed = StdioServer("true", per="shared")
    served = ReloadedFile(
        lambda: {PATH: changed},
        lambda _, server: layer_of(server),
        part_of,
        setup.together,
        {PATH: layer_of(StdioServer("true"))},
        {PATH: made[0].part},
        None,
    )
    async with setup.running():
        made[0].draining.ends.set()
        assert await served.reload() == f"changed {PATH}"
        async with asyncio.timeout(60):
            while await setup.answer() != 404:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await served.reload() == f"changed {PATH}"
        await setup.until("after")
        assert await served.reload() == "nothing has changed"
