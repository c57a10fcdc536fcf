"""A client that takes nothing, and a store that is away, end no child and hold up nobody else."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from mcp_sessions.server.upstream.external import server_messages
from mcp_sessions.server.upstream.port import AWAY, LEFT, LISTENS, TOO_FAR, PeerError, PeerRequest
from mcp_sessions_transports.duplex_transport import DuplexTransport
from tests.support.children import child, child_world, until
from tests.support.duplex import DECLARED, ELICITS, duplex_world
from tests.support.interposed import Interposed
from tests.support.puppets import QUESTION, PuppetCall, PuppetWorld, puppet_world, settled
from tests.support.raw import Json, at_most, in_session, keyed, text_of


@pytest.mark.parametrize("per", ["shared", "principal"])
async def test_a_client_that_takes_nothing_keeps_no_answer_of_another(per: str) -> None:
    """Its own progress waits for it, in bounds; who else asks the same process is answered."""
    server = child(per=per)
    async with duplex_world(server=server, send_buffer=10_000, slow_timeout=600) as w:
        slow, other = await w.connected(), await w.connected("pipe")
        (first, *_) = w.inside.connections.all()
        release = cast(DuplexTransport, first.transport).outbox.hold()
        meta = {"progressToken": "mine"}
        sent = await slow.call("progress", steps=100, size=1_000, meta=meta)
        assert await at_most(20, other.text("echo", text="not held up")) == "not held up"
        release()
        await slow.answer(sent)
        steps = [m["params"]["progress"] for m in slow.notifications]
        assert steps == list(range(1, 101))
        assert slow.messages[-1]["id"] == sent, "the answer came before what was told before it"


# Which of two calls made at once is the newest, another store decides.
@pytest.mark.in_memory
@pytest.mark.parametrize("transport", ["http", "websocket", "stdio"])
async def test_who_was_asked_is_not_asked_again_because_another_call_of_theirs_has_ended(
    transport: str,
) -> None:
    """On a pipe nothing says whose question it is: the newest call's, as far as anybody knows."""
    answer = {"action": "accept", "content": {"answer": "two"}}
    async with duplex_world(server=child()) as w:
        if transport == "http":
            client = await w.inner.connected(capabilities=ELICITS)
            asks = client.call("ask later")
            other = client.call("have it ask")
            assert text_of(await other.result()) == "asked"
            (question,) = [m for m in other.reply.messages if m.get("id") != other.id]
            await client.respond(question, answer)
            assert json.loads(text_of(await asks.result())) == answer
            assert len(asks.reply.messages) == 1, "and nothing else"
            return
        peer = await w.connected(transport, capabilities={**DECLARED, **ELICITS})
        waits = await peer.call("ask later")
        await peer.answer(await peer.call("have it ask"))
        question = await peer.question()
        await peer.respond(question, answer)
        assert json.loads(text_of((await peer.answer(waits))["result"])) == answer
        said = [m for m in peer.messages if m.get("method") == "elicitation/create"]
        assert len(said) == 1


async def test_a_question_whose_call_ended_is_sent_again_with_another_that_it_may_be_about() -> (
    None
):
    """Its client was cut before it answered; what it sends again is what still waits for that."""
    answer = {"action": "accept", "content": {"answer": "two"}}
    capabilities = {**DECLARED, **ELICITS}
    async with duplex_world(server=child()) as w:
        peer = await w.connected("websocket", capabilities=capabilities)
        session = await peer.start()
        meta = keyed("k", session["sessionId"])
        await peer.call("ask later", meta=meta)
        await peer.answer(await peer.call("have it ask"))
        first = await peer.question()
        await peer.leave()
        peer = await w.connected("websocket", capabilities=capabilities)
        await peer.resume(session["sessionId"], session["sessionEventId"])
        waits = await peer.call("ask later", meta=meta)
        again = await peer.question()
        assert again == first
        await peer.respond(again, answer)
        assert json.loads(text_of((await peer.answer(waits))["result"])) == answer


