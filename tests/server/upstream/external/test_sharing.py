"""Clients that can be asked share no process, and where they have to nothing crosses.

Over real commands and URLs. The rule is in `external/cause.py`; `test_cause.py` has it as a
property.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mcp_sessions import HTTPServer
from mcp_sessions.server.upstream import rounds
from tests.server.upstream.external.test_peer_in_rounds import (
    ELICITS,
    QUESTION,
    TWO,
    UNKNOWN,
    again,
)
from tests.support.children import child_world, until
from tests.support.modern import LOG_LEVEL, ModernClient, Received
from tests.support.raw import Json, text_of
from tests.support.url_server import UrlServer, event, result, text
from tests.support.urls import url_of
from tests.support.world import World, world

pytestmark = pytest.mark.anyio


def completes(value: str) -> Json:
    """The params of a completion; the server logs the value, and asks about it."""
    ref = {"type": "ref/prompt", "name": "it"}
    return {"ref": ref, "argument": {"name": "a", "value": value}}


def logs(received: Received) -> list[str]:
    return [
        m["params"]["data"] for m in received.messages if m.get("method") == "notifications/message"
    ]


def clients(w: World, count: int = 2) -> list[ModernClient]:
    """Anonymous ones that can be asked."""
    return [ModernClient(w.carrier, capabilities=ELICITS) for _ in range(count)]


async def test_a_client_is_not_asked_what_the_request_of_another_makes_the_server_ask() -> None:
    """They have one process between them: there is room for no more."""
    async with child_world(options={"max_children": 1}) as w:
        a, b = clients(w)
        held = a.call("hold", meta={LOG_LEVEL: "debug"})
        await until(lambda: _running(w) == 1, "it runs")
        sent = b.send("completion/complete", completes("B's"), meta={LOG_LEVEL: "debug"})
        (said,) = (await sent.result())["completion"]["values"]
        refused = json.loads(said)
        assert refused["code"] == -32600
        assert "did not say which request" in refused["message"]
        assert held.messages == [], "neither the question nor the log is A's"
        assert logs(sent) == [], "and nobody knows that it is B's"


@pytest.mark.parametrize("count", [2, 5])
async def test_a_client_that_is_away_keeps_nobody_from_being_asked(count: int) -> None:
    """Each has a process of its own, as long as there is room."""
    async with child_world() as w:
        asked = [await client.send("tools/call", QUESTION).result() for client in clients(w, count)]
        assert {each["resultType"] for each in asked} == {"input_required"}
        for client, question in zip(clients(w, count), asked, strict=True):
            answered = await client.send("tools/call", again(question, TWO)).result()
            assert json.loads(text_of(answered)) == TWO


@pytest.mark.parametrize("most", [4, 6, 8])
async def test_one_client_that_is_away_takes_neither_room_nor_questions_of_others(
    most: int,
) -> None:
    """It makes as many calls as there is room, is asked, and comes back for none."""
    async with child_world(options={"max_children": most}) as w:
        away, here = clients(w)
        for _ in range(most):
            asked = await away.send("tools/call", QUESTION).result()
            assert asked["resultType"] == "input_required"
        asked = await here.send("tools/call", QUESTION).result()
        answered = await here.send("tools/call", again(asked, TWO)).result()
        assert json.loads(text_of(answered)) == TWO
        assert await ModernClient(w.carrier).text("pid")
        session = (await here.create())["sessionId"]
        assert await here.text("count", session=session) == "1"


async def test_one_client_whose_calls_run_for_long_leaves_room_for_others() -> None:
    async with child_world(options={"max_children": 4}) as w:
        busy, here = clients(w)
        held = [busy.call("hold") for _ in range(4)]
        await until(lambda: _running(w) == len(held), "they run")
        assert await ModernClient(w.carrier).text("pid")
        session = (await here.create())["sessionId"]
        assert await here.text("count", session=session) == "1"


@pytest.mark.parametrize("most", [2, 3])
async def test_of_two_or_three_processes_who_is_away_has_one_and_others_are_asked(
    most: int,
) -> None:
    async with child_world(options={"max_children": most}) as w:
        away, here = clients(w)
        await away.send("tools/call", QUESTION).result()
        for _ in range(2):
            asked = await here.send("tools/call", QUESTION).result()
            answered = await here.send("tools/call", again(asked, TWO)).result()
            assert json.loads(text_of(answered)) == TWO
        session = (await here.create())["sessionId"]
        assert await here.text("count", session=session) == "1"


async def test_what_the_server_is_can_be_read_while_a_client_that_is_away_has_all_room() -> None:
    async with child_world(options={"max_children": 1}) as w:
        (away,) = clients(w, 1)
        await away.send("tools/call", QUESTION).result()
        other = ModernClient(w.carrier, capabilities={"sampling": {}})
        assert "capabilities" in await other.send("server/discover", {}).result()


@pytest.mark.parametrize("most", [1, 2])
async def test_where_there_is_little_room_the_oldest_call_of_who_is_away_for_long_goes(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(rounds, "AWAY_IN_SMALL", 0.0)
    async with child_world(options={"max_children": most}) as w:
        away, here = clients(w)
        left = await away.send("tools/call", QUESTION).result()
        asked = await here.send("tools/call", QUESTION).result()
        answered = await here.send("tools/call", again(asked, TWO)).result()
        assert json.loads(text_of(answered)) == TWO
        error = await away.send("tools/call", again(left, TWO)).error()
        assert error["code"] == UNKNOWN
        await away.send("tools/call", QUESTION).result()
        for _ in range(most):
            session = (await here.create())["sessionId"]
            assert await here.text("count", session=session) == "1"


async def test_a_handshake_waits_for_the_room_of_a_client_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only room there is gets free in a moment."""
    monkeypatch.setattr(rounds, "AWAY_IN_SMALL", 1.0)
    async with child_world(options={"max_children": 1}) as w:
        (away,) = clients(w, 1)
        left = await away.send("tools/call", QUESTION).result()
        assert await (await w.connected()).text("count") == "1"
        error = await away.send("tools/call", again(left, TWO)).error()
        assert error["code"] == UNKNOWN


