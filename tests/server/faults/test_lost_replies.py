"""The store's reply is lost, or it fails half way: what the caller receives, now and when it asks
again under the same key (KEY3, KEY11).
"""

from collections.abc import Callable
from typing import Any

import pytest

from mcp_sessions import current_session
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.memory import MemoryStore
from tests.stores.every_store import sqlite_store
from tests.support.failing_calls import fails, is_keyed
from tests.support.raw import Json, RawClient, at_most, in_session, keyed, text_of
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world


async def session_of(w: World) -> tuple[RawClient, str]:
    """A client after its handshake, with a current session."""
    client = await w.connected()
    return client, (await client.start())["sessionId"]


async def _remembers(ctx: Ctx, arguments: Json) -> str:
    current_session().state["n"] = arguments["n"]
    return "remembered"


# --- the outcome is unknown ------------------------------------------------------------------


@pytest.mark.parametrize("after", [True, False], ids=["after its effect", "before"])
@pytest.mark.parametrize("meta", [keyed("k"), None], ids=["keyed", "without a key"])
async def test_a_call_whose_state_may_not_be_stored_has_an_unknown_outcome(
    after: bool, meta: Json | None, w: World
) -> None:
    """KEY11: it began, and whether its state is written nobody knows: ``-31012``, not "Internal
    error", now and under its key.
    """
    w.box.tools["remember"] = _remembers
    client, _ = await session_of(w)
    failed = fails(w.layer.store, "change_state", after=after)

    error = await client.call("remember", n=1, meta=meta).error()

    assert failed and error["code"] == -31012
    if meta is not None:
        again = await client.call("remember", n=1, meta=meta).error()
        assert again["code"] == -31012
        assert w.box.calls == ["remember"]


async def test_every_sender_is_answered_though_a_response_stream_cannot_be_put_away(
    w: World,
) -> None:
    """KEY5: the answer is due to each, whatever becomes of another's stream."""
    client, session = await session_of(w)
    await w.waits(client.call("wait", gate="g", meta=keyed("k", progressToken="t")))
    again = w.client().call("wait", gate="g", meta=keyed("k", session))
    await cycles()
    answered = sent_channel_fails(w)
    w.box.gate("g").go.set()

    assert text_of(await again.result()) == "through g"
    assert answered


def sent_channel_fails(w: World) -> list[str]:
    """The first carrier's channel fails when it has sent the answer."""
    running = next(iter(w.inside.runner.active))
    return fails(running.waiters[0].inbound.channel, "answer", after=True)


# --- what never began ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MemoryStore, sqlite_store])
async def test_a_call_refused_because_its_admissions_reply_was_lost_runs_when_sent_again(
    make: Callable[[], SessionStore],
) -> None:
    """KEY3 and KEY11 speak of a request that began; this one never did. Sent again, it runs
    once.
    """
    async with world(store=make()) as w:
        client, session = await session_of(w)
        lost = fails(w.layer.store, "admit", after=True, when=is_keyed)

        refused = await client.call("echo", text="x", meta=keyed("k", session)).reply.done()
        answers = [await client.call("echo", text="x", meta=keyed("k")).result() for _ in range(2)]

        assert lost and refused.status == 503
        assert [text_of(answer) for answer in answers] == ["x", "x"]
        assert w.box.calls == ["echo"]


async def test_a_call_whose_admission_is_lost_again_and_again_runs_once_in_the_end(
    w: World,
) -> None:
    """Each sending is a run of its own, and none but the last began."""
    client, session = await session_of(w)
    for after in (True, False, True, True):
        fails(w.layer.store, "admit", after=after, when=is_keyed)
        refused = await client.call("echo", text="x", meta=keyed("k", session)).reply.done()
        assert refused.status == 503

    sent = [client.call("echo", text="x", meta=keyed("k", session)) for _ in range(5)]

    assert [text_of(await one.result()) for one in sent] == ["x"] * 5
    assert w.box.calls == ["echo"]


async def test_a_call_that_failed_between_admission_and_start_runs_when_sent_again(
    w: World,
) -> None:
    """Its session could not be attached in passing: the key is recorded, and nothing ran."""
    session = (await w.client().start())["sessionId"]
    client = await w.connected()
    failed = fails(w.layer.store, "attach", after=False)

    refused = await client.call("echo", text="x", meta=keyed("k", session)).reply.done()
    again = await client.call("echo", text="x", meta=keyed("k", session)).result()

    assert failed and refused.status == 503
    assert text_of(again) == "x"
    assert w.box.calls == ["echo"]


