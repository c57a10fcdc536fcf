"""A question that the server gives up is cancelled at its client, and never asked again (ASK6)."""

import asyncio
from typing import Any

import anyio
import mcp_types as types
import pytest

from tests.support.apps import DEPRECATED
from tests.support.raw import Json, RawClient, at_most, keyed, text_of
from tests.support.virtual_time import cycles
from tests.support.world import Ctx, World

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

ASKS: Json = {"elicitation": {}, "roots": {}}

IN_SESSION = pytest.mark.parametrize("in_session", [False, True], ids=["no session", "session"])


def gives_up(w: World, *, related: bool) -> None:
    """A tool ``impatient`` that asks, and has 5 seconds."""

    async def impatient(ctx: Ctx, arguments: Json) -> str:
        with anyio.move_on_after(5):
            await _asks(ctx, related=related)
        return "gave up"

    w.box.tools["impatient"] = impatient


async def _asks(ctx: Ctx, *, related: bool) -> None:
    schema: Any = {"type": "object", "properties": {}}
    request_id = ctx.request_id if related else None
    await ctx.session.elicit_form("?", schema, related_request_id=request_id)


async def client_of(w: World, in_session: bool) -> RawClient:
    """One that can be asked, with a current session or without."""
    client = await w.connected(capabilities=ASKS)
    if in_session:
        await client.start()
    return client


def check_withdrawn(question: Json, cancelled: Json) -> None:
    """The second message takes the first one back."""
    assert cancelled["method"] == "notifications/cancelled"
    assert cancelled["params"]["requestId"] == question["id"]


@IN_SESSION
async def test_a_handler_that_gives_up_its_question_takes_it_back(
    in_session: bool, w: World
) -> None:
    """On the request's own stream, before the answer."""
    gives_up(w, related=True)
    client = await client_of(w, in_session)
    sent = client.call("impatient")

    assert text_of(await at_most(20, sent.result())) == "gave up"
    question, cancelled, _ = sent.reply.messages
    check_withdrawn(question, cancelled)


@IN_SESSION
async def test_a_question_on_the_standalone_channel_is_taken_back_there(
    in_session: bool, w: World
) -> None:
    """Where it was asked."""
    gives_up(w, related=False)
    client = await client_of(w, in_session)
    stream = await client.get().started()
    sent = client.call("impatient")

    assert text_of(await at_most(20, sent.result())) == "gave up"
    question, cancelled = await stream.has(2)
    check_withdrawn(question, cancelled)


@IN_SESSION
@pytest.mark.parametrize("related", [True, False], ids=["own stream", "standalone"])
async def test_a_call_that_its_client_cancels_takes_its_questions_along(
    in_session: bool, related: bool, w: World
) -> None:
    """REQ6: the handler ends, and with it what it asked."""

    async def ask(ctx: Ctx, arguments: Json) -> str:
        await _asks(ctx, related=related)
        return "answered"

    w.box.tools["ask"] = ask
    client = await client_of(w, in_session)
    stream = await client.get().started()
    sent = client.call("ask")
    asked_on = sent.reply if related else stream
    question = (await asked_on.has(1))[0]
    await client.notify("notifications/cancelled", {"requestId": sent.id})

    assert (await sent.error())["code"] == -32800
    check_withdrawn(question, (await asked_on.has(2))[1])


async def test_an_answer_takes_back_what_its_handler_left_open(w: World) -> None:
    """Nobody waits for it any more, though a task of the handler's does."""
    tasks: list[asyncio.Task[None]] = []

    async def leaves(ctx: Ctx, arguments: Json) -> str:
        tasks.append(asyncio.create_task(_asks(ctx, related=True)))
        await cycles()
        return "left"

    w.box.tools["leaves"] = leaves
    client = await client_of(w, True)
    sent = client.call("leaves")

    assert text_of(await sent.result()) == "left"
    question, cancelled, _ = sent.reply.messages
    check_withdrawn(question, cancelled)
    await asyncio.gather(*tasks, return_exceptions=True)


@IN_SESSION
async def test_a_client_that_comes_back_for_a_stream_is_not_asked_a_dead_question(
    in_session: bool, w: World
) -> None:
    """What its log keeps of it is that it was taken back."""
    gives_up(w, related=False)
    client = await client_of(w, in_session)
    first = await client.get().started()
    position = first.events[0].id
    await first.gone()
    sent = client.call("impatient")
    assert text_of(await at_most(20, sent.result())) == "gave up"

    again = await client.get(position).started()
    await again.has(1)
    await cycles()
    assert [message["method"] for message in again.messages] == ["notifications/cancelled"]


async def test_a_client_that_sent_its_call_again_is_not_asked_again_by_the_first_response(
    w: World,
) -> None:
    """It answered on the second response. Then it reads the first one from its begin."""
    gives_up(w, related=True)
    client = await client_of(w, True)
    first = client.call("impatient", meta=keyed("k")).reply
    asked = await first.event(1)
    await first.gone()
    second = client.call("impatient", meta=keyed("k"))
    question = (await second.reply.has(1))[0]
    assert question == asked.message
    await client.respond(question, {"action": "decline"})
    assert text_of(await second.result()) == "gave up"

    again = await client.get(first.events[0].id).started()
    *before, answer = await again.has(2)
    assert [message["method"] for message in before] == ["notifications/cancelled"]
    assert text_of(answer["result"]) == "gave up"


async def test_a_session_that_attaches_is_not_asked_what_was_given_up(w: World) -> None:
    """ASK2 is of open questions: nobody was attached while this one was open."""
    gives_up(w, related=False)
    lone = await client_of(w, False)
    session = (await lone.start())["sessionId"]
    stream = await lone.get().started()
    await lone.notify("notifications/initialized")
    sent = lone.call("impatient")
    assert text_of(await at_most(20, sent.result())) == "gave up"
    await stream.has(2)

    other = await client_of(w, False)
    fresh = await other.get().started()
    await other.resume(session)
    await cycles(50)
    assert [m for m in fresh.messages if m["method"] == "elicitation/create"] == []


async def test_a_question_that_is_answered_is_not_taken_back(w: World) -> None:
    """It was not given up."""
    gives_up(w, related=True)
    client = await client_of(w, True)
    sent = client.call("impatient")
    question = (await sent.reply.has(1))[0]
    await client.respond(question, {"action": "decline"})

    assert text_of(await sent.result()) == "gave up"
    assert len(sent.reply.messages) == 2


async def test_a_question_that_times_out_is_taken_back_before_the_answer(w: World) -> None:
    """The SDK's own timeout. CLI1: a handler's wait has an end; the client is notified."""

    async def impatient(ctx: Ctx, arguments: Json) -> str:
        await ctx.session.send_request(
            types.ListRootsRequest(), types.ListRootsResult, request_read_timeout_seconds=5
        )
        return "answered"

    w.box.tools["impatient"] = impatient
    client = await client_of(w, True)
    stream = await client.get().started()
    sent = client.call("impatient")

    assert (await sent.error())["code"] == -32001
    question, cancelled = await stream.has(2)
    check_withdrawn(question, cancelled)
