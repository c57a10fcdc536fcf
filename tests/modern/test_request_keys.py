"""Requests that outlive their stream: those with a key, and no others."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcp_sessions.server.requests.reports import Reports
from tests.modern.test_sessions import not_found
from tests.modern.test_state import called
from tests.support.interposed import Interposed
from tests.support.modern import ModernClient, Received, session_meta
from tests.support.raw import (
    KEY,
    SESSION,
    Json,
    RawClient,
    Reply,
    Sent,
    call_params,
    keyed,
    text_of,
)
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, Gate, Toolbox, World, world

ERAS = ["handshake", "lone", "modern"]
"""The way of a request: on a transport-mode session, on a lone POST, in the modern era."""


class Sender:
    """One client of each era, that sends keyed calls."""

    def __init__(self, client: RawClient | ModernClient) -> None:
        self.client = client

    def call(self, tool: str, session: str, key: str | None, **arguments: Any) -> Sent | Received:
        return called(self.client, tool, session_meta(session, key=key), **arguments)

    async def text(self, tool: str, session: str, key: str | None, **arguments: Any) -> str:
        return text_of(await self.call(tool, session, key, **arguments).result())


async def gone(call: Sent | Received) -> None:
    """Its client goes away, and the server noticed."""
    await call.reply.gone()
    await cycles()


async def sender(w: World, era: str) -> Sender:
    match era:
        case "handshake":
            return Sender(await w.connected())
        case "lone":
            return Sender(w.client())
        case _:
            return Sender(ModernClient(w.carrier))


@asynccontextmanager
async def started(**options: Any) -> AsyncGenerator[tuple[World, ModernClient, str]]:
    async with world(**options) as w:
        client = ModernClient(w.carrier)
        yield w, client, (await client.start())["sessionId"]


# --- without a key -------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_session", [False, True])
async def test_without_a_key_a_broken_stream_cancels(
    in_a_session: bool, w: World, client: ModernClient, session: str
) -> None:
    """REQ5: "Plain 2026-07-28 HTTP still cancels on disconnect"."""
    call = await w.waits(
        client.call("wait", {"gate": "g"}, session=session if in_a_session else None)
    )
    call.leave()
    await w.box.gate("g").cancelled.wait()

    assert w.box.calls == ["wait"]


async def test_without_a_session_a_key_is_ignored(w: World, client: ModernClient) -> None:
    """Rule: "A key on a request that belongs to no session is ignored"."""
    call = await w.waits(client.call("wait", {"gate": "g"}, key="k"))
    call.leave()
    await w.box.gate("g").cancelled.wait()
    assert await client.text("echo", {"text": "x"}, key="k") == "x"


async def test_a_stream_that_broke_before_it_began_cancels_too(
    w: World, client: ModernClient
) -> None:
    """The client is gone when the handler starts."""
    call = client.call("wait", {"gate": "g"})
    call.leave()
    await w.box.gate("g").cancelled.wait()
    await call.done()
    assert call.messages == []


@pytest.mark.parametrize("era", ["handshake", "lone"])
async def test_in_the_handshake_era_nothing_is_cancelled(era: str, w: World, session: str) -> None:
    """Rule: "A broken connection or response stream never cancels a request in the handshake
    era", on a lone POST neither.
    """
    call = await w.waits((await sender(w, era)).call("wait", session, None, gate="g"))
    await gone(call)
    assert not w.box.gate("g").cancelled.is_set()
    w.box.gate("g").go.set()


# --- with a key ----------------------------------------------------------------------------


@pytest.mark.parametrize("second", ERAS)
@pytest.mark.parametrize("first", ERAS)
async def test_a_keyed_request_is_answered_where_it_is_sent_again(
    first: str, second: str, w: World, session: str
) -> None:
    """C1 (HTTP to HTTP), C2: sent, cut while it runs, sent again on another connection and in
    another era; it ran once, and the answer has the new request's id and the session's stamp.
    """
    call = await w.waits((await sender(w, first)).call("wait", session, "k", gate="g"))
    await gone(call)
    other = await sender(w, second)
    again = other.call("wait", session, "k", gate="g")
    await cycles()
    assert not w.box.gate("g").cancelled.is_set()
    w.box.gate("g").go.set()
    answer = await again.answer()

    assert text_of(answer["result"]) == "through g"
    assert answer["id"] == again.id
    assert answer["result"]["_meta"][SESSION]["sessionId"] == session
    # What the modern era demands of each result; the older one allows it.
    assert second != "modern" or answer["result"]["resultType"] == "complete"
    assert w.box.calls == ["wait"]


@pytest.mark.parametrize("second", ERAS)
@pytest.mark.parametrize("first", ERAS)
async def test_a_kept_answer_is_given_again(
    first: str, second: str, w: World, session: str
) -> None:
    """REQ4, HTL10: its client was gone when it was done; it is answered as often as it is asked."""
    call = await w.waits((await sender(w, first)).call("wait", session, "k", gate="g"))
    await gone(call)
    w.box.gate("g").go.set()
    await cycles()
    other = await sender(w, second)
    for _ in range(2):
        answer = await other.call("wait", session, "k", gate="g").answer()
        assert second != "modern" or answer["result"]["resultType"] == "complete"
        assert text_of(answer["result"]) == "through g"
        assert answer["result"]["_meta"][SESSION]["sessionId"] == session
    assert w.box.calls == ["wait"]


async def test_a_kept_answer_is_the_same_to_the_byte() -> None:
    """But for what is new by then (id, ``expiresAt``). The regression: an integer beyond 64
    bits hung the request, and came back as a float.
    """
    box = Toolbox()
    odd = 'æ \u2028 " \ud800'

    async def odd_text(ctx: Ctx, arguments: Json) -> str:
        return odd

    box.tools["odd"] = odd_text
    async with started(box=box) as (_, client, session):
        arguments = {"big": 2**70, "deep": _nested(300), "float": 1e22, "odd": odd}
        sent = {"session": session, "key": "k", "request_id": 2**70}
        first = await client.call("odd", arguments, **sent).done()
        second = await client.call("odd", arguments, **sent).done()

        assert first.status == second.status == 200
        assert bytes(first.reply.body) == bytes(second.reply.body)
        assert (await first.result())["content"][0]["text"] == odd
        assert box.calls == ["odd"]


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


async def test_a_kept_error_is_an_answer(w: World, client: ModernClient, session: str) -> None:
    for _ in range(2):
        received = client.send("x/unknown", session=session, key="k")
        assert (await received.error())["code"] == -32601
        assert received.status == 404
    older = await w.connected()
    assert (await older.error("x/unknown", {"_meta": keyed("k", session)}))["code"] == -32601


@pytest.mark.parametrize("first", ERAS)
async def test_all_that_are_sent_while_it_runs_get_the_one_answer(
    first: str, w: World, session: str
) -> None:
    """Rule: "The same key again … never runs it again: it gets the one answer, now or when it is
    done"; the first one, still there, is answered too.
    """
    calls = [(await sender(w, first)).call("wait", session, "k", gate="g")]
    await w.box.gate("g").started.wait()
    calls += [(await sender(w, era)).call("wait", session, "k", gate="g") for era in ERAS]
    await cycles()
    w.box.gate("g").go.set()

    assert [text_of(await call.result()) for call in calls] == ["through g"] * 4
    assert w.box.calls == ["wait"]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tools/call", call_params("wait", {"gate": "other"})),
        ("tools/call", call_params("echo", {"gate": "g"})),
        ("tools/call", call_params("wait", {})),
        ("tools/list", call_params("wait", {"gate": "g"})),
        ("tools/call", {**call_params("wait", {"gate": "g"}), "x": None}),
    ],
    ids=["other arguments", "other tool", "no arguments", "other method", "another member"],
)
@pytest.mark.parametrize("done", [False, True])
async def test_another_request_with_a_known_key_is_refused(
    method: str, params: Json, done: bool, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "Same key, other content: ``-32600`` ``key_reused``"; 400, as the core says of it."""
    call = await w.waits(client.call("wait", {"gate": "g"}, session=session, key="k"))
    if done:
        w.box.gate("g").go.set()
        await call.result()
    received = client.send(method, params, session=session, key="k")
    older = await w.connected()
    errors = [
        await received.error(),
        await older.error(method, {**params, "_meta": keyed("k", session)}),
    ]
    for error in errors:
        assert (error["code"], error["data"]) == (-32600, {"reason": "key_reused"})
    assert received.status == 400
    w.box.gate("g").go.set()
    assert await client.text("wait", {"gate": "g"}, session=session, key="k") == "through g"
    assert w.box.calls == ["wait"]