@pytest.mark.parametrize("after", [True, False], ids=["after its effect", "before"])
async def test_what_ran_and_could_not_be_kept_never_runs_again(after: bool, w: World) -> None:
    """KEY3: here it began. As long as the store does not take its answer, the client asks again
    later. When the store is back, the answer is stored at once (KEY4).
    """
    client, session = await session_of(w)
    failed = fails(w.layer.store, "finish_request", after=after, times=3)
    first = await client.call("echo", text="x", meta=keyed("k", session)).result()
    soon = await client.call("echo", text="x", meta=keyed("k", session)).reply.done()
    again = await client.call("echo", text="x", meta=keyed("k", session)).result()

    assert text_of(first) == text_of(again) == "x"
    if not after:
        assert (soon.status, len(failed)) == (503, 3)
    assert w.box.calls == ["echo"]


async def test_a_key_that_is_being_admitted_holds_nobody_elses_up(w: World) -> None:
    """A key belongs to its session: who waits for its admission is who sent it there again."""
    client, session = await session_of(w)
    other, others = await session_of(w)
    slow = w.box.gate("slow")
    admit = w.layer.store.admit

    async def slowly(session_id: SessionId, *args: Any, **named: Any) -> Any:
        if session_id == session and is_keyed(named):
            await slow.arrive()
        return await admit(session_id, *args, **named)

    w.layer.store.admit = slowly
    first = client.call("echo", text="first", meta=keyed("k", session))
    await slow.started.wait()

    second = await at_most(1, other.call("echo", text="x", meta=keyed("k", others)).result())
    slow.go.set()

    assert text_of(second) == "x"
    assert text_of(await first.result()) == "first"


async def test_a_session_that_has_ended_ends_what_is_running_for_it_though_a_write_fails(
    w: World,
) -> None:
    """END2: nobody can end it again, so what is left of it ends when the store is back."""
    client, session = await session_of(w)
    await client.get().started()
    running = await w.waits(client.call("wait", gate="g"))
    failed = fails(w.layer.store, "drop_origin", after=False, times=3)

    await client.end(session)

    assert (await at_most(60, running.error()))["code"] == -32043
    assert failed


@pytest.mark.parametrize("named", [False, True], ids=["current session", "named"])
async def test_who_asks_as_the_request_ends_is_answered(named: bool, w: World) -> None:
    """KEY4 and KEY5: the store says that it runs, and when its reply is here it does no more."""
    client, session = await session_of(w)
    first = await w.waits(client.call("wait", gate="g", meta=keyed("k")))
    late, again = w.box.gate("late"), w.client() if named else client
    admit = w.layer.store.admit

    async def slowly(*args: Any, **arguments: Any) -> Any:
        admitted = await admit(*args, **arguments)
        if is_keyed(arguments) and not late.arrivals:
            await late.arrive()
        return admitted

    w.layer.store.admit = slowly
    second = again.call("wait", gate="g", meta=keyed("k", session) if named else keyed("k"))
    await late.started.wait()
    w.box.gate("g").go.set()
    await first.result()
    late.go.set()

    assert text_of(await at_most(10, second.result())) == "through g"
    assert w.box.calls == ["wait"]


async def test_what_runs_for_one_connection_or_session_is_bounded() -> None:
    """ERR6: over HTTP, too; refused before it has any effect, its key is not even recorded."""
    async with world(max_running_requests=3) as w:
        client, session = await session_of(w)
        lone = w.client()
        for key, owner, meta in (("a", client, {}), ("b", lone, in_session(session))):
            sent = [owner.call("wait", gate="g", meta=meta) for _ in range(3)]
            await cycles(50)
            error = await owner.call("echo", text="x", meta={**meta, **keyed(key)}).error()
            assert (error["code"], error["data"]["limit"]) == (-31011, "max_running_requests")
            if owner is client:
                # Another's load is another's; and what ends a session is never too much.
                assert (
                    text_of(await lone.call("echo", text="x", meta=in_session(session)).result())
                    == "x"
                )
                assert await client.start()
                await client.resume(session)
            w.box.gate("g").go.set()
            for one in sent:
                await one.result()
            w.box.gate("g").go.clear()
            kept = await owner.call("echo", text="x", meta={**meta, **keyed(key)}).result()
            assert text_of(kept) == "x"
        assert not len(w.inside.runner.calls.load)


async def test_a_key_sent_again_and_again_counts_each_time() -> None:
    """Each waits for the answer, and holds what it needs for that."""
    async with world(max_running_requests=3) as w:
        client, _ = await session_of(w)
        sent = [client.call("wait", gate="g", meta=keyed("k")) for _ in range(3)]
        await cycles(50)
        error = await client.call("wait", gate="g", meta=keyed("k")).error()
        assert error["code"] == -31011
        w.box.gate("g").go.set()
        for one in sent:
            assert text_of(await one.result()) == "through g"
        assert not len(w.inside.runner.calls.load)
        assert w.box.calls == ["wait"]
