"""The JSON examples of the two documents that the specification joins, sent to our server.

They are as they are printed there. Only what a server chooses is changed: ids of sessions,
positions and ``state``. "MCP Session Elevation" prints its messages without ``"jsonrpc": "2.0"``,
which JSON-RPC asks for.
"""

import json
from typing import Any, cast

from mcp.server import MCPServer

from mcp_sessions import SessionLayer, current_session
from tests.support.raw import EXTENSION, SESSION, Json, RawClient, in_process

START = '{ "id": 1, "method": "session/start", "params": {} }'
RESUME = """
{
  "id": 2,
  "method": "session/resume",
  "params": {
    "sessionId": "s_abc123",
    "lastSessionEventId": "se_305"
  }
}
"""
RESUMED = '{ "id": 2, "result": { "resumed": true, "catchup": true } }'
OUTSIDE = '{ "id": 2, "result": { "resumed": true, "catchup": false } }'
COALESCED = """
{
  "method": "notifications/resources/updated",
  "params": {
    "sessionEventId": "se_310",
    "uri": "doc:/foo"
  }
}
"""
END = '{ "id": 3, "method": "session/end", "params": { "sessionId": "s_abc123" } }'
ENDED = '{ "id": 3, "result": {} }'

DECLARED = '{ "capabilities": { "sessions": {} } }'
CREATE = '{ "jsonrpc": "2.0", "id": 1, "method": "sessions/create" }'
USE = """
{
  "jsonrpc": "2.0",
  "id": 3,
  "method": "tools/call",
  "params": {
    "name": "search_code",
    "arguments": {
      "query": "def fizz_buzz()"
    },
    "_meta": {
      "io.modelcontextprotocol/session": {
        "sessionId": "sess-a1b2c3d4e5f6",
        "state": "bGFuZ3VhZ2U9ZW4="
      }
    }
  }
}
"""
DELETE = """
{
  "jsonrpc": "2.0",
  "id": 2,
  "method": "sessions/delete",
  "params": {
    "_meta": {
      "io.modelcontextprotocol/session": {
        "sessionId": "sess-a1b2c3d4e5f6"
      }
    }
  }
}
"""
DELETED = '{ "jsonrpc": "2.0", "id": 2, "result": {} }'
NOT_FOUND = """
{
  "jsonrpc": "2.0",
  "id": 42,
  "error": {
    "code": -32043,
    "message": "Session not found",
    "data": {
      "sessionId": "sess-a1b2c3d4e5f6"
    }
  }
}
"""
VECTOR_CREATE = '{"jsonrpc":"2.0","id":1,"method":"sessions/create"}'
VECTOR_USE = (
    '{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"echo","arguments":{"msg":"hi"},'
    '"_meta":{"io.modelcontextprotocol/session":{"sessionId":"sess-abc123","state":"eyJrIjoidiJ9"}}}}'
)
VECTOR_UNKNOWN = (
    '{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"echo","arguments":{},'
    '"_meta":{"io.modelcontextprotocol/session":{"sessionId":"sess-invalid"}}}}'
)
VECTOR_NOT_FOUND = (
    '{"jsonrpc":"2.0","id":3,"error":{"code":-32043,"message":"Session not found",'
    '"data":{"sessionId":"sess-invalid"}}}'
)


def example(text: str, **changed: Any) -> Json:
    """An example, with other values for the members of these names, wherever they are."""

    def put_in(members: Json) -> Json:
        return {name: changed.get(name, value) for name, value in members.items()}

    return {"jsonrpc": "2.0", **json.loads(text, object_hook=put_in)}


def holds(printed: Any, found: Any) -> bool:
    """Whether a message has all that is printed. A server may say more."""
    if isinstance(printed, dict):
        members = cast("Json", printed)
        return isinstance(found, dict) and all(
            name in found and holds(value, found[name]) for name, value in members.items()
        )
    return bool(printed == found)


def make_layer() -> SessionLayer:
    server = MCPServer[Any]("documents")

    @server.tool()
    async def search_code(query: str) -> str:  # pyright: ignore[reportUnusedFunction]
        current_session().state["language"] = "python"
        return "Found 3 matches."

    @server.tool()
    async def echo(msg: str) -> str:  # pyright: ignore[reportUnusedFunction]
        current_session().state["k"] = "v2"
        return msg

    @server.resource("doc:///foo")
    async def foo() -> str:  # pyright: ignore[reportUnusedFunction]
        return "foo"

    return SessionLayer(server)


async def sent(client: RawClient, message: Json) -> Json:
    return await client.post(message).answer(message["id"])


async def test_the_examples_of_session_elevation() -> None:
    layer = make_layer()
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        client = RawClient(carrier, capabilities={"extensions": {EXTENSION: {}}})
        await client.initialize()
        client.get()
        started = (await sent(client, example(START)))["result"]
        session = started["sessionId"]
        await client.result("resources/subscribe", {"uri": "doc:/foo"})

        other = RawClient(carrier, capabilities={"extensions": {EXTENSION: {}}})
        await other.initialize()
        stream = other.get()
        for _ in range(3):
            await layer.notify_resource_updated("doc:/foo")
        named = {"sessionId": session, "lastSessionEventId": started["sessionEventId"]}
        assert holds(example(RESUMED), await sent(other, example(RESUME, **named)))
        [event] = await stream.has(1)
        position = event["params"]["sessionEventId"]
        assert holds(example(COALESCED, sessionEventId=position), event)

        outside = await sent(other, example(RESUME, sessionId=session))
        assert holds(example(OUTSIDE), outside)

        assert await sent(other, example(END, sessionId=session)) == example(ENDED)
        gone = await sent(other, example(RESUME, **named))
        assert gone["error"]["code"] == -32043
        for unknown in (example(RESUME), example(END)):
            assert (await sent(other, unknown))["error"]["code"] == -32043


async def test_the_examples_of_data_layer_sessions() -> None:
    layer = make_layer()
    async with layer.lifespan(), in_process(layer.asgi_app()) as carrier:
        client = RawClient(carrier)
        declared = await client.initialize()
        assert holds(json.loads(DECLARED), {"capabilities": declared["capabilities"]})

        for create, use, text in (
            (CREATE, USE, "Found 3 matches."),
            (VECTOR_CREATE, VECTOR_USE, "hi"),
        ):
            created = (await sent(client, example(create)))["result"]["session"]
            assert created.keys() == {"sessionId", "expiresAt", "state"}
            named = {"sessionId": created["sessionId"], "state": created["state"]}
            result = (await sent(client, example(use, **named)))["result"]
            assert result["content"] == [{"type": "text", "text": text}]
            used = result["_meta"][SESSION]
            assert used.keys() == {"sessionId", "state", "expiresAt"}
            assert used["sessionId"] == created["sessionId"]
            assert used["state"] != created["state"], "a tool changed it"

            deletion = example(DELETE, sessionId=created["sessionId"])
            assert await sent(client, deletion) == example(DELETED)
            refused = await sent(client, {**example(use, **named), "id": 42})
            assert refused == example(NOT_FOUND, sessionId=created["sessionId"])

        assert await sent(client, example(VECTOR_UNKNOWN)) == example(VECTOR_NOT_FOUND)
        unknown = await sent(client, {**example(USE), "id": 42})
        assert unknown == example(NOT_FOUND)
