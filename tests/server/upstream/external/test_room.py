"""A start waits for room, and a machine's lack is nobody's failure."""

import asyncio
import errno
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest

from mcp_sessions import StdioServer
from mcp_sessions.errors import LIMIT_REACHED
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import ONE_CLIENT, Slot
from mcp_sessions.server.upstream.port import UpstreamError
from tests.support.virtual_time import VIRTUAL, Backend

Json = dict[str, Any]
VERSION = "2025-11-25"
OURS: Json = {"clientInfo": {"name": "ours"}, "protocolVersion": VERSION}
ANN = Principal("ann")


@pytest.fixture
def anyio_backend() -> Backend:
    return VIRTUAL


class Child:
    """It hangs in the handshake of some clients."""

    has_ended = False
    is_modern = False
    failure = ""
    result: Json = {}
    capabilities: Json = {}

    async def shake_hands(self, client: Mapping[str, Any], *_: object) -> None:
        await asyncio.sleep(0.1 if client["clientInfo"]["name"].startswith("good") else 1_000)

    async def last_words(self) -> str:
        return "it ended"

    async def stop(self) -> None: ...


class Starter:
    """Starts them, unless the machine has not enough of something."""

    def __init__(self) -> None:
        self.lacks: list[int] = []

    async def start(self, slot: Slot, principal: Principal) -> Any:
        if self.lacks:
            raise OSError(self.lacks.pop(), "not enough")
        return Child()

    async def close(self) -> None: ...


async def announced(*_: object, **__: object) -> None:
    """Nobody shares a child."""


class World:
    def __init__(self, most: int) -> None:
        self.starter = Starter()
        made: Any = self.starter
        self.away: tuple[float, Slot] | None = None
        """When the place of a client that was asked may be given up, if there is one."""

        server = StdioServer("true", max_children=most)
        self.children = Children(
            *(server, made, frozenset({VERSION}), OURS, announced, self.give_up, self.gives_up_at)
        )

    async def give_up(self, *_: object) -> bool:
        """Whether there was one for so long, and is none any more."""
        if self.away is None or asyncio.get_running_loop().time() < self.away[0]:
            return False
        self.children.remove(self.away[1].key)
        self.away = None
        return True

    def gives_up_at(self, *_: object) -> float:
        return self.away[0] if self.away is not None else math.inf

    async def holds(self) -> Slot:
        slot = self._slot("good", object())
        await slot.started(ANN)
        return slot

    def _slot(self, name: str, key: object) -> Slot:
        client = {"clientInfo": {"name": name}, "protocolVersion": VERSION}
        services = self.children.services
        return self.children.slot(key, lambda: Slot(services, key, client, ONE_CLIENT))

    async def starts(self, name: str) -> Json | None:
        """The error of a start; None: it serves, and has ended."""
        key = object()
        slot = self._slot(name, key)
        try:
            await slot.started(ANN)
        except UpstreamError as failed:
            return failed.error
        self.children.remove(key)
        return None


async def test_a_start_that_hangs_has_its_room_for_as_long_as_a_start_may_take() -> None:
    w = World(1)
    slow = asyncio.create_task(w.starts("slow"))
    await asyncio.sleep(29)
    assert (await w.starts("good") or {})["code"] == LIMIT_REACHED
    assert "did not answer initialize" in (await slow or {})["message"]
    assert await w.starts("good") is None


@pytest.mark.parametrize("why", ["idle", "away"])
@pytest.mark.parametrize(("seconds", "waits"), [(20, None), (14, 14), (0, 0)])
async def test_a_start_waits_for_room_that_gets_free_soon_and_is_refused_at_once_else(
    why: str, seconds: float, waits: float | None
) -> None:
    """Room gets free where a child is idle for a minute, or a client that was asked stays away."""
    w, now = World(1), asyncio.get_running_loop().time
    slot = await w.holds()
    if why == "idle":
        await asyncio.sleep(60 - seconds)
    else:
        call: Any = object()
        slot.calls[call] = None
        w.away = now() + seconds, slot
    began = now()
    error = await w.starts("good")
    if waits is None:
        assert (error or {})["code"] == LIMIT_REACHED and now() == began
    else:
        assert error is None and waits <= now() - began < waits + 1


async def test_a_start_does_not_wait_for_a_client_that_comes_back() -> None:
    """Not longer than it may: that client asks again and again."""
    w, now = World(1), asyncio.get_running_loop().time
    slot = await w.holds()
    await asyncio.sleep(50)
    waiting, began = asyncio.create_task(w.starts("good")), now()
    await asyncio.sleep(5)
    slot.used_at = now()
    assert ((await waiting) or {})["code"] == LIMIT_REACHED and now() - began < 6


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
async def test_what_the_machine_lacks_keeps_nobody_out(
    lack: int, caplog: pytest.LogCaptureFixture
) -> None:
    w = World(4)
    for _ in range(5):
        w.starter.lacks = [lack]
        assert "not enough" in (await w.starts("good") or {})["message"]
        assert await w.starts("good") is None
    said = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1, "it is said now and then"
    w.starter.lacks = [errno.ENOENT]
    assert await w.starts("good") is not None
    assert await w.starts("good") is not None, "of the server itself it is counted"
