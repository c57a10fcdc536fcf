"""Whose start failed is refused for a while; what others describe of themselves is theirs alone."""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mcp_sessions import StdioServer
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import ONE_CLIENT, Slot
from mcp_sessions.server.upstream.external.starts import Failures
from mcp_sessions.server.upstream.port import UpstreamError
from tests.support.children import child_world

Json = dict[str, Any]
OURS: Json = {"clientInfo": {"name": "ours"}}
ANN, BOB = Principal("ann"), Principal("bob")
DIED = UpstreamError({"code": -32603, "message": "it died"})
LONG = UpstreamError({"code": -1, "message": "x" * 10_000, "data": "x" * 10_000})


def named(name: str) -> Json:
    return {"clientInfo": {"name": name}}


# --- what is decided -----------------------------------------------------------------------------


def test_each_description_waits_by_itself_longer_and_longer() -> None:
    failures, now = Failures(), 100.0
    for pause in (1, 2, 4, 8, 16, 30, 30):
        failures.failed(ANN, named("bad"), DIED, now)
        assert failures.refusal(ANN, named("bad"), now + pause - 0.1)
        assert failures.refusal(ANN, named("good"), now) is None
        assert failures.refusal(BOB, named("bad"), now) is None
        now += pause
        assert failures.refusal(ANN, named("bad"), now) is None
    failures.started(ANN, named("bad"))
    failures.failed(ANN, named("bad"), DIED, now)
    assert failures.refusal(ANN, named("bad"), now + 1) is None, "a success begins anew"


def test_what_is_kept_is_bounded() -> None:
    failures = Failures()
    for number in range(3_000):
        failures.failed(ANN, named(str(number)), DIED, 0.0)
        failures.failed(Principal(str(number)), named("bad"), LONG, 0.0)
        failures.started(Principal(f"served {number}"), named("good"))
    assert len(failures._refused) <= 1_000  # pyright: ignore[reportPrivateUsage]
    refusal = failures.refusal(Principal("2999"), named("bad"), 0.5)
    assert refusal is not None and refusal.error == {"code": -1, "message": "x" * 300}


# --- what is started -----------------------------------------------------------------------------


class Child:
    failure, is_modern, has_ended = "", False, False
    capabilities: Json = {}

    def __init__(self, dies_of: Callable[[str], bool]) -> None:
        self._dies_of = dies_of

    async def shake_hands(self, client: Mapping[str, Any], *_: object) -> None:
        await asyncio.sleep(0)
        if self._dies_of(client["clientInfo"]["name"]):
            self.has_ended = True
            raise DIED

    async def last_words(self) -> str:
        return "it died"

    async def stop(self) -> None: ...


class Starter:
    def __init__(self, dies_of: Callable[[str], bool]) -> None:
        self.started = 0
        self._dies_of = dies_of

    async def start(self, slot: Slot, principal: Principal) -> Any:
        self.started += 1
        return Child(self._dies_of)

    def retries(self) -> bool:
        return False


def never(*_: object) -> float:
    """No call is given up for others."""
    return math.inf


async def announced(*_: object, **__: object) -> None:
    """Nobody shares a child."""


async def none_is_away(*_: object) -> bool:
    """No call waits for a client that was asked."""
    return False


class World:
    """The children of a server that dies of some clients."""

    def __init__(self, dies_of: Callable[[str], bool]) -> None:
        self.starter = Starter(dies_of)
        made: Any = self.starter
        server = StdioServer("true", max_children=1_000)
        ours = {**OURS, "protocolVersion": "2025-11-25"}
        self.children = Children(
            *(server, made, frozenset({"2025-11-25"}), ours, announced, none_is_away, never)
        )

    async def serves(self, name: str, principal: Principal = ANN) -> bool:
        """Whether a client that describes itself so is served."""
        client = {**named(name), "protocolVersion": "2025-11-25"}
        slot = Slot(self.children.services, object(), client, ONE_CLIENT)
        try:
            await slot.started(principal)
        except UpstreamError:
            return False
        await self.children._vacate(slot)  # pyright: ignore[reportPrivateUsage]
        return True


@pytest.mark.parametrize("made_up", [1, 2, 40], ids="{} descriptions".format)
async def test_a_good_client_gets_in_whatever_another_one_describes(made_up: int) -> None:
    """Many at once, and one that was never there before."""
    w = World(lambda name: name.startswith("bad"))
    for number in range(20):
        bad = [w.serves(f"bad {number if made_up > 1 else 0} {each}") for each in range(made_up)]
        came = await asyncio.gather(*bad, w.serves(f"good {number}"), w.serves("good"))
        assert came == [*([False] * made_up), True, True]
    assert await w.serves("another good one")


async def test_a_server_that_fails_is_not_started_at_each_request_of_a_client() -> None:
    w = World(lambda _: True)
    for _ in range(100):
        assert not await w.serves("ann's client")
    assert w.starter.started == 1
    assert not await w.serves("ann's client", BOB)
    assert w.starter.started == 2, "of one principal"


async def test_a_command_that_dies_of_one_client_serves_the_others() -> None:
    params: Json = {"protocolVersion": "2025-11-25", "capabilities": {}}
    async with child_world("dies of", "bad") as w:
        for number in range(4):
            for name in ("bad", f"bad {number}"):
                about = {**params, "clientInfo": {"name": name, "version": "1"}}
                error = await w.client().error("initialize", about)
                assert "cannot read that name" in error["message"]
            info = {"name": f"good {number}", "version": "1"}
            good = await w.client().answer("initialize", {**params, "clientInfo": info})
            assert "result" in good
