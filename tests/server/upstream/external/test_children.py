"""In which era a child is spoken to: outside of any session in that of its client, if it has it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions import StdioServer
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.upstream.external import child
from mcp_sessions.server.upstream.external.child_requests import ChildRefused
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import ONE_CLIENT, Slot
from mcp_sessions.server.upstream.port import UpstreamError
from tests.server.upstream.external.test_failures import announced, never, none_is_away
from tests.support.children import child_world, modern_child, until
from tests.support.modern import ModernClient
from tests.support.world import world


def starts(noted: Path) -> int:
    return noted.read_text().split("\n").count("started") if noted.exists() else 0


@pytest.mark.parametrize(
    ("misdeed", "first"),
    [("", 1), ("mute", 1), ("impatient", 2)],
)
async def test_a_command_of_the_era_before_serves_whatever_it_does_when_asked_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misdeed: str, first: int
) -> None:
    """It refuses, says nothing, or ends: then it is restarted, and not asked that any more."""
    monkeypatch.setattr(child, "_DISCOVERING", 0.3)
    noted = tmp_path / "calls"
    async with child_world(misdeed, options={"env": {"CALLS": str(noted)}}) as w:
        client = ModernClient(w.carrier)
        assert await client.text("count") == "1"
        assert starts(noted) == first
        asks = ModernClient(w.carrier, capabilities={"elicitation": {}})
        assert await asks.text("count") == "1"
        assert starts(noted) == first + 1
        connected = await w.connected()
        assert await connected.text("count") == "1"


async def test_a_slow_server_of_the_modern_era_is_asked_again_once_it_refused_a_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_DISCOVERING", 0.3)
    slow = modern_child("slow", env={"SLOW": str(tmp_path / "slow")})
    async with world(server=slow) as w:
        assert await ModernClient(w.carrier).text("count") == "1"


async def test_who_is_refused_by_the_server_itself_reads_why_and_locks_nobody_out(
    tmp_path: Path,
) -> None:
    """Clients with equal descriptions get the same error for a while: a process each time is too
    much.
    """
    noted = tmp_path / "calls"
    async with child_world("refuses", "old", options={"env": {"CALLS": str(noted)}}) as w:

        def params(name: str) -> dict[str, Any]:
            info = {"name": name, "version": "1"}
            return {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}

        for _ in range(2):
            error = await w.client().error("initialize", params("old"))
            assert error == {"code": -32010, "message": "not this one", "data": {"try": "another"}}
        assert noted.read_text().split() == ["refused"]
        result = await w.client().result("initialize", params("new"))
        assert result["serverInfo"]["name"] == "child"


async def test_what_is_asked_to_others_as_well_is_bounded_and_keeps_nothing_of_who_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of those whom the server refused, however they describe themselves; the log quotes none."""
    async with child_world() as w:
        upstream: Any = w.inside.upstream
        of: Children = upstream.children
        client = ModernClient(w.carrier)
        assert await client.text("count") == "1"
        ((_, slot),) = of._slots.items()  # pyright: ignore[reportPrivateUsage]
        await of._vacate(slot)  # pyright: ignore[reportPrivateUsage]
        long = ChildRefused({"code": -32010, "message": "no " * 1_000_000, "data": "x" * 100})

        async def refuses(*_: object) -> None:
            raise long

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child.Child, "shake_hands", refuses)
            notified = [await client.call("count").error() for _ in range(3)]
        assert {each["code"] for each in notified} == {-32010}
        assert [len(each["message"]) for each in notified] == [3_000_000, 300, 300]
        assert len(caplog.text) < 10_000 and "no no" not in caplog.text
        ((_, _, kept),) = of._failures._refused.values()  # pyright: ignore[reportPrivateUsage]
        assert kept.__traceback__ is None, "nobody raised that one"


async def test_one_that_dies_in_each_era_is_said_with_its_last_words() -> None:
    async with child_world("dies", "key") as w:
        error = await ModernClient(w.carrier).call("count").error()
        assert "the key is missing" in error["message"]


@pytest.mark.parametrize(
    "method",
    ["initialize", "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe"],
)
async def test_what_the_modern_era_has_not_it_has_not_here_either(method: str) -> None:
    """Whatever the server speaks."""
    async with child_world() as w:
        client = ModernClient(w.carrier)
        received = client.send(method, {"uri": "test://a", "level": "info"})
        error = await received.error()
        assert (error["code"], error["data"], received.status) == (-32601, method, 404)


async def test_who_listens_outside_of_sessions_learns_that_a_list_changed() -> None:
    async with child_world() as w:
        client = ModernClient(w.carrier)
        assert await client.text("count") == "1"
        listened = await client.listening(None, lists=("tools",))
        await client.text("changed")
        await listened.until(
            lambda: any(
                each.get("method") == "notifications/tools/list_changed"
                for each in listened.messages
            ),
            "the change",
        )


async def test_headers_that_a_tool_declared_are_compared_once_it_was_listed() -> None:
    """A proxy may go by them."""
    async with child_world("headers") as w:
        client = ModernClient(w.carrier)
        await client.send("tools/list").result()
        arguments: dict[str, Any] = {"text": "a", "region": "eu"}
        mismatch = client.call("echo", arguments, headers={"mcp-param-region": "us"})
        assert ((await mismatch.error())["code"], mismatch.status) == (-32020, 400)
        missing = client.call("echo", arguments)
        assert (await missing.error())["code"] == -32020
        assert await client.text("echo", arguments, headers={"mcp-param-region": "eu"}) == "a"


