"""Whose start failed is refused for a while; what others describe of themselves is theirs alone."""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions import StdioServer
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import ONE_CLIENT, Slot
from mcp_sessions.server.upstream.external.starts import Failures
from mcp_sessions.server.upstream.port import UpstreamError
from tests.support.children import child_world

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
OURS: Json = {"clientInfo": {"name": "ours"}}
ANN, BOB = Principal("ann"), Principal("bob")
DIED = UpstreamError({"code": -32603, "message": "it died"})


def named(name: str) -> Json:
    return {"clientInfo": {"name": name}}


# --- what is decided -----------------------------------------------------------------------------


def test_each_description_waits_by_itself_longer_and_longer() -> None:
    failures, now = Failures(OURS), 100.0
    for pause in (1, 2, 4, 8, 16, 30, 30):
        assert not failures.failed(ANN, named("bad"), DIED, now)
        assert failures.refusal(ANN, named("bad"), now + pause - 0.1)
        assert failures.refusal(ANN, named("good"), now) is None
        assert failures.refusal(BOB, named("bad"), now) is None
        now += pause
        assert failures.refusal(ANN, named("bad"), now) is None
    failures.started(ANN, named("bad"))
    failures.failed(ANN, named("bad"), DIED, now)
    assert failures.refusal(ANN, named("bad"), now + 1) is None, "a success begins anew"


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "good"]), max_size=40), st.booleans())
def test_only_a_try_of_the_layers_own_refuses_others(names: list[str], is_served: bool) -> None:
    """However many descriptions fail: one client may make them up."""
    failures = Failures(OURS)
    for now, name in enumerate(names):
        if name == "good":
            failures.started(ANN, named(name))
            continue
        tries = failures.failed(ANN, named(name), DIED, float(now))
        assert failures.refusal(ANN, named("new"), float(now)) is None
        assert not tries or OURS in tries
        assert not tries or ("good" not in names[: now + 1]) == (len(tries) == 1)
        assert not (tries and failures.failed(ANN, named("e"), DIED, float(now))), "one at a time"
        if tries and is_served:
            failures.was_tried(ANN, None, float(now))
            assert failures.refusal(ANN, named("new"), float(now)) is None
        elif tries:
            failures.was_tried(ANN, DIED, float(now))
            assert failures.refusal(ANN, named("new"), float(now))
            assert failures.refusal(BOB, named("new"), float(now)) is None
            failures.started(ANN, named("good"))
            assert failures.refusal(ANN, named("new"), float(now)) is None
            return


def test_what_is_kept_is_bounded() -> None:
    failures = Failures(OURS)
    for number in range(3_000):
        failures.failed(ANN, named(str(number)), DIED, 0.0)
        failures.failed(Principal(str(number)), named("bad"), DIED, 0.0)
        failures.started(Principal(f"served {number}"), named("x" * 100_000))
        failures.started(Principal(f"served {number}"), named("good"))
    kept = [failures._by_description, failures._doubted, failures._served]  # pyright: ignore[reportPrivateUsage]
    assert all(len(each) <= 1_000 for each in kept)
    assert named("x" * 100_000) not in failures._served.values()  # pyright: ignore[reportPrivateUsage]


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
        self.children = Children(server, made, frozenset({"2025-11-25"}), ours, none_is_away, never)

    async def serves(self, name: str, principal: Principal = ANN) -> bool:
        """Whether a client that describes itself so is served."""
        client = {**named(name), "protocolVersion": "2025-11-25"}
        notified: Any = None
        slot = Slot(self.children.services(notified), object(), client, ONE_CLIENT)
        try:
            await slot.started(principal)
        except UpstreamError:
            return False
        await self.children._vacate(slot)  # pyright: ignore[reportPrivateUsage]
        return True

    async def quiet(self) -> None:
        """The server is not being tried."""
        async with asyncio.timeout(5):
            while tasks := list(self.children._background.tasks):  # pyright: ignore[reportPrivateUsage]
                await asyncio.wait(tasks)


@pytest.mark.parametrize("made_up", [1, 2, 40], ids="{} descriptions".format)
async def test_a_good_client_gets_in_whatever_another_one_describes(made_up: int) -> None:
    """Many at once, also while the layer tries; and one that was never there before."""
    w = World(lambda name: name.startswith("bad"))
    for number in range(20):
        bad = [w.serves(f"bad {number if made_up > 1 else 0} {each}") for each in range(made_up)]
        came = await asyncio.gather(*bad, w.serves(f"good {number}"), w.serves("good"))
        assert came == [*([False] * made_up), True, True]
        if number % 2:
            await w.quiet()
    assert await w.serves("another good one")


async def test_a_server_that_fails_whoever_asks_is_not_started_at_each_request() -> None:
    w = World(lambda _: True)
    for number in range(100):
        assert not await w.serves(f"client {number}")
        await w.quiet()
    assert w.starter.started == 3, "two clients, and a try"
    assert not await w.serves("of bob", BOB)
    assert w.starter.started == 4, "of one principal"


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