async def test_without_room_a_client_shares_with_those_that_can_be_asked_other_things() -> None:
    async with child_world(options={"max_children": 1}) as w:
        (busy,) = clients(w, 1)
        busy.call("hold")
        await until(lambda: _running(w) == 1, "it runs")
        assert await ModernClient(w.carrier).text("pid")


async def test_an_extra_process_makes_room_for_a_session() -> None:
    """It keeps nothing that anybody would miss."""
    async with child_world(options={"max_children": 6}) as w:
        a, b = clients(w)
        asked = [await each.send("tools/call", QUESTION).result() for each in (a, b)]
        for client, question in zip((a, b), asked, strict=True):
            await client.send("tools/call", again(question, TWO)).result()
        for _ in range(5):
            session = (await a.create())["sessionId"]
            assert await a.text("count", session=session) == "1"


async def test_an_idle_process_for_other_questions_makes_room_for_one_of_its_own() -> None:
    async with child_world(options={"max_children": 4}) as w:
        kinds: list[Json] = [{"sampling": {}}, {"roots": {}}, {}]
        for others in kinds:
            await ModernClient(w.carrier, capabilities=others).text("pid")
        asked = [await each.send("tools/call", QUESTION).result() for each in clients(w)]
        assert {each["resultType"] for each in asked} == {"input_required"}


async def test_an_idle_process_that_may_work_on_what_was_given_up_is_replaced() -> None:
    async with child_world(options={"max_children": 1}) as w:
        a, b = clients(w)
        pid = await a.text("pid")
        held = a.call("hold")
        await until(lambda: _running(w) == 1, "it runs")
        held.leave()
        await until(lambda: not _running(w), "it is cancelled")
        asked = await b.send("tools/call", QUESTION).result()
        assert asked["resultType"] == "input_required"
        await b.send("tools/call", again(asked, TWO)).result()
        assert await a.text("pid") != pid


async def test_requests_whose_clients_get_nothing_share_one() -> None:
    """One that wants to receive log messages has a process for itself, else they would be
    nobody's.
    """
    async with child_world() as w:
        nothing = ModernClient(w.carrier)
        pid = await nothing.text("pid")
        held = nothing.call("hold")
        assert await nothing.text("pid") == pid
        sent = nothing.call("log", {"text": "mine"}, meta={LOG_LEVEL: "debug"})
        await sent.result()
        assert (logs(sent), held.messages) == (["mine"], [])


@pytest.mark.parametrize("per", ["principal", "shared"])
async def test_what_is_said_about_one_session_is_not_notified_another_that_shares(per: str) -> None:
    async with child_world(options={"per": per}) as w:
        old = [await w.connected(), await w.connected()]
        held = old[0].call("hold")
        await until(lambda: _running(w) == 1, "it runs")
        sent = old[1].call("log", text="B's")
        await sent.result()
        assert [m for m in held.reply.messages if "method" in m] == []
        assert [m for m in sent.reply.messages if "method" in m] == []


