"""A server with a handshake asks clients of the era of 2026-07-28: by results that need input."""

import asyncio
import gc
import json
import os
import signal
import weakref
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mcp_types as types
import pytest
from mcp.client import Client

from mcp_sessions import Conversations, HTTPServer, SessionLayer
from mcp_sessions.server.upstream.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.external.child_requests import RequestSender
from mcp_sessions.server.upstream.external.server_messages import Notifier
from mcp_sessions.server.upstream.external.slot import Clients, Services, Slot
from mcp_sessions.server.upstream.port import PeerError, PeerRequest, UpstreamCall
from tests.server.upstream.external.test_upstream import calls, user
from tests.support.children import child, child_world, is_alive, until
from tests.support.duplex import listening
from tests.support.modern import ModernClient
from tests.support.raw import Json, text_of
from tests.support.world import World, world

UNKNOWN = -31012
ELICITS: Json = {"elicitation": {}}
QUESTION: Json = {"name": "ask", "arguments": {"question": "how many?"}}
TWO: Json = {"action": "accept", "content": {"answer": "two"}}


ANSWERED = {"python": "accept: two", "command": json.dumps(TWO)}
"""What the tool says when it was answered ``TWO``, by the kind of its server."""

KINDS = pytest.mark.parametrize("kind", ANSWERED)


def world_of(kind: str, **limits: Any) -> AbstractAsyncContextManager[World]:
    return child_world(**limits) if kind == "command" else world(**limits)


def asking(w: World, **capabilities: Any) -> ModernClient:
    return ModernClient(w.carrier, capabilities=capabilities or ELICITS)


def again(asked: Json, *answers: Json, params: Json = QUESTION) -> Json:
    """The params of the request that brings the answers."""
    responses = dict(zip(asked["inputRequests"], answers, strict=True))
    return {**params, "inputResponses": responses, "requestState": asked["requestState"]}


async def test_a_question_is_a_result_and_the_call_continues_with_the_answer(
    tmp_path: Path,
) -> None:
    noted = tmp_path / "calls"
    async with child_world(options={"env": {"CALLS": str(noted)}}) as w:
        client = asking(w)
        asked = await client.send("tools/call", QUESTION).result()
        assert asked["resultType"] == "input_required"
        ((_, question),) = asked["inputRequests"].items()
        assert question["params"]["message"] == "how many?"
        result = await client.send("tools/call", again(asked, TWO)).result()
        assert (result["resultType"], json.loads(text_of(result))) == ("complete", TWO)
        notified = json.loads(await client.text("client"))
        assert notified["capabilities"] == ELICITS
    assert calls(noted) == ["started", "ask", "client"], "it ran once"


async def test_a_call_has_as_many_rounds_as_its_server_has_questions() -> None:
    """What it reports belongs to the request that came last."""
    async with child_world() as w:
        client = asking(w)
        params: Json = {"name": "ask twice", "arguments": {}}
        asked = await client.send("tools/call", params, meta={"progressToken": "1st"}).result()
        answers = [{"action": "accept", "content": {"answer": n}} for n in "12"]
        for number, token in ((0, "2nd"), (1, "3rd")):
            ((_, question),) = asked["inputRequests"].items()
            assert question["params"]["message"] == "ab"[number]
            brought = again(asked, answers[number], params=params)
            sent = client.send("tools/call", brought, meta={"progressToken": token})
            asked = await sent.result()
        assert json.loads(text_of(asked)) == answers
        (report,) = [m["params"] for m in sent.messages if "method" in m]
        assert report["progressToken"] == "3rd"


async def test_a_client_is_asked_what_it_declared_and_nothing_else() -> None:
    async with child_world() as w:
        nothing = ModernClient(w.carrier)
        refused = json.loads(await nothing.text("ask", {"question": "well?"}))
        assert refused["code"] == -32601
        client = asking(w, roots={})
        refused = json.loads(await client.text("ask", {"question": "well?"}))
        assert refused["code"] == -32600
        params: Json = {"name": "list roots", "arguments": {}}
        asked = await client.send("tools/call", params).result()
        ((_, question),) = asked["inputRequests"].items()
        assert question["method"] == "roots/list"
        answer = {"roots": [{"uri": "file:///x"}]}
        result = await client.send("tools/call", again(asked, answer, params=params)).result()
        assert json.loads(text_of(result)) == answer


async def test_what_needs_input_is_not_good_for_a_while() -> None:
    """A result of a read says for how long it is; one that asks is none yet."""
    async with child_world() as w:
        client = asking(w, roots={})
        params: Json = {"uri": "test://a"}
        asked = await client.send("resources/read", params).result()
        assert asked["resultType"] == "input_required"
        assert not {"ttlMs", "cacheScope"} & set(asked)
        sent = client.send("resources/read", again(asked, {"roots": []}, params=params))
        result = await sent.result()
        assert result["ttlMs"] == 0 and json.loads(result["contents"][0]["text"]) == {"roots": []}