async def test_who_comes_back_for_one_of_several_calls_is_asked_what_may_be_about_it() -> None:
    """The call on whose response the question stood goes on, and nobody comes back for it."""
    answer = {"action": "accept", "content": {"answer": "two"}}
    capabilities = {**DECLARED, **ELICITS}
    async with duplex_world(server=child()) as w:
        peer = await w.connected("websocket", capabilities=capabilities)
        session = await peer.start()
        meta = keyed("k", session["sessionId"])
        await peer.call("ask later", meta=meta)
        await peer.call("hold")
        await peer.answer(await peer.call("have it ask"))
        first = await peer.question()
        await peer.leave()
        peer = await w.connected("websocket", capabilities=capabilities)
        await peer.resume(session["sessionId"], session["sessionEventId"])
        waits = await peer.call("ask later", meta=meta)
        assert await peer.question() == first
        await peer.respond(first, answer)
        assert json.loads(text_of((await peer.answer(waits))["result"])) == answer


# The number of the newest is one of a process.
@pytest.mark.in_memory
async def test_who_loses_one_of_several_responses_is_asked_on_another() -> None:
    answer = {"action": "accept", "content": {"answer": "two"}}
    async with child_world() as w:
        client = await w.connected(capabilities=ELICITS)
        asks = client.call("ask later")
        newest = client.call("hold")
        await client.call("have it ask").result()
        newest.reply.leave()
        (question,) = [m for m in await at_most(20, asks.reply.has(1)) if "method" in m]
        await client.respond(question, answer)
        assert json.loads(text_of(await asks.result())) == answer


@pytest.mark.in_memory
async def test_who_lost_the_other_responses_answers_what_it_was_asked_before() -> None:
    """It has the question. Of two calls that it may be about, one ends, and nobody listens."""
    answer = {"action": "accept", "content": {"answer": "two"}}
    async with child_world() as w:
        client = await w.connected(capabilities=ELICITS)
        session = (await client.start())["sessionId"]
        meta = keyed("k", session)
        asks = client.call("ask later", meta=meta)
        other = client.call("hold", meta=in_session(session))
        has_it_ask = client.call("have it ask", meta=in_session(session))
        await has_it_ask.result()
        (question,) = [m for m in has_it_ask.reply.messages if "method" in m]
        for call in (asks, other):
            await call.reply.gone()
        await client.notify("notifications/cancelled", {"requestId": other.id})
        await client.respond(question, answer)
        assert json.loads(text_of(await client.call("ask later", meta=meta).result())) == answer


async def test_what_is_asked_has_ended_with_the_last_call_that_it_may_be_about() -> None:
    """Its server may never say that it waits no more."""
    async with duplex_world(server=child()) as w:
        peer = await w.connected("websocket", capabilities={**DECLARED, **ELICITS})
        waits = await peer.call("ask later")
        await peer.answer(await peer.call("have it ask", until="notifications/roots/list_changed"))
        question = await peer.question()
        await peer.notify("notifications/roots/list_changed")
        assert text_of((await peer.answer(waits))["result"]) == "by itself"
        await peer.until(
            lambda: any(
                m.get("method") == "notifications/cancelled"
                and m["params"]["requestId"] == question["id"]
                for m in peer.messages
            ),
            "it is withdrawn",
        )
        assert await peer.text("count"), "its server was told, and goes on"


async def test_a_store_that_is_away_ends_no_child_and_loses_no_change() -> None:
    steps = Interposed()
    async with child_world(store=steps.store) as w:
        client = await w.connected()
        stream = client.get()
        session = (await client.start())["sessionId"]
        meta = in_session(session)
        await client.result("resources/subscribe", {"uri": "test://a", "_meta": meta})
        pid = await client.text("pid", meta=meta)
        steps.fails("append", "before")
        steps.calls.clear()
        assert await client.text("update", uri="test://a", meta=meta) == "updated"
        await until(lambda: "append" in steps.calls, "the change was tried")
        assert await client.text("pid", meta=meta) == pid
        assert not stream.messages
        steps.mend()
        (notified,) = await stream.has(1)
        assert notified["params"]["uri"] == "test://a"


