"""Calls that ask by their results: answered after a cut, and by a later run of the program."""

import json
import math
from pathlib import Path
from typing import Any, cast

import anyio
import mcp_types as types
import pytest
from mcp import Client
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError

from mcp_sessions.client.jar import FileJar, OpenCalls
from mcp_sessions.client.sdk import ResumableTransport, is_outcome_unknown
from mcp_sessions.client_transport import resumable
from mcp_sessions.layer import SessionLayer
from tests.support.asking import Answer
from tests.support.board import Board
from tests.support.proxy import TcpProxy
from tests.support.resuming import QUICK, text_of
from tests.support.servers import serve

Json = dict[str, Any]
MODERN = "2026-07-28"


def asking(ran: list[str]) -> SessionLayer:
    """A server whose tool asks twice."""
    mcp = MCPServer("asking")

    @mcp.tool()
    async def order(ctx: Context[Any], item: str) -> str:
        ran.append(item)
        answers = [await ctx.elicit(question, Answer) for question in ("colour?", "size?")]
        said = [getattr(each, "data", Answer(answer="-")).answer for each in answers]
        return f"{item} {' '.join(said)}"

    _ = order
    return SessionLayer(mcp)


def accepted(text: str) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"answer": text})


@pytest.mark.parametrize("scheme", ["http", "ws"])
@pytest.mark.parametrize("mode", [MODERN, "legacy"])
async def test_an_answer_reaches_its_call_after_a_cut(mode: str, scheme: str) -> None:
    """The connection is lost after each question, while the user thinks. The tool runs once."""
    ran: list[str] = []
    with serve(asking(ran).asgi_app()) as server:
        async with TcpProxy(server.host, server.port) as proxy:

            async def answer(context: Any, params: Any) -> types.ElicitResult:
                proxy.cut_all()
                return accepted(f"<{params.message}>")

            transport = resumable(proxy.url(scheme=scheme), policy=QUICK)
            client = Client(transport, mode=cast(Any, mode), elicitation_callback=answer)
            with anyio.fail_after(40):
                async with client:
                    result = await client.call_tool("order", {"item": "cup"})
                    assert transport.open_calls == ()
            assert text_of(result) == "cup <colour?> <size?>"
    assert ran == ["cup"]


async def stopped_while_asked(transport: ResumableTransport, board: Board) -> None:
    """One run of a program: its user is asked the second question, and the program stops."""
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> types.ElicitResult:
        asked.append(params.message)
        board.announce()
        if params.message == "size?":
            await anyio.sleep_forever()
        return accepted("blue")

    async with Client(transport, mode=MODERN, elicitation_callback=answer) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "order", {"item": "cup"})
            await board.until(lambda: "size?" in asked, what="the second question")
            (call,) = transport.open_calls
            assert (call.method, call.params["name"]) == ("tools/call", "order")
            assert call.request_state not in repr(call)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_later_run_is_notified_that_a_question_is_open_and_answers_it(
    tmp_path: Path, scheme: str
) -> None:
    ran: list[str] = []
    jar = FileJar(tmp_path / "jar.json")
    with serve(asking(ran).asgi_app()) as server, anyio.fail_after(40):
        url = server.url().replace("http", scheme, 1)
        await stopped_while_asked(resumable(url, jar=jar, policy=QUICK), Board())

        asked: list[str] = []

        async def answer(context: Any, params: Any) -> types.ElicitResult:
            asked.append(params.message)
            return accepted("large")

        transport = resumable(url, jar=jar, policy=QUICK)
        async with Client(transport, mode=MODERN, elicitation_callback=answer) as client:
            (call,) = transport.open_calls
            assert [each["params"]["message"] for each in call.questions.values()] == ["size?"]
            result = await client.call_tool(
                call.params["name"], call.params["arguments"], request_state=call.request_state
            )
            assert transport.open_calls == ()
        assert (text_of(result), asked, ran) == ("cup blue large", ["size?"], ["cup"])

        again = resumable(url, jar=jar, policy=QUICK)
        async with Client(again, mode=MODERN, elicitation_callback=answer) as client:
            assert again.open_calls == (), "it was answered"
            with pytest.raises(MCPError) as failed:
                await client.call_tool("order", {"item": "cup"}, request_state=call.request_state)
            assert is_outcome_unknown(failed.value)
    assert ran == ["cup"]


def asks(state: str, question: str = "?") -> Json:
    questions = {"1": {"method": "elicitation/create", "params": {"message": question}}}
    return {"resultType": "input_required", "requestState": state, "inputRequests": questions}


def request(**params: Any) -> Json:
    return {"method": "tools/call", "params": {"name": "order", **params}}


def states(calls: OpenCalls) -> list[str]:
    return [call.request_state for call in calls.all()]


def test_a_call_is_open_until_the_request_that_continues_it_is_answered() -> None:
    calls = OpenCalls()
    assert calls.answered(request(_meta={"x": 1}), asks("a"))
    assert [call.params for call in calls.all()] == [{"name": "order"}]
    assert not calls.answered(request(), {"content": []}), "another call is none of it"
    assert calls.answered(request(requestState="a", inputResponses={}), asks("b"))
    assert [(call.params, call.request_state) for call in calls.all()] == [({"name": "order"}, "b")]
    assert calls.answered(request(requestState="b"), None), "an error is an answer"
    assert calls.all() == ()


def test_open_calls_are_bounded_in_number_and_in_bytes() -> None:
    calls = OpenCalls()
    for number in range(20):
        calls.answered(request(), asks(str(number)))
    assert states(calls) == [str(number) for number in range(4, 20)]
    calls.answered(request(), asks("large", "?" * 60_000))
    kept = len(states(calls))
    assert states(calls)[-1] == "large" and kept > 1
    calls.answered(request(), asks("as large", "?" * 60_000))
    assert states(calls) == ["as large"]
    calls.answered(request(), asks("too large", "?" * 70_000))
    calls.answered(request(), asks("?" * 70_000))
    assert states(calls) == ["as large"], "what is too large alone pushes out nothing"


@pytest.mark.parametrize("wrong", [None, 1, math.pi, [], {}, {"method": "x"}, {"method": 1}])
def test_an_open_call_that_cannot_be_read_is_left_out(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "jar.json"
    jar = FileJar(path)
    good: Json = {"method": "tools/call", "request_state": "s", "params": {}, "questions": {}}
    session = {"session_id": "s-1", "open_calls": [wrong, good]}
    content = {"version": 1, "sessions": {'["https://host", "", 0]': session}}
    path.write_text(json.dumps(content))
    slot = jar.open("https://host")
    assert slot is not None
    saved = slot.load()
    slot.close()
    assert saved is not None and [call.request_state for call in saved.open_calls] == ["s"]