async def test_the_rounds_of_one_call_are_of_one_conversation() -> None:
    """Its host says of each request which conversation it is of."""
    async with child_world(conversations=Conversations()) as w:
        client = asking(w)
        asked: list[Json] = []
        for name in ("one", "two"):
            sent = client.send("tools/call", QUESTION, meta={"openai/session": name})
            asked.append(await sent.result())
        for number, name in ((0, "two"), (1, "one")):
            wrong = client.send(
                "tools/call", again(asked[number], TWO), meta={"openai/session": name}
            )
            assert (await wrong.error())["code"] == UNKNOWN
        for number, name in enumerate(("one", "two")):
            sent = client.send(
                "tools/call", again(asked[number], TWO), meta={"openai/session": name}
            )
            assert json.loads(text_of(await sent.result())) == TWO


@KINDS
async def test_what_names_a_call_opens_nothing_to_others_and_once_to_its_own(kind: str) -> None:
    async with world_of(kind) as w:
        alice, bob = [
            ModernClient(await w.carrier_of(user(name)), capabilities=ELICITS)
            for name in ("alice", "bob")
        ]
        session = (await alice.create())["sessionId"]
        other = (await alice.create())["sessionId"]
        asked = await alice.send("tools/call", QUESTION, session=session).result()
        right = again(asked, TWO)
        wrong = [
            bob.send("tools/call", right),
            alice.send("tools/call", right),
            alice.send("tools/call", right, session=other),
            alice.send("tools/call", {**right, "name": "count"}, session=session),
            alice.send("tools/call", {**right, "requestState": "mcp-sessions-call:x"}),
        ]
        for sent in wrong:
            assert (await sent.error())["code"] == UNKNOWN
        malformed: Json = {**right, "inputResponses": dict.fromkeys(asked["inputRequests"], "two")}
        error = await alice.send("tools/call", malformed, session=session).error()
        assert error["code"] == -32602
        copies = [alice.send("tools/call", right, session=session) for _ in range(3)]
        results = [await sent.result() for sent in copies]
        assert text_of(results[0]) == ANSWERED[kind]
        copy = await alice.send("tools/call", right, session=session).result()
        assert [*results, copy] == results[:1] * 4, "it came four times, and ran once"
        assert kind == "command" or w.box.calls == ["ask"]
        other_answer = again(asked, {"action": "decline"})
        error = await alice.send("tools/call", other_answer, session=session).error()
        assert error["code"] == UNKNOWN, "it was used"


async def test_an_answer_that_is_missing_is_asked_for_again() -> None:
    async with child_world() as w:
        client = asking(w)
        asked = await client.send("tools/call", QUESTION).result()
        empty: Json = {**QUESTION, "requestState": asked["requestState"]}
        once_more = await client.send("tools/call", empty).result()
        assert once_more["inputRequests"] == asked["inputRequests"]
        assert once_more["requestState"] != asked["requestState"]
        result = await client.send("tools/call", again(once_more, TWO)).result()
        assert json.loads(text_of(result)) == TWO


async def test_a_client_that_does_not_come_back_keeps_neither_the_call_nor_the_process() -> None:
    async with child_world(question_timeout=0.1) as w:
        client = asking(w)
        session = (await client.create())["sessionId"]
        asked = await client.send("tools/call", QUESTION, session=session).result()
        # The server answers nobody else before its question has ended.
        assert await client.text("count", session=session) == "2"
        error = await client.send("tools/call", again(asked, TWO), session=session).error()
        assert error["code"] == UNKNOWN


@pytest.mark.parametrize("limits", [{"max_detached_requests": 1}, {"max_unread_bytes": 400_000}])
@KINDS
async def test_where_too_many_wait_the_oldest_goes(kind: str, limits: Any) -> None:
    async with world_of(kind, **limits) as w:
        client = ModernClient(await w.carrier_of(user("alice")), capabilities=ELICITS)
        meta = {"x.y/z": "m" * 60_000}
        old, new = [await client.send("tools/call", QUESTION, meta=meta).result() for _ in "12"]
        error = await client.send("tools/call", again(old, TWO)).error()
        assert error["code"] == UNKNOWN
        result = await client.send("tools/call", again(new, TWO)).result()
        assert text_of(result) == ANSWERED[kind]