LOGS = {"method": "notifications/message", "params": {"level": "info", "data": "of any call"}}
ASKS = {"id": "q", "method": QUESTION, "params": {"message": "of any call"}}


async def two_calls(w: PuppetWorld) -> tuple[PuppetCall, PuppetCall]:
    """The older and the newer one of a session, at one process."""
    for owner in ("older", "newer"):
        w.send(
            owner, "tools/call", {"name": "t"},
            session="s", handshake=True, capabilities={"elicitation": {}},
        )  # fmt: skip
        await settled()
    older, newer = w.calls
    return older, newer


def heard(call: PuppetCall) -> list[str]:
    return [message["method"] for message in call.received]


@pytest.mark.parametrize("older_reach", [LISTENS, AWAY, LEFT])
@pytest.mark.parametrize("newer_reach", [LISTENS, AWAY, LEFT])
async def test_what_names_no_call_goes_to_the_newest_whose_client_is_nearest(
    older_reach: int, newer_reach: int
) -> None:
    """A client that was asked and left may never come back. Others of its session wait."""
    async with puppet_world() as w:
        older, newer = await two_calls(w)
        older.reach, newer.reach = older_reach, newer_reach
        (puppet,) = w.puppets.living
        puppet.say(LOGS)
        puppet.say(ASKS)
        await settled()
        gets, other = (newer, older) if newer_reach >= older_reach else (older, newer)
        assert (heard(gets), heard(other)) == (["notifications/message", QUESTION], [])
        assert puppet.answers["q"]["error"]["message"] == "refused by its client"


@pytest.mark.parametrize("older_reach", [LISTENS, AWAY, LEFT])
@pytest.mark.parametrize("newer_reach", [LISTENS, AWAY, LEFT])
async def test_a_replica_whose_client_is_far_leaves_the_question_to_others(
    older_reach: int, newer_reach: int
) -> None:
    """Only that replica knows how far the client of the newer call is."""
    async with puppet_world() as w:
        older, newer = await two_calls(w)
        older.reach = older_reach
        asked_for = list[int]()

        async def answers(asked: PeerRequest) -> Json:
            asked_for.append(asked.least)
            if newer_reach < asked.least:
                raise PeerError(-32603, "the client is away", TOO_FAR)
            return {"action": "decline"}

        newer.send_request = answers
        (puppet,) = w.puppets.living
        puppet.say(ASKS)
        await settled()
        if newer_reach >= older_reach:
            assert (asked_for[-1], heard(older)) == (newer_reach, [])
            assert puppet.answers["q"]["result"] == {"action": "decline"}
        else:
            assert heard(older) == [QUESTION]
            assert asked_for == [*range(LISTENS, older_reach - 1, -1)]


@pytest.mark.parametrize(
    "answer",
    [{"result": {}}, {"error": {"code": -32603, "message": "it failed"}}, None],
    ids=["result", "error", "end"],
)
async def test_what_a_server_said_in_a_call_comes_before_its_end(
    monkeypatch: pytest.MonkeyPatch, answer: Json | None
) -> None:
    """What waited for a slow client was left out if the call ended with an error."""
    monkeypatch.setattr(server_messages, "MOMENT", 0.0)
    async with puppet_world() as w:
        task = w.send("one", "tools/call", {"name": "t"}, session="s", handshake=True)
        await settled()
        (call,), (puppet,) = w.calls, w.puppets.living
        takes, receives = asyncio.Event(), call.notify

        async def slowly(method: str, params: Mapping[str, Any] | None) -> None:
            await takes.wait()
            await receives(method, params)

        call.notify = slowly
        for _ in range(3):
            puppet.say(LOGS)
        (request_id,) = puppet.unanswered
        if answer is not None:
            puppet.say({"id": request_id, **answer})
        else:
            puppet.kill()
        await settled()
        assert not task.done()
        takes.set()
        outcome = await at_most(20, task)
        assert ("error" in outcome) == (answer is None or "error" in answer)
        assert heard(call) == ["notifications/message"] * 3
