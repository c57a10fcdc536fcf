"""Requests that run: ids, cancellation, questions to the client, bounds of work without a
listener.
"""

import asyncio
import json
from typing import Any

import mcp_types as types
import pytest

from mcp_sessions.server.calls.table import Outcome
from tests.support.apps import DEPRECATED
from tests.support.raw import (
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

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

ASKS: Json = {"elicitation": {}, "sampling": {}, "roots": {}}


async def waiting(
    w: World, client: RawClient, gate: str = "g", *, request_id: str | int | None = None
) -> Sent:
    """A call that waits at a gate, whose response is a stream by now."""
    params = call_params("wait", {"gate": gate})
    sent = await w.waits(client.send("tools/call", params, request_id=request_id), gate)
    await sent.reply.started()
    return sent


# --- ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
async def test_requests_with_one_id_are_each_served(
    is_stream: bool, w: World, client: RawClient
) -> None:
    """REQ9: some hosts send each request with the same id. Each POST has its own answer."""
    params = [call_params("wait", {"gate": gate}) for gate in ("a", "b")]
    sent = [client.send("tools/call", each, request_id=1) for each in params]
    for gate, one in zip("ab", sent, strict=True):
        await w.box.gate(gate).started.wait()
        if is_stream:
            await one.reply.started()

    for method in ("tools/list", "session/start", "ping"):
        assert "result" in await client.send(method, request_id=1).answer()
    for gate, one in zip("ba", reversed(sent), strict=True):
        w.box.gate(gate).go.set()
        assert text_of(await one.result()) == f"through {gate}"


async def test_a_cancellation_reaches_all_that_have_the_id(w: World, client: RawClient) -> None:
    """REQ3: which of them its host means nobody can say."""
    sent = [await waiting(w, client, gate, request_id=1) for gate in "abc"]
    other = await waiting(w, client, "other", request_id=2)

    await client.notify("notifications/cancelled", {"requestId": 1})

    for one in sent:
        assert (await one.error())["code"] == -32800
    w.box.gate("other").go.set()
    assert text_of(await other.result()) == "through other"


@pytest.mark.parametrize("named", [{"sessionId": "nobody"}, {"sessionId": 5}, False, ""])
async def test_a_cancellation_for_a_session_that_is_not_there_has_no_effect(
    named: object, w: World, client: RawClient
) -> None:
    """ASC10. It named a session that nobody knows, and cancelled what has its id."""
    sent = await waiting(w, client, request_id=1)
    about: Json = {"requestId": 1, "_meta": {"io.modelcontextprotocol/session": named}}

    await client.notify("notifications/cancelled", about)

    w.box.gate("g").go.set()
    assert text_of(await sent.result()) == "through g"


async def test_an_id_can_be_used_again_when_it_was_answered(client: RawClient) -> None:
    """Stock clients do not, and others may."""
    for _ in range(3):
        sent = client.send("tools/call", call_params("echo", {"text": "x"}), request_id=5)
        assert text_of(await sent.result()) == "x"


async def test_one_and_the_text_one_are_two_ids(w: World, client: RawClient) -> None:
    """REQ1: an id is a string or a number, and they never cross (the SDK's streams do)."""
    number = await waiting(w, client, "n", request_id=1)
    text = await waiting(w, client, "t", request_id="1")
    w.box.gate("t").go.set()
    w.box.gate("n").go.set()

    assert (await text.answer())["id"] == "1"
    assert (await number.answer())["id"] == 1
    assert text_of(await text.result()) == "through t"


async def test_a_cut_request_no_longer_counts(w: World, client: RawClient) -> None:
    """Rule: "Over HTTP a request whose response stream was cut no longer counts": a TypeScript
    client reconnects with ids from 0.
    """
    first = await waiting(w, client, "a", request_id=0)
    await first.reply.gone()

    second = await waiting(w, client, "b", request_id=0)
    w.box.gate("a").go.set()
    w.box.gate("b").go.set()

    assert text_of(await second.result()) == "through b"
    answer = await client.get(first.reply.events[0].id).answer(0)
    assert text_of(answer["result"]) == "through a"


async def test_a_stream_that_was_fetched_again_is_cancelled_with_the_others(
    w: World, client: RawClient
) -> None:
    """REQ3: its response is open again."""
    first = await waiting(w, client, "a", request_id=0)
    await first.reply.gone()
    again = await client.get(first.reply.events[0].id).started()
    second = await waiting(w, client, "b", request_id=0)

    await client.notify("notifications/cancelled", {"requestId": 0})

    assert (await again.answer(0))["error"]["code"] == -32800
    assert (await second.error())["code"] == -32800


async def test_lone_posts_share_no_ids(w: World) -> None:
    """Each is a connection of its own."""
    session = (await w.client().start())["sessionId"]
    params = call_params("wait", {"gate": "g"}, in_session(session))
    sent = [w.client().send("tools/call", params, request_id=1) for _ in range(3)]
    await cycles()
    w.box.gate("g").go.set()

    assert [text_of(await one.result()) for one in sent] == ["through g"] * 3


# --- cancellation ------------------------------------------------------------------------------


async def test_a_cut_stream_cancels_nothing(w: World, client: RawClient) -> None:
    """Rule: "A broken … response stream never cancels a request in the handshake era"."""
    sent = await waiting(w, client)
    await sent.reply.gone()
    w.box.gate("g").go.set()
    await cycles()

    assert not w.box.gate("g").cancelled.is_set()
    assert "result" in await client.get(sent.reply.events[0].id).answer(sent.id)


async def test_an_explicit_cancel_ends_a_request(w: World, client: RawClient) -> None:
    """REQ5: "An explicit cancel always wins"; the answer is the SDK's (-32800), and ends it."""
    sent = await waiting(w, client)

    await client.notify("notifications/cancelled", {"requestId": sent.id, "reason": "x"})

    error = await sent.error()
    assert error == {"code": -32800, "message": "Request cancelled"}
    await w.box.gate("g").cancelled.wait()
    await sent.reply.done()


async def test_a_cancel_by_id_means_the_newest(w: World, client: RawClient) -> None:
    """Rule: "and a cancel by that id means the newest"."""
    first = await waiting(w, client, "a", request_id=0)
    await first.reply.gone()
    second = await waiting(w, client, "b", request_id=0)

    await client.notify("notifications/cancelled", {"requestId": 0})

    assert (await second.error())["code"] == -32800
    assert not w.box.gate("a").cancelled.is_set()


async def test_a_cancel_reaches_only_its_own_connection(w: World) -> None:
    """REQ1: ids "mean nothing beyond their connection"."""
    client, other = await w.connected(), await w.connected()
    sent = await waiting(w, client, request_id=7)

    await other.notify("notifications/cancelled", {"requestId": 7})
    await cycles()
    w.box.gate("g").go.set()

    assert text_of(await sent.result()) == "through g"


@pytest.mark.parametrize(
    "params", [None, {}, {"requestId": None}, {"requestId": 99}, {"requestId": []}], ids=str
)
async def test_a_cancel_of_nothing_does_nothing(
    params: Json | None, w: World, client: RawClient
) -> None:
    """It is accepted (202), and nothing more."""
    sent = await waiting(w, client)
    await client.notify("notifications/cancelled", params)
    await cycles()
    w.box.gate("g").go.set()
    assert text_of(await sent.result()) == "through g"


class Panic(BaseException):
    """What an extension module may raise."""


async def test_a_call_is_answered_whatever_its_handler_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as w:

        async def panics(ctx: Ctx, arguments: Json) -> str:
            raise Panic

        w.box.tools["panics"] = panics
        client = await w.connected()
        assert (await client.call("panics").error())["code"] == -32603
        assert not w.inside.runner.running
    assert "tools/call failed inside the wrapped server" in caplog.text


@pytest.mark.parametrize("tool", ["echo", "no such tool"])
async def test_a_call_is_answered_if_a_stage_fails_on_the_way_up(
    tool: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Outcome:
        raise RuntimeError

    monkeypatch.setattr("mcp_sessions.server.dispatch.stages.concealing._Concealed.after", fails)
    async with world(hidden=("secret",)) as w:
        client = await w.connected()
        assert (await client.call(tool, text="x").error())["code"] == -32603
    assert "the outcome of tools/call could not be changed" in caplog.text


async def test_a_handler_that_ignores_its_cancellation_delays_nothing(w: World) -> None:
    """The answer does not wait for it, and nothing of it follows the answer."""

    async def stubborn(ctx: Ctx, arguments: Json) -> str:
        w.box.gate("started").started.set()
        for _ in range(3):
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                await ctx.session.report_progress(1)
        w.box.gate("over").started.set()
        return "never mind"

    w.box.tools["stubborn"] = stubborn
    client = await w.connected()
    sent = await w.waits(client.call("stubborn", meta={"progressToken": 1}), "started")
    await sent.reply.started()

    await client.notify("notifications/cancelled", {"requestId": sent.id})
    await sent.reply.done()
    await w.box.gate("over").started.wait()

    assert [m.get("error", m)["code"] for m in sent.reply.messages] == [-32800]


async def test_a_notification_is_handled_while_requests_run(w: World) -> None:
    """Rule: "In a task: a handler may wait for the client, and the client for this 202"."""
    client = await w.connected(capabilities=ASKS)
    asked = client.call("ask", question="?")
    question = (await asked.reply.has(1))[0]
    await client.notify("notifications/roots/list_changed")
    await client.respond(question, {"action": "decline"})
    assert text_of(await asked.result()) == "decline: None"


# --- questions to the client -------------------------------------------------------------------


async def test_a_question_goes_to_the_stream_of_its_request(w: World) -> None:
    """elicitation, sampling and roots work; ids are random text."""

    async def sample(ctx: Ctx, arguments: Json) -> str:
        result = await ctx.session.create_message(  # pyright: ignore[reportDeprecated]
            [types.SamplingMessage(role="user", content=types.TextContent(text="?"))],
            max_tokens=20,
            related_request_id=ctx.request_id,
        )
        return str(result.content)

    async def roots(ctx: Ctx, arguments: Json) -> str:
        result = await ctx.session.list_roots()  # pyright: ignore[reportDeprecated]
        return str(result.roots[0].uri)

    w.box.tools.update(sample=sample, roots=roots)
    client = await w.connected(capabilities=ASKS)
    stream = client.get()
    asked, sampled, rooted = (
        client.call("ask", question="?"),
        client.call("sample"),
        client.call("roots"),
    )
    questions = [(await reply.has(1))[0] for reply in (asked.reply, sampled.reply, stream)]

    assert [question["method"] for question in questions] == [
        "elicitation/create",
        "sampling/createMessage",
        "roots/list",  # the SDK has it on the standalone channel only
    ]
    assert len({question["id"] for question in questions}) == 3
    assert all(isinstance(q["id"], str) and len(q["id"]) >= 16 for q in questions)
    await client.respond(questions[2], {"roots": [{"uri": "file:///r"}]})
    text = {"type": "text", "text": "sampled"}
    await client.respond(questions[1], {"role": "assistant", "content": text, "model": "m"})
    await client.respond(questions[0], {"action": "accept", "content": {"answer": "42"}})
    assert text_of(await asked.result()) == "accept: 42"
    assert "sampled" in text_of(await sampled.result())
    assert text_of(await rooted.result()) == "file:///r"


async def test_a_question_is_answered_from_any_connection_of_its_owner(w: World) -> None:
    """Rule: "the first answer from any of the owner's connections counts", a lone POST among them;
    the second is accepted and ignored.
    """
    client = await w.connected(capabilities=ASKS)
    for answering in (client, await w.connected(), w.client()):
        asked = client.call("ask", question="?")
        question = (await asked.reply.has(1))[0]
        await answering.respond(question, {"action": "accept", "content": {"answer": "1"}})
        await client.respond(question, {"action": "accept", "content": {"answer": "2"}})
        assert text_of(await asked.result()) == "accept: 1"


async def test_an_answer_to_nothing_is_taken_from_a_connection_only(
    w: World, client: RawClient
) -> None:
    """As the SDK answers it: 202; and 400 where there is no session at all."""
    answer: Json = {"jsonrpc": "2.0", "id": "x", "result": {}}

    assert (await client.post(answer).done()).status == 202
    assert (await w.client().post(answer).done()).status == 400


async def test_an_error_answers_a_question_too(w: World) -> None:
    """The handler receives the client's own error."""
    client = await w.connected(capabilities=ASKS)
    asked = client.call("ask", question="?")
    question = (await asked.reply.has(1))[0]
    error = {"code": -1, "message": "no", "data": {"x": 1}}
    reply = client.post({"jsonrpc": "2.0", "id": question["id"], "error": error})

    assert (await reply.done()).status == 202
    assert await asked.error() == error


@pytest.mark.parametrize("tool", ["ask", "ask_standalone"])
async def test_a_client_that_declared_nothing_is_not_asked(tool: str, w: World) -> None:
    """Rule: "They go only to a handshake-era peer that declared the capability; else the handler
    gets an error at once"; with a session and without.
    """
    client = await w.connected(capabilities={"sampling": {}})
    stream = await client.get().started()
    for _ in range(2):
        sent = client.call(tool, question="?")
        assert "code" in await sent.error()
        assert len(sent.reply.messages) == 1
        await client.start()
    assert stream.messages == []


@pytest.mark.parametrize("tool", ["ask", "ask_standalone"])
async def test_a_client_without_a_handshake_is_not_asked(tool: str, w: World) -> None:
    """A lone POST cannot be."""
    session = (await w.client().start())["sessionId"]
    sent = w.client().call(tool, question="?", meta=in_session(session))

    assert "code" in await sent.error()
    assert len(sent.reply.messages) == 1


async def test_a_question_in_addition_to_the_request_goes_to_the_get_stream(w: World) -> None:
    """The standalone channel: of the session, or of the bare connection."""
    client = await w.connected(capabilities=ASKS)
    stream = client.get()
    for number in range(2):
        asked = client.call("ask_standalone", question="?")
        question = (await stream.has(number + 1))[-1]
        assert "sessionEventId" not in question["params"]  # no session event
        await client.respond(question, {"action": "accept", "content": {"answer": "1"}})
        assert text_of(await asked.result()) == "accept: 1"
        await client.start()


async def test_an_open_question_is_asked_again_of_the_new_connection(w: World) -> None:
    """ASK2: "never left hanging": after a takeover it goes, with its id, to the new connection;
    the old one's copy is withdrawn where it was not sent yet.
    """
    old = await w.connected(capabilities=ASKS)
    started = await old.start()
    asked = old.call("ask_standalone", question="?")  # waits for the first GET
    await cycles()
    new = await w.connected(capabilities=ASKS)
    stream = await new.get().started()

    await new.resume(started["sessionId"])
    question = (await stream.has(1))[0]
    await new.respond(question, {"action": "accept", "content": {"answer": "new"}})

    assert text_of(await asked.result()) == "accept: new"
    old_stream = await old.get().started()
    await cycles()
    assert old_stream.messages == []


async def test_a_question_asked_while_nobody_is_attached_waits(w: World) -> None:
    """Rule: "a session's client, wherever it is": it is asked when it comes back."""
    old = await w.connected(capabilities=ASKS)
    started = await old.start()
    asked = await waiting(w, old, "g")
    del asked

    async def later(ctx: Ctx, arguments: Json) -> str:
        await w.box.gate("h").arrive()
        return await w.box.tools["ask_standalone"](ctx, arguments)

    w.box.tools["later"] = later
    call = await w.waits(
        w.client().call("later", question="?", meta=keyed("k", started["sessionId"])), "h"
    )
    await old.delete().done()
    w.box.gate("h").go.set()
    await cycles()
    new = await w.connected(capabilities=ASKS)
    stream = await new.get().started()

    await new.resume(started["sessionId"])
    question = (await stream.has(1))[0]
    await new.respond(question, {"action": "accept", "content": {"answer": "late"}})

    assert text_of(await call.result()) == "accept: late"


async def test_an_open_question_is_not_asked_of_a_client_that_cannot_answer(w: World) -> None:
    """Rule: "They go only to a handshake-era peer that declared the capability", also when they go
    again; the question stays open for one that did.
    """
    old = await w.connected(capabilities=ASKS)
    started = await old.start()
    asked = old.call("ask_standalone", question="?")
    await cycles()
    mute = await w.connected()
    mute_stream = await mute.get().started()
    await mute.resume(started["sessionId"])
    await cycles()
    assert mute_stream.messages == []

    able = await w.connected(capabilities=ASKS)
    stream = await able.get().started()
    await able.resume(started["sessionId"])
    question = (await stream.has(1))[0]
    await able.respond(question, {"action": "decline"})

    assert text_of(await asked.result()) == "decline: None"


# --- without a listener work ----------------------------------------------------------------------


async def test_work_without_a_listener_is_bounded_in_time() -> None:
    """REQ8: "Detached handlers are bounded in number, time and bytes"; who asks later receives
    ``-31012``.
    """
    async with world(detached_timeout=60) as w:
        client = await w.connected()
        sent = await waiting(w, client)
        await sent.reply.gone()

        await asyncio.sleep(59)
        assert not w.box.gate("g").cancelled.is_set()
        await asyncio.sleep(2)
        assert w.box.gate("g").cancelled.is_set()

        answer = await client.get(sent.reply.events[0].id).answer(sent.id)
        assert answer["error"]["code"] == -31012


async def test_work_that_has_a_listener_again_is_not_bounded() -> None:
    """Its client came back in time."""
    async with world(detached_timeout=60) as w:
        client = await w.connected()
        sent = await waiting(w, client)
        await sent.reply.gone()
        await asyncio.sleep(59)
        again = await client.get(sent.reply.events[0].id).started()

        await asyncio.sleep(600)
        w.box.gate("g").go.set()

        assert "result" in await again.answer(sent.id)


async def test_ones_cut_calls_cancel_nobody_elses() -> None:
    """REQ8: the bound over all takes from who has most, and each session has one of its own."""
    async with world(max_detached_requests=6, max_detached_requests_per_session=4) as w:
        quiet, noisy = await w.connected(), await w.connected()
        await quiet.start()
        await noisy.start()
        await (await waiting(w, quiet, "quiet")).reply.gone()
        for number in range(9):
            await (await waiting(w, noisy, f"noisy {number}")).reply.gone()
        await cycles()
        assert not w.box.gate("quiet").cancelled.is_set()
        cancelled = [n for n in range(9) if w.box.gate(f"noisy {n}").cancelled.is_set()]
        assert cancelled == [0, 1, 2, 3, 4]


@pytest.mark.in_memory
async def test_work_without_a_listener_is_bounded_in_bytes() -> None:
    """REQ8: what it emits stays within its stream's window; its answer is always kept."""
    async with world(max_bytes=10_000) as w:

        async def talk(ctx: Ctx, arguments: Json) -> str:
            await w.box.gate("g").arrive()
            for number in range(1_000):
                await ctx.session.report_progress(number, None, "x" * 1_000)
            return "talked"

        w.box.tools["talk"] = talk
        client = await w.connected()
        sent = client.call("talk", meta={"progressToken": 1})
        await sent.reply.started()
        await sent.reply.gone()
        w.box.gate("g").go.set()
        await cycles(3_000)

        store: Any = w.layer.store
        session = store._sessions[client.session_id]
        sizes = [log.size for log in session.streams.values()]
        assert sizes
        assert max(sizes) <= 10_000


# --- answers that are hard to write ---------------------------------------------------------


@pytest.mark.parametrize(
    "value", [2**64, -(2**70), "\ud800", [2**200]], ids=["2**64", "-2**70", "surrogate", "nested"]
)
async def test_an_answer_that_is_hard_to_write_is_still_an_answer(value: object, w: World) -> None:
    """CLI1: "nothing waits forever". Python's integers have no end and its text may hold half a
    character; orjson takes neither, and the caller waited for ever.
    """

    async def big(ctx: Ctx, params: Any) -> Json:
        return {"value": value}

    w.box.server.add_request_handler("x/big", types.RequestParams, big)
    client = await w.connected()
    session = (await client.start())["sessionId"]

    for meta in ({}, in_session(session), keyed("k")):
        sent = client.send("x/big", {"_meta": meta})
        result = await sent.result()
        assert json.loads(json.dumps(result["value"])) == value


async def test_a_handler_that_returns_what_is_no_json_is_answered(w: World) -> None:
    """An error, as the SDK answers it; not silence."""

    async def odd(ctx: Ctx, params: Any) -> Json:
        return {"value": object()}

    w.box.server.add_request_handler("x/odd", types.RequestParams, odd)
    client = await w.connected()
    await client.start()

    for meta in ({}, keyed("k")):
        assert "code" in await client.error("x/odd", {"_meta": meta})
