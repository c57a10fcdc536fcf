"""Requests that must not run twice: ``_meta["io.github.mcp-sessions/requestKey"]`` on the wire."""

import asyncio

import pytest

from tests.support.raw import (
    KEY,
    SESSION,
    Json,
    RawClient,
    Sent,
    call_params,
    in_session,
    keyed,
    text_of,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World, world

pytestmark = pytest.mark.anyio

ASKS: Json = {"elicitation": {}}


async def session_of(w: World) -> tuple[RawClient, str]:
    """A client after its handshake, with a current session."""
    client = await w.connected()
    return client, (await client.start())["sessionId"]


async def waiting(w: World, client: RawClient) -> Sent:
    """A call with key ``k`` that waits at gate ``g``."""
    sent = client.call("wait", gate="g", meta=keyed("k"))
    await w.box.gate("g").started.wait()
    return sent


# --- the same key again ---------------------------------------------------------------------


async def test_the_same_key_after_the_answer_gets_the_answer() -> None:
    """Rule: "The same key again … never runs it again: it gets the one answer", under its own id,
    by rule 1 or 2, on any connection, as often as asked.
    """
    async with world() as w:
        client, session = await session_of(w)
        first = await client.call("echo", text="x", meta=keyed("k")).result()

        again = await client.call("echo", text="x", meta=keyed("k")).result()
        lone = w.client().call("echo", text="x", meta=keyed("k", session))
        named = await lone.result()

        assert again == first
        assert lone.id == 0
        assert named.pop("_meta")[SESSION]["sessionId"] == session
        assert named == first
        assert w.box.calls == ["echo"]


async def test_an_error_is_an_answer_too() -> None:
    """KEY3: what failed once failed; the key does not make it run again."""
    async with world() as w:
        client, session = await session_of(w)

        async def fail(ctx: Ctx, arguments: Json) -> str:
            raise RuntimeError("no")

        w.box.tools["fail"] = fail
        errors = [await client.call("fail", meta=keyed("k")).error() for _ in range(2)]
        named = await w.client().call("fail", meta=keyed("k", session)).answer()

        assert errors[0] == errors[1] == named["error"]
        assert w.box.calls == ["fail"]


async def test_the_same_key_while_it_runs_waits_for_the_one_answer() -> None:
    """Rule: "now or when it is done"; every sender gets it, whose stream was cut or not."""
    async with world() as w:
        client, session = await session_of(w)
        first = await waiting(w, client)
        other = await w.connected()
        again = [
            client.call("wait", gate="g", meta=keyed("k")),
            other.call("wait", gate="g", meta=keyed("k", session)),
            w.client().call("wait", gate="g", meta=keyed("k", session)),
        ]
        await cycles()
        w.box.gate("g").go.set()

        for sent in (first, *again):
            assert text_of(await sent.result()) == "through g"
        assert w.box.calls == ["wait"]


async def test_many_senders_at_once_run_it_once() -> None:
    """Recorded "**before** the handler starts": no moment is left in between."""
    async with world() as w:
        session = (await w.client().start())["sessionId"]

        sent = [w.client().call("echo", text="x", meta=keyed("k", session)) for _ in range(50)]

        assert [text_of(await one.result()) for one in sent] == ["x"] * 50
        assert w.box.calls == ["echo"]


async def test_after_a_reconnect_a_client_resumes_and_sends_again() -> None:
    """Rule: "So after a reconnect our client resumes, then simply re-sends what it still waits
    for": new handshake, ids from 0, and the call ran once.
    """
    async with world() as w:
        old, session = await session_of(w)
        first = await waiting(w, old)
        first.reply.leave()
        await first.reply.done()
        w.box.gate("g").go.set()
        await cycles()
        new = await w.connected()
        await new.resume(session)

        again = new.call("wait", gate="g", meta=keyed("k"))

        assert text_of(await again.result()) == "through g"
        assert w.box.calls == ["wait"]


@pytest.mark.parametrize(
    "other",
    [
        ("tools/call", call_params("wait", {"gate": "other"})),
        ("tools/call", call_params("echo", {"gate": "g"})),
        ("tools/list", call_params("wait", {"gate": "g"})),
        ("tools/call", {**call_params("wait", {"gate": "g"}), "x": None}),
    ],
    ids=["other arguments", "other tool", "other method", "another member"],
)
async def test_the_same_key_with_other_content_is_refused(other: tuple[str, Json]) -> None:
    """Rule: "Same key, other content: ``-32600`` ``key_reused``", running or done."""
    async with world() as w:
        client, _ = await session_of(w)
        first = await waiting(w, client)
        method, params = other
        for _ in range(2):
            error = await client.error(method, {**params, "_meta": keyed("k")})
            assert (error["code"], error["data"]) == (-32600, {"reason": "key_reused"})
            w.box.gate("g").go.set()
            await first.result()
        assert w.box.calls == ["wait"]


async def test_other_metadata_is_the_same_content() -> None:
    """The digest is of "the method and … its params": progress token and the way the session
    is named differ when a request is sent again.
    """
    async with world() as w:
        client, session = await session_of(w)
        await client.call("echo", text="x", meta=keyed("k", progressToken=1)).result()
        await client.call("echo", text="x", meta=keyed("k", session, progressToken=2)).result()
        reordered = {"_meta": keyed("k"), "arguments": {"text": "x"}, "name": "echo"}
        await client.result("tools/call", reordered)

        assert w.box.calls == ["echo"]


async def test_two_sessions_share_no_keys() -> None:
    """SEC7: "recorded in the store" with its session."""
    async with world() as w:
        client, first = await session_of(w)
        second = (await client.start())["sessionId"]
        for session in (first, second):
            await client.call("echo", text=session, meta=keyed("k", session)).result()

        assert w.box.calls == ["echo", "echo"]


# --- what is forgotten, and what is not -----------------------------------------------------


async def test_an_answer_that_was_dropped_is_unknown() -> None:
    """Rule: "its answer dropped: ``-31012``": the key is known, and nothing runs (KEY3)."""
    async with world(request_key_bytes=1_000) as w:
        client, _ = await session_of(w)
        await client.call("echo", text="a" * 600, meta=keyed("1")).result()
        await client.call("echo", text="b" * 600, meta=keyed("2")).result()

        error = await client.call("echo", text="a" * 600, meta=keyed("1")).error()
        kept = await client.call("echo", text="b" * 600, meta=keyed("2")).result()

        assert (error["code"], error["message"]) == (-31012, "Outcome unknown")
        assert text_of(kept) == "b" * 600
        assert w.box.calls == ["echo", "echo"]


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


async def test_a_key_is_forgotten_after_its_time() -> None:
    """Rule: "live a bounded time … which the server advertises; a client never re-sends an older
    key".
    """
    async with world(request_key_lifetime=60, idle_timeout=1_000) as w:
        client, _ = await session_of(w)
        await client.call("echo", text="x", meta=keyed("k")).result()
        w.clock.advance(59)
        await client.call("echo", text="x", meta=keyed("k")).result()
        assert w.box.calls == ["echo"]
        w.clock.advance(2)
        await client.call("echo", text="x", meta=keyed("k")).result()
        assert w.box.calls == ["echo", "echo"]


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
        first.reply.leave()
        await first.reply.done()
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
        first.reply.leave()
        await first.reply.done()
        await asyncio.sleep(59)
        again = w.client().call("wait", gate="g", meta=keyed("k", session))
        await asyncio.sleep(600)
        w.box.gate("g").go.set()

        assert text_of(await again.result()) == "through g"


async def test_without_a_key_nothing_is_remembered() -> None:
    """Rule: "Without a key nothing is ever sent again on its own": the same content runs again."""
    async with world() as w:
        client, _ = await session_of(w)
        for _ in range(2):
            await client.text("echo", text="x")
        assert w.box.calls == ["echo", "echo"]


# --- where a key counts ----------------------------------------------------------------------


async def test_a_key_without_a_session_is_ignored() -> None:
    """Rule: "A key on a request that belongs to no session is ignored"."""
    async with world() as w:
        client = await w.connected()
        for number in range(2):
            text = f"x{number}"
            assert await client.text("echo", text=text, meta=keyed("k")) == text
        assert w.box.calls == ["echo", "echo"]


async def test_a_null_session_is_no_session() -> None:
    """Rule 2's ``null``: none for this request, so no key either."""
    async with world() as w:
        client, _ = await session_of(w)
        for _ in range(2):
            await client.text("echo", text="x", meta={**in_session(None), KEY: "k"})
        assert w.box.calls == ["echo", "echo"]


@pytest.mark.parametrize("key", [None, 7, "", [], {}, "x" * 257], ids=repr)
async def test_a_malformed_key_is_invalid_params(key: object) -> None:
    """Rule: "malformed params or metadata": it must not run as if it had none."""
    async with world() as w:
        client, _ = await session_of(w)
        error = await client.error("tools/call", call_params("echo", {"text": "x"}, {KEY: key}))

        assert error["code"] == -32602
        assert w.box.calls == []


async def test_a_refused_request_records_no_key() -> None:
    """Displaced: ``-31010``, and the key is as new as before."""
    async with world() as w:
        old, session = await session_of(w)
        new = await w.connected()
        await new.resume(session)

        error = await old.call("echo", text="x", meta=keyed("k")).error()
        assert error["code"] == -31010
        assert text_of(await new.call("echo", text="x", meta=keyed("k")).result()) == "x"
        assert w.box.calls == ["echo"]


# --- progress, questions, cancellation ------------------------------------------------------


async def test_progress_goes_to_the_newest_sending() -> None:
    """Rule: "and from then on its progress and server-to-client requests", under its own token."""
    async with world() as w:
        client, _ = await session_of(w)
        first = client.call("progress", steps=3, gate="g", meta=keyed("k", progressToken="old"))
        await first.reply.has(1)
        second = client.call("progress", steps=3, gate="g", meta=keyed("k", progressToken="new"))
        await cycles()
        w.box.gate("g").go.set()
        await first.result()
        await second.result()

        def tokens(sent: Sent) -> list[tuple[str, int]]:
            params = [m["params"] for m in sent.reply.messages if "method" in m]
            return [(p["progressToken"], p["progress"]) for p in params]

        assert tokens(first) == [("old", 1)]
        # KEY21: what was reported before comes there, too.
        assert tokens(second) == [("new", 1), ("new", 2), ("new", 3)]


async def test_a_newest_sending_without_a_token_gets_no_progress() -> None:
    """Progress is for who asked for it."""
    async with world() as w:
        client, _ = await session_of(w)
        first = client.call("progress", steps=3, gate="g", meta=keyed("k", progressToken=1))
        await first.reply.has(1)
        second = client.call("progress", steps=3, gate="g", meta=keyed("k"))
        await cycles()
        w.box.gate("g").go.set()

        await second.result()
        assert len(second.reply.messages) == 1


async def test_an_open_question_goes_to_the_newest_sending() -> None:
    """ASK2: "kept when sent again": the same id, so that either answer counts."""
    async with world() as w:
        old = await w.connected(capabilities=ASKS)
        session = (await old.start())["sessionId"]
        first = old.call("ask", question="?", meta=keyed("k"))
        question = (await first.reply.has(1))[0]
        first.reply.leave()
        await first.reply.done()
        new = await w.connected(capabilities=ASKS)
        await new.resume(session)

        second = new.call("ask", question="?", meta=keyed("k"))
        again = (await second.reply.has(1))[0]
        await new.respond(again, {"action": "accept", "content": {"answer": "1"}})

        assert again == question
        assert text_of(await second.result()) == "accept: 1"


async def test_an_open_question_does_not_go_to_who_cannot_answer() -> None:
    """Rule: "They go only to a handshake-era peer that declared the capability": not to a lone POST
    and not to a client without it; the first sender may still answer.
    """
    async with world() as w:
        old = await w.connected(capabilities=ASKS)
        session = (await old.start())["sessionId"]
        first = old.call("ask", question="?", meta=keyed("k"))
        question = (await first.reply.has(1))[0]
        mute = await w.connected()
        others = [
            sender.call("ask", question="?", meta=keyed("k", session))
            for sender in (mute, w.client())
        ]
        await cycles()
        await old.respond(question, {"action": "accept", "content": {"answer": "1"}})

        for sent in (first, *others):
            assert text_of(await sent.result()) == "accept: 1"
        for sent in others:
            assert len(sent.reply.messages) == 1


@pytest.mark.parametrize("where", ["connection", "other connection", "lone post"])
async def test_a_keyed_request_is_cancelled_by_session_and_key(where: str) -> None:
    """Rule: "whose ``params._meta`` carries session and key (``requestId`` is then ignored)"; every
    sender is answered, and the key stays.
    """
    async with world() as w:
        client, session = await session_of(w)
        first = await waiting(w, client)
        second = client.call("wait", gate="g", meta=keyed("k"))
        bystander = client.call("wait", gate="h")
        await w.box.gate("h").started.wait()
        senders = {
            "connection": client,
            "other connection": await w.connected(),
            "lone post": w.client(),
        }

        await senders[where].notify(
            "notifications/cancelled", {"requestId": bystander.id, "_meta": keyed("k", session)}
        )

        for sent in (first, second):
            assert (await sent.error())["code"] == -32800
        await w.box.gate("g").cancelled.wait()
        assert not w.box.gate("h").cancelled.is_set()
        again = await client.call("wait", gate="g", meta=keyed("k")).error()
        assert again["code"] == -32800
        assert w.box.gate("g").arrivals == 1


async def test_a_keyed_request_is_cancelled_by_id_too() -> None:
    """Rule: "An explicit cancel always wins": by the id of any of its sendings."""
    async with world() as w:
        client, _ = await session_of(w)
        first = await waiting(w, client)
        second = client.call("wait", gate="g", meta=keyed("k"))
        await cycles()

        await client.notify("notifications/cancelled", {"requestId": first.id})

        for sent in (first, second):
            assert (await sent.error())["code"] == -32800