async def test_each_session_is_asked_what_its_own_request_asks() -> None:
    """All that one client does is its own: it has a process for itself."""
    async with child_world() as w:
        a, b = clients(w)
        for client in (a, b):
            session = (await client.create())["sessionId"]
            asked = await client.send("tools/call", QUESTION, session=session).result()
            assert asked["resultType"] == "input_required"


def _running(w: World) -> int:
    upstream: Any = w.inside.upstream
    return sum(len(slot.calls) for slot in upstream.children._slots.values())


# --- a URL ---------------------------------------------------------------------------------------


class AskingUrl:
    """A URL with a handshake that asks, and logs, where it is asked to.

    Args:
        on_response: On the response of the request; else on its session's own stream.
    """

    def __init__(self, *, on_response: bool) -> None:
        self.on_response = on_response
        self.inner = UrlServer()
        self.answers: dict[str, asyncio.Future[Json]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method != "POST":
            await self.inner(scope, receive, send)
            return
        message = json.loads(await request.body())
        if message.get("id") in self.answers and "method" not in message:
            self.answers[message["id"]].set_result(message)
        if message.get("method") in ("tools/call", "completion/complete"):
            session = request.headers["mcp-session-id"]
            await self._work(message, session, send)
            return

        async def body() -> Any:
            return {"type": "http.request", "body": json.dumps(message).encode()}

        await self.inner(scope, body, send)

    async def _work(self, message: Json, session: str, send: Send) -> None:
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})

        async def say(said: Json, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event(said), "more_body": more})

        async def aside(said: Json) -> None:
            self.inner.streams[session].put_nowait(event(said))

        notify = say if self.on_response else aside
        what = message["params"].get("name", "ask")
        value = message["params"].get("argument", {}).get("value", "A's")
        if what == "hold":
            await asyncio.Event().wait()
        data = {"level": "error", "data": value}
        await notify({"jsonrpc": "2.0", "method": "notifications/message", "params": data})
        name = f"q{len(self.answers)}"
        answer = self.answers[name] = asyncio.get_running_loop().create_future()
        params: Json = {"message": value, "requestedSchema": {"type": "object"}}
        asked = {"jsonrpc": "2.0", "id": name, "method": "elicitation/create", "params": params}
        await notify(asked)
        said = await answer
        content = text(json.dumps(said.get("result") or said["error"], sort_keys=True))
        await say(result(message, {**content, "completion": {"values": []}}), more=False)


@asynccontextmanager
async def asking_url(*, on_response: bool, **options: Any) -> AsyncGenerator[World]:
    async with url_of(AskingUrl(on_response=on_response)) as url:
        async with world(server=HTTPServer(url, **options)) as w:
            yield w


@pytest.mark.parametrize("on_response", [True, False], ids=["on the response", "on its own stream"])
@pytest.mark.parametrize("most", [1, 20])
async def test_a_url_asks_nobody_what_the_request_of_another_makes_it_ask(
    on_response: bool, most: int
) -> None:
    async with asking_url(on_response=on_response, max_children=most) as w:
        a, b = clients(w)
        held = a.call("hold", meta={LOG_LEVEL: "debug"})
        await until(lambda: _running(w) == 1, "it runs")
        sent = b.send("completion/complete", completes("B's"), meta={LOG_LEVEL: "debug"})
        assert "code" in text_of(await sent.result()), "B's request cannot be asked about"
        assert held.messages == []
        if on_response:
            assert logs(sent) == ["B's"]
        asked = b.send("tools/call", QUESTION)
        if on_response or most > 1:
            assert (await asked.result())["resultType"] == "input_required"
        else:
            assert json.loads(text_of(await asked.result()))["code"] == -32600
        assert held.messages == []


@pytest.mark.parametrize("on_response", [True, False], ids=["on the response", "on its own stream"])
async def test_a_client_of_a_url_that_is_away_keeps_nobody_from_being_asked(
    on_response: bool,
) -> None:
    async with asking_url(on_response=on_response) as w:
        (last, *others) = clients(w, 3)
        for client in others:
            asked = await client.send("tools/call", QUESTION).result()
            assert asked["resultType"] == "input_required"
        asked = await last.send("tools/call", QUESTION).result()
        answered = await last.send("tools/call", again(asked, TWO)).result()
        assert json.loads(text_of(answered)) == TWO
