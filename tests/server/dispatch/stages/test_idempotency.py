"""Requests that must not run twice: ``_meta["io.github.mcp-sessions/requestKey"]`` on the wire.

What holds in both eras is in `tests/modern/test_request_keys.py`.
"""

import asyncio

import pytest

from tests.support.raw import (
    KEY,
    Json,
    RawClient,
    Sent,
    in_session,
    keyed,
    text_of,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world

ASKS: Json = {"elicitation": {}}


async def session_of(w: World) -> tuple[RawClient, str]:
    """A client after its handshake, with a current session."""
    client = await w.connected()
    return client, (await client.start())["sessionId"]


async def waiting(w: World, client: RawClient) -> Sent:
    """A call with key ``k`` that waits at gate ``g``."""
    sent = await w.waits(client.call("wait", gate="g", meta=keyed("k")))
    return sent


# --- the same key again ---------------------------------------------------------------------


async def test_an_error_is_an_answer_too(w: World) -> None:
    """KEY3: what failed once failed; the key does not make it run again."""
    client, session = await session_of(w)

    async def fail(ctx: Ctx, arguments: Json) -> str:
        raise RuntimeError("no")

    w.box.tools["fail"] = fail
    errors = [await client.call("fail", meta=keyed("k")).error() for _ in range(2)]
    named = await w.client().call("fail", meta=keyed("k", session)).answer()

    assert errors[0] == errors[1] == named["error"]
    assert w.box.calls == ["fail"]


async def test_after_a_reconnect_a_client_resumes_and_sends_again(w: World) -> None:
    """Rule: "So after a reconnect our client resumes, then simply re-sends what it still waits
    for": new handshake, ids from 0, and the call ran once.
    """
    old, session = await session_of(w)
    first = await waiting(w, old)
    await first.reply.gone()
    w.box.gate("g").go.set()
    await cycles()
    new = await w.connected()
    await new.resume(session)

    again = new.call("wait", gate="g", meta=keyed("k"))

    assert text_of(await again.result()) == "through g"
    assert w.box.calls == ["wait"]


# --- what is forgotten, and what is not -----------------------------------------------------


async def test_an_answer_too_large_to_keep_is_given_once() -> None:
    """Who waits for it gets it; who asks later learns that it is unknown."""
    async with world(request_key_bytes=1_000) as w:
        client, _ = await session_of(w)
        sent = client.call("echo", text="a" * 5_000, meta=keyed("k"))
        assert text_of(await sent.result()) == "a" * 5_000

        error = await client.call("echo", text="a" * 5_000, meta=keyed("k")).error()

        assert error["code"] == -31012
        assert w.box.calls == ["echo"]


async def test_when_the_keys_themselves_fill_the_space_new_ones_are_refused() -> None:
    """Rule: "Keys and answers live a bounded time and number of bytes": ``-31011``, and a known key
    is never run again to make room.
    """
    async with world(request_key_bytes=1_000) as w:
        client, _ = await session_of(w)
        refused = None
        for number in range(30):
            answer = await client.call("echo", text="x", meta=keyed(f"key {number}")).answer()
            if "error" in answer:
                refused = answer["error"]
                break

        assert refused is not None
        assert (refused["code"], refused["data"]["limit"]) == (-31011, "request_key_bytes")
        ran = len(w.box.calls)
        error = await client.call("echo", text="x", meta=keyed("key 0")).error()
        assert error["code"] == -31012
        assert len(w.box.calls) == ran
        assert await client.text("echo", text="without a key") == "without a key"


async def test_a_running_key_is_not_forgotten() -> None:
    """However long it runs: it would run twice."""
    async with world(request_key_lifetime=60, idle_timeout=1_000) as w:
        client, _ = await session_of(w)
        first = await waiting(w, client)
        w.clock.advance(100)
        again = client.call("wait", gate="g", meta=keyed("k"))
        await cycles()
        w.box.gate("g").go.set()

        assert text_of(await again.result()) == text_of(await first.result())
        assert w.box.calls == ["wait"]


async def test_what_was_given_up_is_unknown() -> None:
    """Rule: "Its runner gone … ``-31012``": without a listener for too long, it was cancelled and
    answered.
    """
    async with world(detached_timeout=60) as w:
        client, _ = await session_of(w)
        first = await waiting(w, client)
        await first.reply.started()
        await first.reply.gone()
        await asyncio.sleep(61)
        assert w.box.gate("g").cancelled.is_set()

        error = await client.call("wait", gate="g", meta=keyed("k")).error()

        assert error["code"] == -31012
        assert w.box.calls == ["wait"]


async def test_what_was_sent_again_gets_a_listener_again() -> None:
    """REQ8: the bound on without a listener work counts from when nobody listened, and somebody
    does.
    """
    async with world(detached_timeout=60) as w:
        client, session = await session_of(w)
        first = await waiting(w, client)
        await first.reply.started()
        await first.reply.gone()
        await asyncio.sleep(59)
        again = w.client().call("wait", gate="g", meta=keyed("k", session))
        await asyncio.sleep(600)
        w.box.gate("g").go.set()

        assert text_of(await again.result()) == "through g"


@pytest.mark.parametrize(
    ("starts", "meta"),
    [(True, None), (False, keyed("k")), (True, {**in_session(None), KEY: "k"})],
    ids=["no key", "no session", "a null session"],
)
async def test_without_a_key_and_a_session_nothing_is_remembered(
    starts: bool, meta: Json | None, w: World, client: RawClient
) -> None:
    """Rule: "Without a key nothing is ever sent again on its own", and "A key on a request that
    belongs to no session is ignored": the same content runs again.
    """
    if starts:
        await client.start()
    for _ in range(2):
        assert await client.text("echo", text="x", meta=meta) == "x"
    assert w.box.calls == ["echo", "echo"]


# --- where a key counts ----------------------------------------------------------------------


async def test_a_refused_request_records_no_key(w: World) -> None:
    """Displaced: ``-31010``, and the key is as new as before."""
    old, session = await session_of(w)
    new = await w.connected()
    await new.resume(session)

    error = await old.call("echo", text="x", meta=keyed("k")).error()
    assert error["code"] == -31010
    assert text_of(await new.call("echo", text="x", meta=keyed("k")).result()) == "x"
    assert w.box.calls == ["echo"]


# --- progress, questions, cancellation ------------------------------------------------------


async def test_a_newest_sending_without_a_token_gets_no_progress(w: World) -> None:
    """Progress is for who asked for it."""
    client, _ = await session_of(w)
    first = client.call("progress", steps=3, gate="g", meta=keyed("k", progressToken=1))
    await first.reply.has(1)
    second = client.call("progress", steps=3, gate="g", meta=keyed("k"))
    await cycles()
    w.box.gate("g").go.set()

    await second.result()
    assert len(second.reply.messages) == 1


async def test_an_open_question_goes_to_the_newest_sending(w: World) -> None:
    """ASK2: "kept when sent again": the same id, so that either answer counts."""
    old = await w.connected(capabilities=ASKS)
    session = (await old.start())["sessionId"]
    first = old.call("ask", question="?", meta=keyed("k"))
    question = (await first.reply.has(1))[0]
    await first.reply.gone()
    new = await w.connected(capabilities=ASKS)
    await new.resume(session)

    second = new.call("ask", question="?", meta=keyed("k"))
    again = (await second.reply.has(1))[0]
    await new.respond(again, {"action": "accept", "content": {"answer": "1"}})

    assert again == question
    assert text_of(await second.result()) == "accept: 1"
    assert w.box.calls == ["ask"]


async def test_an_open_question_does_not_go_to_who_cannot_answer(w: World) -> None:
    """Rule: "They go only to a handshake-era peer that declared the capability": not to a lone POST
    and not to a client without it; the first sender may still answer.
    """
    old = await w.connected(capabilities=ASKS)
    session = (await old.start())["sessionId"]
    first = old.call("ask", question="?", meta=keyed("k"))
    question = (await first.reply.has(1))[0]
    mute = await w.connected()
    others = [
        sender.call("ask", question="?", meta=keyed("k", session)) for sender in (mute, w.client())
    ]
    await cycles()
    await old.respond(question, {"action": "accept", "content": {"answer": "1"}})

    for sent in (first, *others):
        assert text_of(await sent.result()) == "accept: 1"
    for sent in others:
        assert len(sent.reply.messages) == 1


async def test_a_keyed_request_is_cancelled_by_id_too(w: World) -> None:
    """Rule: "An explicit cancel always wins": by the id of any of its sendings."""
    client, _ = await session_of(w)
    first = await waiting(w, client)
    second = client.call("wait", gate="g", meta=keyed("k"))
    await cycles()

    await client.notify("notifications/cancelled", {"requestId": first.id})

    for sent in (first, second):
        assert (await sent.error())["code"] == -32800
