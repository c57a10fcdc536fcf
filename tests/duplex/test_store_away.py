"""A WebSocket or a pipe that ends while the store is away leaves nothing behind: neither in the
store, when that is back, nor in the process.
"""

import asyncio
from typing import Any, cast

import pytest

from tests.support.duplex import DuplexPeer, DuplexWorld, duplex_world
from tests.support.failing_calls import fails
from tests.support.raw import at_most, call_params, in_session, keyed, text_of

KINDS = pytest.mark.parametrize("kind", ["websocket", "pipe"])


async def until(look: Any) -> None:
    """Wait until ``look()`` says so."""
    async with asyncio.timeout(20):
        while not await look():  # noqa: ASYNC110  (the store has no event for it)
            await asyncio.sleep(0.01)


async def attachment(w: DuplexWorld, session: str) -> Any:
    record = await w.layer.store.load(cast(Any, session), now=0)
    assert record is not None
    return record.attachment


async def gone(w: DuplexWorld, peer: DuplexPeer) -> None:
    """The peer leaves, and the process knows."""
    registry = w.inside.connections
    before = len(registry.all())
    await peer.leave()

    async def fewer() -> bool:
        return len(registry.all()) < before

    await until(fewer)


@KINDS
async def test_sessions_are_detached_when_the_store_is_back(kind: str) -> None:
    """ATT9: all of them, though the first write fails, before its effect or after it."""
    async with duplex_world() as w:
        peer = await w.connected(kind)
        sessions = [(await peer.start())["sessionId"] for _ in range(3)]
        failed = fails(w.layer.store, "detach", after=False, times=2)
        later = fails(w.layer.store, "detach", after=True, times=1)
        await gone(w, peer)

        async def detached() -> bool:
            return not any([await attachment(w, session) for session in sessions])

        await until(detached)
        assert (len(failed), len(later)) == (2, 1)
        # Who comes back receives it again.
        again = await w.connected(kind)
        assert (await again.resume(sessions[0]))["resumed"]


@KINDS
async def test_calls_are_without_a_listener_at_once_whatever_the_store_does(kind: str) -> None:
    """REQ8: their time begins when their connection ends."""
    async with duplex_world(detached_timeout=0.2) as w:
        peer = await w.connected(kind)
        await peer.start()
        await peer.call("wait", gate="g")
        await w.inner.box.gate("g").started.wait()
        fails(w.layer.store, "detach", after=False, times=1_000_000)
        await gone(w, peer)
        runner = w.inside.runner

        async def given_up() -> bool:
            return runner.running == 0

        assert not await given_up()
        await until(given_up)


@pytest.mark.parametrize("after", [True, False], ids=["after its effect", "before"])
async def test_a_session_whose_resume_was_cut_off_is_not_left_attached(after: bool) -> None:
    """Its connection ended while the store was asked: nobody receives the session there."""
    async with duplex_world() as w:
        owner = await w.connected()
        session = (await owner.start())["sessionId"]
        await gone(w, owner)
        slow = w.inner.box.gate("slow")
        attach = w.layer.store.attach

        async def slowly(*args: Any, **named: Any) -> Any:
            if after:
                await attach(*args, **named)
            await slow.arrive()
            return await attach(*args, **named) if not after else None

        w.layer.store.attach = slowly
        peer = await w.connected()
        await peer.send("session/resume", {"sessionId": session})
        await at_most(10, slow.started.wait())
        # As its credential may end, or its patience with who takes nothing.
        (connection,) = w.inside.connections.all()
        cast(Any, connection.transport).outbox.cut()
        await at_most(10, cast(Any, connection.transport).closed.wait())
        slow.go.set()

        async def detached() -> bool:
            return await attachment(w, session) is None

        await until(detached)
        assert w.inside.connections.all() == []


@KINDS
async def test_a_repeat_of_what_ran_is_not_said_not_to_have_begun(kind: str) -> None:
    """ERR17: its outcome is known here, and the store does not take it."""
    async with duplex_world() as w:
        peer = await w.connected(kind)
        session = (await peer.start())["sessionId"]
        failed = fails(w.layer.store, "finish_request", after=False, times=1_000_000)
        params = call_params("echo", {"text": "x"}, keyed("k", session))
        assert text_of(await peer.result("tools/call", params)) == "x"
        error = await peer.error("tools/call", params)
        assert error["code"] == -31012 and error["data"] == {"reason": "store_unavailable"}
        failed.extend(["enough"] * 1_000_000)
        assert text_of(await peer.result("tools/call", params)) == "x"
        assert w.inner.box.calls == ["echo"]


@KINDS
@pytest.mark.parametrize("after", [False, True], ids=["before", "after its effect"])
@pytest.mark.parametrize("key", [None, "k"])
async def test_what_the_store_refused_before_it_began_says_so(
    kind: str, after: bool, key: str | None
) -> None:
    """ERR17: it may be sent again, also under its key, and runs once."""
    async with duplex_world() as w:
        peer = await w.connected(kind)
        session = (await peer.start())["sessionId"]
        fails(w.layer.store, "admit", after=after)
        meta = keyed(key, session) if key is not None else in_session(session)
        params = call_params("echo", {"text": "x"}, meta)
        error = await peer.error("tools/call", params)
        assert error["code"] == -32603
        assert error["data"] == {"reason": "store_unavailable", "started": False}
        assert w.inner.box.calls == []
        assert text_of(await peer.result("tools/call", params)) == "x"
        assert w.inner.box.calls == ["echo"]


@KINDS
@pytest.mark.parametrize("after", [False, True], ids=["before", "after its effect"])
@pytest.mark.parametrize(
    ("method", "step"),
    [
        ("session/start", "create"),
        ("session/resume", "attach"),
        ("session/end", "end"),
        ("resources/subscribe", "subscribe"),
    ],
)
async def test_of_what_may_have_begun_the_outcome_is_unknown(
    kind: str, after: bool, method: str, step: str
) -> None:
    """ERR17: the layer serves it itself, and the store failed before its effect or after it."""
    async with duplex_world() as w:
        peer = await w.connected(kind)
        session = (await peer.start())["sessionId"]
        assert fails(w.layer.store, step, after=after) == []
        params: dict[str, Any] = {"sessionId": session} if "/start" not in method else {}
        error = await peer.error(method, {"uri": "note:1"} if "/sub" in method else params)
        assert (error["code"], error["data"]) == (-31012, {"reason": "store_unavailable"})


class FailsToClose:
    """An `UpstreamPeer` of a server that fails at the end of a client."""

    async def close(self) -> None:
        raise RuntimeError("on the way out")


@pytest.mark.fails_in_background("the end of a client's connection in the wrapped server")
async def test_a_failing_wrapped_server_keeps_no_connection_in_the_process() -> None:
    """Its handling of a client's end delays nobody else."""
    async with duplex_world() as w:
        peer = await w.connected()
        session = (await peer.start())["sessionId"]
        assert text_of(
            await peer.result("tools/call", {"name": "echo", "arguments": {"text": "x"}})
        )
        registry = w.inside.connections
        upstream_peers = registry.all()[0].upstream_peers
        for session_id in upstream_peers:
            upstream_peers[session_id] = cast(Any, FailsToClose())
        await gone(w, peer)

        async def detached() -> bool:
            return await attachment(w, session) is None

        await until(detached)
