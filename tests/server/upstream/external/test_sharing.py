"""Clients that can be asked share no process, and where they have to nothing crosses.

Over real commands and URLs. The rule is in `external/child.py`; `test_cause.py` has it as a
property.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from mcp_sessions import HTTPServer, SessionLayer
from mcp_sessions.server.upstream import rounds
from tests.server.upstream.external.test_children import starts
from tests.server.upstream.external.test_peer_in_rounds import (
    ELICITS,
    QUESTION,
    TWO,
    UNKNOWN,
    again,
)
from tests.support.children import child, child_world, until
from tests.support.duplex import pipe
from tests.support.modern import LOG_LEVEL, ModernClient, Received, session_meta
from tests.support.modern_server import ModernServer, modern_url
from tests.support.raw import Carrier, Json, Reply, text_of
from tests.support.replicas import user
from tests.support.servers import serve
from tests.support.url_server import UrlServer, event, result, text
from tests.support.urls import url_of
from tests.support.world import World, world


def completes(value: str) -> Json:
    """The params of a completion; the server logs the value, and asks about it."""
    ref = {"type": "ref/prompt", "name": "it"}
    return {"ref": ref, "argument": {"name": "a", "value": value}}


def logs(received: Received) -> list[str]:
    return [
        m["params"]["data"] for m in received.messages if m.get("method") == "notifications/message"
    ]


async def clients(w: World, count: int = 2, **capabilities: Any) -> list[ModernClient]:
    """Anonymous ones that can be asked, each with a connection and an address of its own."""
    return [
        ModernClient(
            await w.carrier_from(f"192.0.2.{number}"), capabilities=capabilities or ELICITS
        )
        for number in range(1, count + 1)
    ]


async def expect_asked(client: ModernClient) -> None:
    """It calls, is asked, and its call goes on with its answer."""
    asked = await client.send("tools/call", QUESTION).result()
    assert asked["resultType"] == "input_required"
    answered = await client.send("tools/call", again(asked, TWO)).result()
    assert json.loads(text_of(answered)) == TWO


# --- who shares with whom ------------------------------------------------------------------------


@pytest.mark.parametrize("capabilities", [ELICITS, {}], ids=["asked", "hears"])
async def test_strangers_that_can_be_asked_or_want_log_messages_share_no_process(
    capabilities: Json,
) -> None:
    async with child_world() as w:
        a, b = [ModernClient(await w.carrier_of(), capabilities=capabilities) for _ in range(2)]
        pids = [await each.text("pid", meta={LOG_LEVEL: "debug"}) for each in (a, b, a, b)]
        assert pids[:2] == pids[2:] and len(set(pids)) == 2, "and each keeps its own"


@pytest.mark.parametrize("user_name", [None, "ann"])
async def test_behind_a_proxy_a_principal_is_a_client_and_nobody_else(
    user_name: str | None,
) -> None:
    """Requests of several clients come on a connection of a proxy."""
    async with child_world() as w:
        carrier = await w.carrier_of(user(user_name) if user_name is not None else None)
        client = ModernClient(Proxied(carrier), capabilities=ELICITS)
        pids = {await client.text("pid") for _ in range(3)}
        assert len(pids) == (3 if user_name is None else 1)
        upstream: Any = w.inside.upstream
        await until(lambda: len(upstream.children._living) == (user_name is not None), "they end")
        await expect_asked(client)


async def test_a_host_without_a_session_pays_for_one_start(tmp_path: Path) -> None:
    """A stock one that can be asked, over real sockets."""
    calls = tmp_path / "calls"
    layer = SessionLayer(child(env={"CALLS": str(calls)}))
    with serve(layer.asgi_app()) as server:

        async def elicit(context: Any, params: Any) -> types.ElicitResult:
            return types.ElicitResult(action="accept", content={"answer": params.message})

        async with asyncio.timeout(30):
            async with Client(server.url(), elicitation_callback=elicit) as client:
                for number in range(5):
                    asked = await client.call_tool("ask", {"question": str(number)})
                    (content,) = asked.content
                    assert isinstance(content, types.TextContent) and str(number) in content.text
            assert starts(calls) == 1


@pytest.mark.parametrize("capabilities", [ELICITS, {}], ids=["asked", "not asked"])
async def test_the_client_at_standard_input_has_one_process_for_all_of_its_calls(
    capabilities: Json,
) -> None:
    """As with a handshake; also next to a running call, and apart from clients over HTTP."""
    async with child_world() as w, pipe(w.layer, modern=True, capabilities=capabilities) as host:
        pids = [await host.text("pid"), await host.text("pid")]
        await host.send("tools/call", {"name": "hold", "arguments": {}})
        pids.append(await host.text("pid"))
        assert len(set(pids)) == 1
        assert await ModernClient(w.carrier).text("pid") not in pids
        session = (await host.start())["sessionId"]
        assert await host.text("pid", meta=session_meta(session)) not in pids, "it has state"


async def test_requests_whose_clients_get_nothing_share_one() -> None:
    """One that wants to receive log messages has a process of its own, else they would be
    nobody's.
    """
    async with child_world() as w:
        nothing, other = ModernClient(w.carrier), ModernClient(await w.carrier_of())
        pid = await nothing.text("pid")
        held = nothing.call("hold")
        assert await other.text("pid") == pid
        sent = nothing.call("log", {"text": "mine"}, meta={LOG_LEVEL: "debug"})
        await sent.result()
        assert (logs(sent), held.messages) == (["mine"], [])


@pytest.mark.parametrize("per", ["principal", "shared"])
async def test_what_is_said_about_one_session_is_not_notified_another_that_shares(per: str) -> None:
    async with child_world(options={"per": per}) as w:
        old = [await w.connected(), await w.connected()]
        await old[0].text("echo", text="A's")
        sent = old[1].call("log", text="whose?")
        await sent.result()
        assert [m for m in sent.reply.messages if "method" in m] == [], "it may be A's"


async def test_each_session_is_asked_what_its_own_request_asks() -> None:
    """All that one client does is its own: it has a process for itself."""
    async with child_world() as w:
        for client in await clients(w):
            session = (await client.create())["sessionId"]
            asked = await client.send("tools/call", QUESTION, session=session).result()
            assert asked["resultType"] == "input_required"


# --- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
async def test_a_client_that_is_away_keeps_nobody_from_being_asked(count: int) -> None:
    async with child_world() as w:
        away, *others = await clients(w, count)
        asked = await away.send("tools/call", QUESTION).result()
        for other in others:
            await expect_asked(other)
        answered = await away.send("tools/call", again(asked, TWO)).result()
        assert json.loads(text_of(answered)) == TWO


async def test_one_client_gets_a_process_for_each_call_that_runs_next_to_others() -> None:
    """Its server may run one call after the other."""
    async with child_world() as w:
        (client,) = await clients(w, 1)
        asked = [await client.send("tools/call", QUESTION).result() for _ in range(3)]
        for each in asked:
            answered = await client.send("tools/call", again(each, TWO)).result()
            assert json.loads(text_of(answered)) == TWO


@pytest.mark.parametrize("does", ["hold", "ask"])
@pytest.mark.parametrize("most", [2, 4, 8, 16])
async def test_one_address_leaves_others_room_and_the_ability_to_ask(most: int, does: str) -> None:
    """Its calls run, or it is asked and stays away. It comes on many connections."""
    async with child_world(options={"max_children": most}) as w:
        arguments = {"question": "well?"} if does == "ask" else {}
        for _ in range(most):
            client = ModernClient(await w.carrier_of(), capabilities=ELICITS)
            sent = client.call(does, arguments)
            if does == "ask":
                await sent.answer()
            else:
                began = partial(has_begun, w, sent)
                await until(began, "it runs, or is refused")
        others = await clients(w, 2)
        for other in others[: 1 if most == 2 else 2]:
            await expect_asked(other)
        if most > 2:
            session = (await others[0].create())["sessionId"]
            assert await others[0].text("count", session=session) == "1"


async def test_a_refused_client_is_told_the_limit_and_no_old_call_ended_for_it() -> None:
    async with child_world(options={"max_children": 4}) as w:
        first, second = [ModernClient(await w.carrier_of(), capabilities=ELICITS) for _ in range(2)]
        (other,) = await clients(w, 1)
        asked = [await each.send("tools/call", QUESTION).result() for each in (first, other)]
        error = await second.send("tools/call", QUESTION).error()
        assert (error["code"], error["data"]["limit"]) == (-31011, "max_children")
        for client, each in zip((first, other), asked, strict=True):
            answered = await client.send("tools/call", again(each, TWO)).result()
            assert json.loads(text_of(answered)) == TWO


async def test_what_the_server_is_can_be_read_while_a_client_that_is_away_has_all_room() -> None:
    async with child_world(options={"max_children": 1}) as w:
        (away,) = await clients(w, 1)
        await away.send("tools/call", QUESTION).result()
        other = ModernClient(w.carrier, capabilities={"sampling": {}})
        assert "capabilities" in await other.send("server/discover", {}).result()


async def test_where_there_is_little_room_the_oldest_call_of_who_is_away_for_long_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "AWAY_IN_SMALL", 0.0)
    async with child_world(options={"max_children": 1}) as w:
        away, here = await clients(w)
        left = await away.send("tools/call", QUESTION).result()
        await expect_asked(here)
        error = await away.send("tools/call", again(left, TWO)).error()
        assert error["code"] == UNKNOWN
        await away.send("tools/call", QUESTION).result()
        session = (await here.create())["sessionId"]
        assert await here.text("count", session=session) == "1"


async def test_a_handshake_waits_for_the_room_of_a_client_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only room there is gets free in a moment."""
    monkeypatch.setattr(rounds, "AWAY_IN_SMALL", 1.0)
    async with child_world(options={"max_children": 1}) as w:
        (away,) = await clients(w, 1)
        left = await away.send("tools/call", QUESTION).result()
        assert await (await w.connected()).text("count") == "1"
        error = await away.send("tools/call", again(left, TWO)).error()
        assert error["code"] == UNKNOWN