async def test_what_is_new_in_the_metadata_is_not_other_content(
    w: World, client: ModernClient
) -> None:
    """Progress token, ``state``, envelope: they differ when a request is sent again. So does the
    order of members, and how the request names its session.
    """
    created = await client.create()
    session = created["sessionId"]
    call = client.call("echo", {"text": "x"}, session=session, key="k")
    await call.result()
    again = client.call(
        "echo",
        {"text": "x"},
        session=session,
        state=created["state"],
        key="k",
        meta={"progressToken": 5, "example.com/x": [1]},
    )
    assert text_of(await again.result()) == "x"
    older = await w.connected()
    await older.resume(session)
    reordered = {"arguments": {"text": "x"}, "name": "echo"}
    for meta in (keyed("k", session, progressToken=2), keyed("k", progressToken=3)):
        await older.result("tools/call", {"_meta": meta, **reordered})
    assert w.box.calls == ["echo"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_is_of_its_session(
    era: str, w: World, client: ModernClient, session: str
) -> None:
    """SEC7: two sessions that share a store and a key do not cross."""
    other = (await client.start())["sessionId"]
    asking = await sender(w, era)
    for named in (session, other, session):
        assert await asking.text("session_id", named, "k") == named
    assert w.box.calls == ["session_id"] * 2


@pytest.mark.parametrize("key", ["", "x" * 257, 5, None, ["k"], {}], ids=repr)
async def test_a_malformed_key_is_invalid_params(
    key: Any, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "malformed params or metadata": it must not run as if it had none."""
    received = client.call("echo", {"text": "x"}, session=session, meta={KEY: key})
    assert (await received.error())["code"] == -32602
    assert received.status == 400
    older = await w.connected()
    await older.resume(session)
    assert (await older.call("echo", text="x", meta={KEY: key}).error())["code"] == -32602
    assert w.box.calls == []


@pytest.mark.parametrize("key", ["k", "x" * 256, "ø\u2028", "\ud800", '"'], ids=repr)
async def test_any_string_of_1_to_256_characters_is_a_key(
    key: str, w: World, client: ModernClient, session: str
) -> None:
    for _ in range(2):
        assert await client.text("echo", {"text": "x"}, session=session, key=key) == "x"
    assert w.box.calls == ["echo"]


# --- what goes with it ---------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("second", ["handshake", "modern"])
async def test_progress_goes_to_the_newest_sending_under_its_token(
    second: str, leaves: bool, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "from then on its progress and server-to-client requests"."""
    arguments = {"steps": 3, "gate": "g"}
    call = await w.waits(
        client.call("progress", arguments, session=session, key="k", meta={"progressToken": "one"})
    )
    await call.has(1)
    if leaves:
        await gone(call)
    meta = {**session_meta(session, key="k"), "progressToken": "two"}
    sent: Any
    if second == "modern":
        sent = client.call("progress", arguments, meta=meta)
    else:
        sent = (await w.connected()).call("progress", meta=meta, **arguments)
    await cycles()
    w.box.gate("g").go.set()
    await sent.answer()

    def tokens(reply: Reply) -> list[tuple[str, int]]:
        params = [m["params"] for m in reply.messages if m.get("method")]
        return [(p["progressToken"], p["progress"]) for p in params]

    assert tokens(call.reply) == [("one", 1)]
    # KEY21: what was reported before comes there, too.
    assert tokens(sent.reply) == [("two", 1), ("two", 2), ("two", 3)]


async def test_the_answer_waits_for_the_reports_of_who_sent_the_call_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KEY21. Its handler ends just as they are repeated."""
    box, repeats = Toolbox(), Reports.repeat
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def reports(ctx: Ctx, arguments: Json) -> str:
        for n in (1, 2):
            await ctx.session.report_progress(n)
        await box.gate("g").arrive()
        return "done"

    async def repeats_slowly(self: Reports, send: Callable[[Any], Awaitable[None]]) -> None:
        async def sends(params: Any) -> None:
            await send(params)
            begun.set()
            await goes_on.wait()

        await repeats(self, sends)

    monkeypatch.setattr(Reports, "repeat", repeats_slowly)
    box.tools["reports"] = reports
    async with started(box=box) as (_, client, session):
        call = client.call("reports", {}, session=session, key="k", meta={"progressToken": "one"})
        await box.gate("g").started.wait()
        again = client.call("reports", {}, session=session, key="k", meta={"progressToken": "two"})
        await begun.wait()
        box.gate("g").go.set()
        await cycles()
        goes_on.set()
        await again.answer()
        assert [m["params"]["progress"] for m in again.messages if "method" in m] == [1, 2]
        await call.answer()


async def test_a_question_reaches_the_era_that_can_be_asked() -> None:
    """ASK2: begun in the modern era, where nobody can be asked, and sent again in the handshake
    era before it asks.
    """
    box = Toolbox()

    async def wait_and_ask(ctx: Ctx, arguments: Json) -> str:
        await box.gate("g").arrive()
        return await box.tools["ask"](ctx, {"question": "which?"})

    box.tools["wait_and_ask"] = wait_and_ask
    async with started(box=box) as (w, client, session):
        call = client.call("wait_and_ask", {}, session=session, key="k")
        await box.gate("g").started.wait()
        await gone(call)
        older = await w.connected(capabilities={"elicitation": {}})
        again = older.call("wait_and_ask", meta=keyed("k", session))
        await cycles()
        box.gate("g").go.set()
        await again.reply.until(lambda: bool(again.reply.messages), "a question")
        [question] = again.reply.messages
        await older.respond(question, {"action": "accept", "content": {"answer": "this"}})

        assert text_of(await again.result()) == "accept: this"
        assert box.calls == ["wait_and_ask"]


async def test_in_the_modern_era_a_question_that_the_client_does_not_accept_fails_at_once(
    w: World,
) -> None:
    """Rule: "They go only to a peer that declared the capability; else the handler gets an error at
    once": C8, nothing waits for ever.
    """
    client = ModernClient(w.carrier, capabilities={"sampling": {}})
    session = (await client.start())["sessionId"]
    await client.listening(session)
    for tool in ("ask", "ask_standalone"):
        for named in (None, session):
            received = client.call(tool, {"question": "?"}, session=named)
            assert (await received.error())["code"] == -32600
            assert received.status == 400


# --- cancelling ----------------------------------------------------------------------------


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("request_id", [None, 0, "other", 999])
async def test_a_keyed_request_is_cancelled_by_its_key(
    era: str, request_id: object, w: World, client: ModernClient, session: str
) -> None:
    """Rule: "cancelled by a ``notifications/cancelled`` whose ``params._meta`` carries session
    and key (``requestId`` is then ignored)". C5: "An explicit cancel always wins".
    """
    call = await w.waits(client.call("wait", {"gate": "g"}, session=session, key="k"))
    sent_again = client.call("wait", {"gate": "g"}, session=session, key="k")
    bystander = await w.waits(client.call("wait", {"gate": "h"}, session=session, key="other"), "h")
    params: Json = {"_meta": session_meta(session, key="k")}
    if request_id is not None:
        params["requestId"] = request_id
    if era == "modern":
        reply = await client.notify("notifications/cancelled", params)
    else:
        older = (await w.connected()) if era == "handshake" else w.client()
        message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        reply = await older.post(message).done()

    assert reply.status == 202, reply
    await w.box.gate("g").cancelled.wait()
    later = client.call("wait", {"gate": "g"}, session=session, key="k")
    errors = [await sent.error() for sent in (call, sent_again, later)]
    assert errors[0]["code"] == -32800
    assert errors == errors[:1] * 3
    assert not w.box.gate("h").cancelled.is_set()
    w.box.gate("h").go.set()
    assert text_of(await bystander.result()) == "through h"
    assert w.box.calls == ["wait", "wait"]


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {KEY: "k"},
        {SESSION: {"sessionId": "A" * 43}, KEY: "k"},
        {SESSION: {"sessionId": 5}, KEY: "k"},
        {SESSION: None, KEY: "k"},
        {KEY: 5},
        5,
    ],
    ids=repr,
)
async def test_what_names_no_keyed_request_cancels_nothing(
    meta: Any, w: World, client: ModernClient, session: str
) -> None:
    """In the modern era a request is never cancelled by its id: ids mean nothing beyond their
    connection, and a POST is one.
    """
    call = await w.waits(client.call("wait", {"gate": "g"}, session=session, key="k", request_id=7))
    params: Mapping[str, Any] = {"requestId": 7, "_meta": meta}
    reply = await client.notify("notifications/cancelled", dict(params))
    await cycles()

    assert reply.status == 202
    assert not w.box.gate("g").cancelled.is_set()
    w.box.gate("g").go.set()
    assert text_of(await call.result()) == "through g"


# --- when it cannot be answered ------------------------------------------------------------


async def test_a_sessions_end_answers_its_keyed_requests(
    w: World, client: ModernClient, session: str
) -> None:
    """They answer ``-32043``, also to who asks again."""
    received = await w.waits(client.call("wait", {"gate": "g"}, session=session, key="k"))
    await client.send("session/end", {"sessionId": session}).result()
    assert await received.error() == not_found(session, started=True)
    again = client.call("wait", {"gate": "g"}, session=session, key="k")
    assert await again.error() == not_found(session)


@pytest.mark.parametrize("era", ERAS)
async def test_an_answer_that_was_dropped_is_an_unknown_outcome(era: str) -> None:
    """KEY3: the key is known, and nothing runs."""
    async with started(request_key_bytes=1_000) as (w, _, session):
        asking = await sender(w, era)

        for key in "12":
            await asking.text("echo", session, key, text=key * 600)
        error = await asking.call("echo", session, "1", text="1" * 600).error()

        assert (error["code"], error["message"]) == (-31012, "Outcome unknown")
        assert await asking.text("echo", session, "2", text="2" * 600) == "2" * 600
        assert w.box.calls == ["echo"] * 2


async def test_at_shutdown_what_runs_is_answered(
    w: World, client: ModernClient, session: str
) -> None:
    """WSS17, CLI1: after the grace time ``-31012``; new requests 503 with ``Retry-After``."""
    calls = [
        client.call("wait", {"gate": "g"}, session=session, key="k"),
        client.call("wait", {"gate": "h"}),
    ]
    await w.box.gate("g").started.wait()
    await w.box.gate("h").started.wait()
    await w.layer.drain(grace=0)

    for call in calls:
        assert (await call.error())["code"] == -31012
    refused = await client.call("echo", {"text": "x"}).done()
    assert (refused.status, refused.reply.header("retry-after")) == (503, "10")


@pytest.mark.parametrize("era", ERAS)
async def test_a_key_is_known_for_its_lifetime(era: str) -> None:
    """Rule: "Keys and answers live a bounded time … which the server advertises; a client never
    re-sends an older key".
    """
    async with started(request_key_lifetime=100) as (w, _, session):
        asking = await sender(w, era)
        for seconds, ran in ((0, 1), (99, 1), (2, 2)):
            w.clock.advance(seconds)
            await asking.text("echo", session, "k", text="x")
            assert w.box.calls == ["echo"] * ran


async def test_who_asks_while_the_answer_is_being_stored_gets_it() -> None:
    """KEY3, on a store that takes its time: neither run again, nor "outcome unknown"."""
    steps, storing = Interposed(), Gate()
    steps.before["finish_request"] = storing.arrive
    async with started(store=steps.store) as (w, client, session):
        first = client.call("echo", {"text": "x"}, session=session, key="k")
        await storing.started.wait()
        second = client.call("echo", {"text": "x"}, session=session, key="k")
        await cycles()
        storing.go.set()

        assert text_of(await first.result()) == "x"
        assert text_of(await second.result()) == "x"
        assert w.box.calls == ["echo"]


# --- the response --------------------------------------------------------------------------


async def test_an_answer_is_json_until_something_was_emitted(
    w: World, client: ModernClient, session: str
) -> None:
    """The SDK's deferral: JSON with the mapped status, or a stream."""
    for named in (None, session):
        plain = await client.call("echo", {"text": "x"}, session=named).done()
        assert (plain.status, plain.is_sse) == (200, False)
        token = {"progressToken": 1}
        emitted = client.call("progress", {"steps": 2}, session=named, meta=token)
        await emitted.done()
        assert emitted.is_sse and len(emitted.messages) == 3
        # Without a token there is nothing to emit.
        silent = await client.call("progress", {"steps": 2}, session=named).done()
        assert not silent.is_sse
        # However long it takes, below the SDK's 15 seconds.
        slow = client.call("wait", {"gate": f"g {named}"}, session=named)
        gate = w.box.gate(f"g {named}")
        await gate.started.wait()
        w.clock.advance(5)
        gate.go.set()
        await slow.done()
        assert not slow.is_sse


@pytest.mark.parametrize("keyed_or_not", [None, "k"])
async def test_a_silent_request_becomes_a_stream_after_15_seconds(
    keyed_or_not: str | None, w: World, client: ModernClient, session: str
) -> None:
    """Then an error cannot have a status of its own any more."""
    call = client.call("wait", {"gate": "g"}, session=session, key=keyed_or_not)
    await call.until(lambda: call.pings == 1, "a ping")
    assert call.is_sse and call.messages == []
    w.box.gate("g").go.set()
    assert text_of(await call.result()) == "through g"


async def test_two_requests_with_one_id_are_two(
    w: World, client: ModernClient, session: str
) -> None:
    """Rule: ``duplicate_id`` is for one connection; each modern POST is its own."""
    calls = [client.call("wait", {"gate": gate}, session=session, request_id=0) for gate in "gh"]
    for gate in "gh":
        await w.box.gate(gate).started.wait()
        w.box.gate(gate).go.set()
    assert [text_of(await call.result()) for call in calls] == ["through g", "through h"]


async def test_a_rule_2_request_with_a_key_is_the_same_request(w: World) -> None:
    """A key is of its session, however the request came to belong to it."""
    older = await w.connected()
    session = (await older.start())["sessionId"]
    call = await w.waits(older.call("wait", meta={KEY: "k"}, gate="g"))
    call.reply.leave()
    client = ModernClient(w.carrier)
    again = client.call("wait", {"gate": "g"}, session=session, key="k")
    await cycles()
    w.box.gate("g").go.set()

    assert (await again.result())["_meta"][SESSION]["sessionId"] == session
    assert w.box.calls == ["wait"]