async def test_who_waits_for_one_that_starts_while_the_layer_drains_is_answered(
    tmp_path: Path,
) -> None:
    """In the grace that calls have: what waits for a handshake is no call yet."""
    noted = tmp_path / "calls"
    async with child_world("silent", options={"env": {"CALLS": str(noted)}}) as w:
        info = {"name": "raw", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
        sent = w.client().send("initialize", params)
        await until(lambda: starts(noted) == 1, "it is started")
        await w.layer.drain(0.2)
        error = await sent.error()
        assert error["data"] == {"reason": "not_started", "started": False}
        assert "the layer stops" in error["message"]


async def test_who_was_at_a_slot_that_has_ended_starts_no_child_that_nobody_would_end() -> None:
    async with child_world() as w:
        upstream: Any = w.inside.upstream
        client = await w.connected()
        assert await client.text("count") == "1"
        ((key, slot),) = upstream.children._slots.items()
        upstream.children.remove(key)
        await until(lambda: not upstream.children._living, "its child is ended")
        with pytest.raises(UpstreamError):
            await slot.started(ANONYMOUS)
        assert not upstream.children._living


async def test_who_waits_for_one_that_starts_for_what_has_ended_is_answered(tmp_path: Path) -> None:
    """It was the start that was cancelled, and not whoever waits for it."""
    noted = tmp_path / "calls"
    async with child_world("silent", options={"env": {"CALLS": str(noted)}}) as w:
        upstream: Any = w.inside.upstream
        sent = ModernClient(w.carrier).call("count")
        await until(lambda: starts(noted) == 1, "it is started")
        ((key, _),) = upstream.children._slots.items()
        upstream.children.remove(key)
        error = await sent.error()
        assert error["data"] == {"reason": "not_started", "started": False}
        await until(lambda: not upstream.children._living, "it is ended")


async def test_a_start_that_is_cancelled_before_it_begins_hinders_no_other() -> None:
    async with child_world() as w:
        upstream: Any = w.inside.upstream
        client = await w.connected()
        assert await client.text("count") == "1"
        ((_, slot),) = upstream.children._slots.items()
        await upstream.children._vacate(slot)
        waits = asyncio.create_task(slot.started(ANONYMOUS))
        await asyncio.sleep(0)
        slot.starting.cancel()
        with pytest.raises(UpstreamError):
            await waits
        assert await client.text("count") == "1"


async def test_no_more_children_begin_than_those_that_end_make_room_for() -> None:
    ends = asyncio.Event()

    class Child:
        has_ended, failure, is_modern = False, "", False
        capabilities: dict[str, Any] = {}

        async def shake_hands(self, *_: object) -> None: ...

        async def stop(self) -> None:
            await ends.wait()

    class Starter:
        async def start(self, slot: Slot, principal: Principal) -> Any:
            await asyncio.sleep(0)
            return Child()

    server = StdioServer("true", max_children=2)
    made: Any = Starter()
    of = Children(server, made, frozenset({"2025-11-25"}), {}, announced, none_is_away, never)
    ann, bob, eve = (Principal(name) for name in ("ann", "bob", "eve"))

    def slot(key: str) -> Slot:
        client = {"protocolVersion": "2025-11-25"}
        made = Slot(of.services, key, client, ONE_CLIENT)
        return of.slot(key, lambda: made)

    for key, owner in (("bob", bob), ("eve", eve)):
        await slot(key).started(owner)
        of.remove(key)
    waiting = [asyncio.create_task(slot(key).started(ann)) for key in ("one", "two", "three")]
    await asyncio.sleep(0)
    ends.set()
    async with asyncio.timeout(5):
        begun = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(each, UpstreamError) for each in begun] == [False, False, True]
    assert of.room.count == 2


async def test_what_clients_make_up_starts_no_process_of_its_own(tmp_path: Path) -> None:
    """Outside of sessions a process is for what a client can be asked, in the protocol's words."""
    noted = tmp_path / "calls"
    async with child_world(options={"env": {"CALLS": str(noted)}, "max_children": 2}) as w:
        made_up: list[dict[str, Any]] = [
            *({"elicitation": value} for value in ({}, {"n": 1}, {"form": {"n": 2}}, True, [1])),
            *({"elicitation": {}, name: {"n": 3}} for name in ("experimental", "other")),
            {"elicitation": {"form": {}, "other": {"n": 4}}},
        ]
        counts = [
            await ModernClient(w.carrier, capabilities=each).text("count") for each in made_up
        ]
        assert counts == [str(number + 1) for number in range(len(made_up))]
        assert starts(noted) == 1
        asked = {"elicitation": {"form": {}, "url": {"n": 5}}}
        client = ModernClient(w.carrier, capabilities=asked)
        notified = json.loads(await client.text("client"))
        assert notified["capabilities"] == {"elicitation": {"form": {}, "url": {}}}
        assert starts(noted) == 2


async def test_who_can_be_asked_different_things_takes_no_room_with_it(tmp_path: Path) -> None:
    """Outside of sessions nothing lasts: the process that was used last stays for longest."""
    kinds: list[dict[str, Any]] = [
        {name: {mode: {}} for name, mode in zip(("elicitation", "sampling"), pair, strict=True)}
        for pair in (("form", "tools"), ("url", "tools"), ("form", "context"), ("url", "context"))
    ]
    async with child_world(options={"max_children": 3}) as w:
        for kind in kinds * 2:
            assert await ModernClient(w.carrier, capabilities=kind).text("count") == "1"
        sessions = [await w.connected() for _ in range(2)]
        assert [await each.text("count") for each in sessions] == ["1", "1"]
        assert await ModernClient(w.carrier, capabilities=kinds[-1]).text("count") == "2"
        assert await (await w.connected()).text("count") == "1"