async def test_idle_processes_outside_of_sessions_make_room_for_others() -> None:
    """They keep nothing that anybody would miss."""
    async with child_world(options={"max_children": 4}) as w:
        for client in await clients(w, 4):
            await client.text("pid")
        client, other = await clients(w, 2)
        await expect_asked(client)
        await expect_asked(other)
        for _ in range(4):
            session = (await client.create())["sessionId"]
            assert await client.text("count", session=session) == "1"


def _running(w: World) -> int:
    upstream: Any = w.inside.upstream
    return sum(len(slot.calls) for slot in upstream.children._slots.values())


def has_begun(w: World, sent: Received) -> bool:
    """Whether it runs, or was refused."""
    upstream: Any = w.inside.upstream
    ids = {c.request_id for slot in upstream.children._slots.values() for c in slot.calls}
    return sent.id in ids or any("error" in each for each in sent.messages)


class Proxied:
    """A carrier whose requests come through a proxy."""

    def __init__(self, inner: Carrier) -> None:
        self._inner = inner

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Reply:
        """With the header that a proxy adds."""
        return self._inner.send(method, path, [*headers, ("x-forwarded-for", "192.0.2.1")], body)


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


on_each_way = pytest.mark.parametrize(
    "on_response", [True, False], ids=["on the response", "on its own stream"]
)