@KINDS
async def test_a_layer_that_stops_waits_for_nobody_who_was_asked(kind: str) -> None:
    async with world_of(kind) as w:
        asked = await asking(w).send("tools/call", QUESTION).result()
    assert asked["resultType"] == "input_required", "and none of its processes is left"


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_server_that_does_not_wait_for_the_answer_has_its_result_kept_if_that_is_small(
    size: int,
) -> None:
    async with child_world() as w:
        client = asking(w, roots={})
        session = (await client.create())["sessionId"]
        params: Json = {"name": "ask in vain", "arguments": {"size": size}}
        asked = await client.send("tools/call", params, session=session).result()
        assert await client.text("count", session=session) == "2"
        brought = again(asked, {"roots": []}, params=params)
        answer = await client.send("tools/call", brought, session=session).answer()
        if size == 10:
            assert text_of(answer["result"]) == "x" * size
        else:
            assert answer["error"]["code"] == UNKNOWN


async def test_a_process_that_dies_meanwhile_is_a_definite_answer() -> None:
    async with child_world() as w:
        client = asking(w)
        pid = int(await client.text("pid"))
        asked = await client.send("tools/call", QUESTION).result()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid), "it is dead")
        assert (await client.send("tools/call", again(asked, TWO)).error())["code"] == UNKNOWN
        assert int(await client.text("pid")) != pid


async def test_a_client_that_leaves_in_the_middle_cancels_its_call(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    async with child_world(options={"env": {"CALLS": str(noted)}}) as w:
        sent = asking(w).call("wait")
        await until(lambda: "wait" in calls(noted), "it runs")
        sent.leave()
        await until(lambda: len(calls(noted)) > 2, "it was told")
        assert calls(noted)[2] == "cancelled True"


async def test_where_several_calls_of_different_clients_run_nobody_is_asked_for_another() -> None:
    """On a pipe a server does not say which of them asks."""

    async def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is started, and nothing announced")

    slot = Slot(Services(none, none, Notifier(), "the server"), None, {}, Clients())
    calls = [
        CallInRounds(cast(UpstreamCall, SimpleNamespace(request_id=n)), ELICITS) for n in range(2)
    ]
    sender = RequestSender({}, None, is_asked=True)
    slot.calls.update(dict.fromkeys(cast("list[UpstreamCall]", calls), sender))
    with pytest.raises(PeerError) as refused:
        await slot.asked("elicitation/create", {}, None)
    assert refused.value.code == -32600
    about = cast(UpstreamCall, calls[0])
    asking = asyncio.create_task(slot.asked("elicitation/create", {}, None, about))
    assert await calls[0].turn() == {"1": {"method": "elicitation/create", "params": {}}}
    calls[0].end()
    with pytest.raises(PeerError):
        await asking
    assert await calls[0].turn() is None


async def test_a_call_that_is_given_up_leaves_nothing_of_its_request_in_memory() -> None:
    """Also before the collector of cycles runs: what it holds may be large."""
    call = CallInRounds(cast(UpstreamCall, SimpleNamespace(request_id=1)), ELICITS)
    held = weakref.ref(call)
    asking = asyncio.create_task(call.send_request(PeerRequest("elicitation/create", {})))
    gc.disable()
    try:
        await call.turn()
        call.end()
        await asyncio.wait({asking})
        assert isinstance(asking.exception(), PeerError)
        del asking, call
        assert held() is None
    finally:
        gc.enable()


async def test_a_layer_behind_a_layer_has_its_own_calls_back() -> None:
    """Both say in the same words which call waits; and so might one behind them."""
    inner = SessionLayer(child())
    async with inner.lifespan(), listening(inner.asgi_app()) as port:
        url = f"http://127.0.0.1:{port}/mcp"
        middle = SessionLayer(HTTPServer(url))
        async with middle.lifespan(), listening(middle.asgi_app()) as second:
            async with world(server=HTTPServer(f"http://127.0.0.1:{second}/mcp")) as w:
                client = asking(w)
                asked = await client.send("tools/call", QUESTION).result()
                assert asked["resultType"] == "input_required"
                result = await client.send("tools/call", again(asked, TWO)).result()
                assert json.loads(text_of(result)) == TWO


async def test_a_stock_client_answers_what_it_is_asked() -> None:
    async def elicit(context: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"answer": params.message})

    layer = SessionLayer(child())
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port, asyncio.timeout(20):
        url = f"http://127.0.0.1:{port}/mcp"
        async with Client(url, elicitation_callback=elicit) as client:
            assert client.session.protocol_version == "2026-07-28"
            result = await client.call_tool("ask", {"question": "how many?"})
            (content,) = result.content
            assert isinstance(content, types.TextContent)
            assert json.loads(content.text)["content"] == {"answer": "how many?"}
