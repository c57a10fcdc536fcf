"""Questions of the server to the application: asked once, and withdrawn when the server withdraws
them.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client
from mcp.client import ClientRequestContext
from websockets.asyncio.server import ServerConnection, serve

from mcp_sessions.client_transport import resumable
from tests.support.apps import DEPRECATED
from tests.support.board import Stage
from tests.support.resuming import QUICK, text_of
from tests.support.scripted import OURS, Entry, Exchange, ScriptedServer, status, tool_result

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

Json = dict[str, Any]


def question(question_id: object, text: str) -> Json:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    params = {"mode": "form", "message": text, "requestedSchema": schema}
    return {"jsonrpc": "2.0", "id": question_id, "method": "elicitation/create", "params": params}


def given_up(question_id: object) -> Json:
    """It does not want to know any more."""
    params = {"requestId": question_id, "reason": "timed out"}
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}


class Person:
    """Answers with what was asked, or thinks until nobody wants to know any more."""

    def __init__(self, *, thinks: bool = False) -> None:
        self.stage = Stage()
        self.asked: list[str] = []
        self._thinks = thinks

    async def answer(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        self.asked.append(params.message)
        self.stage.mark("asked")
        try:
            if self._thinks:
                await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            self.stage.mark("given up")
            raise
        return types.ElicitResult(action="accept", content={"answer": params.message})


@asynccontextmanager
async def client_of(url: str, person: Person) -> AsyncGenerator[Client]:
    with anyio.fail_after(30):
        async with Client(
            resumable(url, policy=QUICK), mode="legacy", elicitation_callback=person.answer
        ) as client:
            yield client


async def test_a_question_that_is_given_up_over_http_is_not_thought_about_and_not_answered() -> (
    None
):
    person = Person(thinks=True)

    async def asks_and_gives_up(exchange: Exchange) -> None:
        exchange.event(question("q", "Well?"))
        await person.stage.reached("asked")
        exchange.event(given_up("q"))
        await person.stage.reached("given up")
        done = {"jsonrpc": "2.0", "id": exchange.message["id"], "result": tool_result("without")}
        exchange.event(done)
        exchange.end()

    async with ScriptedServer({"tools/call": asks_and_gives_up}) as server:
        async with client_of(server.url(), person) as client:
            assert text_of(await client.call_tool("echo", {})) == "without"

        assert [e.message for e in server.requests if e.verb == "POST" and not e.method] == []


async def test_a_question_that_is_given_up_over_websocket_is_not_thought_about_either() -> None:
    person, answers = Person(thinks=True), list[Json]()

    async def converse(socket: ServerConnection) -> None:
        async for frame in socket:
            message: Json = json.loads(frame)
            match message.get("method"):
                case "initialize":
                    version = message["params"]["protocolVersion"]
                    capabilities = {"tools": {}, "sessions": {}, "extensions": OURS}
                    info = {"name": "scripted", "version": "1"}
                    result: Json = {"protocolVersion": version, "serverInfo": info}
                    result["capabilities"] = capabilities
                case "session/start":
                    result = {"sessionId": "s-1", "sessionEventId": "0"}
                case "tools/call":
                    await socket.send(json.dumps(question("q", "Well?")))
                    await person.stage.reached("asked")
                    await socket.send(json.dumps(given_up("q")))
                    await person.stage.reached("given up")
                    result = tool_result("without")
                case None:
                    answers.append(message)
                    continue
                case _:
                    result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
            if "id" in message:
                answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
                await socket.send(json.dumps(answer))

    subprotocols: Any = ["mcp"]
    async with serve(converse, "127.0.0.1", 0, subprotocols=subprotocols) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with client_of(f"ws://127.0.0.1:{port}/mcp", person) as client:
            assert text_of(await client.call_tool("echo", {})) == "without"
    assert answers == []


async def test_a_server_that_began_anew_gets_the_answer_to_what_it_asks_and_to_nothing_before() -> (
    None
):
    """The ids of its questions begin at 0 again, as those of the SDK's own servers do."""
    person = Person()
    asks = iter(["one", None, "two"])

    async def asks_once_forgets_and_asks(exchange: Exchange) -> None:
        text = next(asks)
        if text is None:
            exchange.respond(404)
            return
        exchange.event(question(0, text))

        def answered() -> Json | None:
            found = [e.message for e in server.requests if e.verb == "POST" and not e.method]
            return found[-1] if len(found) == (1 if text == "one" else 2) else None

        answer = await server.board.until(answered, what=f"the answer to {text}")
        content = answer["result"]["content"]["answer"]
        done = {"jsonrpc": "2.0", "id": exchange.message["id"], "result": tool_result(content)}
        exchange.event(done)
        exchange.end()

    async with ScriptedServer(
        {"tools/call": asks_once_forgets_and_asks, "ping": status(404)},
        capabilities={"tools": {}},
    ) as server:
        async with client_of(server.url(), person) as client:
            assert text_of(await client.call_tool("echo", {})) == "one"
            # Its session is lost: another handshake, and the call, which never ran, once more.
            assert text_of(await client.call_tool("echo", {})) == "two"
    assert person.asked == ["one", "two"]


@pytest.mark.parametrize("how", [status(503), status(502), Exchange.reset])
async def test_an_answer_that_the_server_cannot_take_now_is_sent_again(how: Entry) -> None:
    """ASK5. Its store may be away for a moment, or a proxy may not reach it. The answer waited for
    another connection, and this one was not lost: the call never ended.
    """
    person, refusals = Person(), iter([how, how])
    taken = list[Json]()

    async def asks(exchange: Exchange) -> None:
        exchange.event(question("q", "Well?"))
        await server.board.until(lambda: taken or None, what=lambda: "the answer")
        text = taken[0]["result"]["content"]["answer"]
        done = {"jsonrpc": "2.0", "id": exchange.message["id"], "result": tool_result(text)}
        exchange.event(done)
        exchange.end()

    def is_answered(exchange: Exchange) -> None:
        refusal = next(refusals, None)
        if refusal is not None:
            refusal(exchange)
        else:
            taken.append(exchange.message)

    async with ScriptedServer({"tools/call": asks, "POST": is_answered}) as server:
        async with client_of(server.url(), person) as client:
            assert text_of(await client.call_tool("echo", {})) == "Well?"
    assert (person.asked, len(taken)) == (["Well?"], 1)