@on_each_way
async def test_a_url_asks_and_notifies_each_client_about_its_own_requests(
    on_response: bool,
) -> None:
    async with asking_url(on_response=on_response) as w:
        a, b = await clients(w)
        held = a.call("hold", meta={LOG_LEVEL: "debug"})
        await until(lambda: _running(w) == 1, "it runs")
        sent = b.send("completion/complete", completes("B's"), meta={LOG_LEVEL: "debug"})
        assert "code" in text_of(await sent.result()), "B's request cannot be asked about"
        assert (held.messages, logs(sent)) == ([], ["B's"])
        assert (await b.send("tools/call", QUESTION).result())["resultType"] == "input_required"
        assert held.messages == []


@on_each_way
async def test_a_client_of_a_url_that_is_away_keeps_nobody_from_being_asked(
    on_response: bool,
) -> None:
    async with asking_url(on_response=on_response) as w:
        *others, last = await clients(w, 3)
        for client in others:
            asked = await client.send("tools/call", QUESTION).result()
            assert asked["resultType"] == "input_required"
        await expect_asked(last)


async def test_clients_of_a_url_of_the_modern_era_share_a_session_there() -> None:
    """It names the request behind each message."""
    modern = ModernServer()
    async with modern_url(modern) as url, world(server=HTTPServer(url)) as w:
        for client in await clients(w, 4):
            asked = await client.call("ask").result()
            assert asked["resultType"] == "input_required"
        upstream: Any = w.inside.upstream
        assert len(upstream.children._living) == 2, "one before that was known"
