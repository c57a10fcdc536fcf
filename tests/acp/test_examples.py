"""The JSON examples of ACP's page "Session Setup", as they are printed there.

Changed are only the names of what is at another place here: the directory, the URL, the id that the
agent gave.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from starlette.requests import Request

from mcp_sessions.acp import current_conversation
from mcp_sessions.layer import SessionLayer
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.conversations import (
    Json,
    RawClient,
    ScriptedAgent,
    conversation,
    text_of,
    text_of_result,
)
from tests.support.servers import serve

CREATING = """
{
  "jsonrpc": "2.0",
  "id": 1,
  "method": "session/new",
  "params": {
    "cwd": "/home/user/project",
    "mcpServers": [
      {
        "name": "filesystem",
        "command": "/path/to/mcp-server",
        "args": ["--stdio"],
        "env": []
      }
    ]
  }
}
"""
LOADING = """
{
  "jsonrpc": "2.0",
  "id": 1,
  "method": "session/load",
  "params": {
    "sessionId": "sess_789xyz",
    "cwd": "/home/user/project",
    "mcpServers": [
      {
        "name": "filesystem",
        "command": "/path/to/mcp-server",
        "args": ["--mode", "filesystem"],
        "env": []
      }
    ]
  }
}
"""
REPLAYED = """
[{
  "jsonrpc": "2.0",
  "method": "session/update",
  "params": {
    "sessionId": "sess_789xyz",
    "update": {
      "sessionUpdate": "user_message_chunk",
      "content": {
        "type": "text",
        "text": "What's the capital of France?"
      }
    }
  }
},
{
  "jsonrpc": "2.0",
  "method": "session/update",
  "params": {
    "sessionId": "sess_789xyz",
    "update": {
      "sessionUpdate": "agent_message_chunk",
      "content": {
        "type": "text",
        "text": "The capital of France is Paris."
      }
    }
  }
}]
"""
LOADED = """
{
  "jsonrpc": "2.0",
  "id": 1,
  "result": null
}
"""
STDIO = """
{
  "name": "filesystem",
  "command": "/path/to/mcp-server",
  "args": ["--stdio"],
  "env": [
    {
      "name": "API_KEY",
      "value": "secret123"
    }
  ]
}
"""
HTTP = """
{
  "type": "http",
  "name": "api-server",
  "url": "https://api.example.com/mcp",
  "headers": [
    {
      "name": "Authorization",
      "value": "Bearer token123"
    },
    {
      "name": "Content-Type",
      "value": "application/json"
    }
  ]
}
"""
SSE = """
{
  "type": "sse",
  "name": "event-stream",
  "url": "https://events.example.com/mcp",
  "headers": [
    {
      "name": "X-API-Key",
      "value": "apikey456"
    }
  ]
}
"""


def example(text: str, **changed: Any) -> Any:
    """An example, with other values for the members of these names, wherever they are."""

    def put_in(members: Json) -> Json:
        return {name: changed.get(name, value) for name, value in members.items()}

    return json.loads(text, object_hook=put_in)


async def answer_to(client: RawClient, request: Json) -> Json:
    """The answer to a request that is sent with its own id."""
    before = len(client.strays)
    await client.send_line(json.dumps(request).encode())
    await client.until(lambda: len(client.strays) > before)
    return client.strays[before]


async def answers_as_printed(agent: ScriptedAgent, session_id: str, text: str) -> None:
    await agent.say(session_id, "The capital of France is Paris.")


async def test_a_session_is_created_and_loaded_as_the_examples_do(tmp_path: Path) -> None:
    """The program of the examples exists nowhere. Its entry costs nothing but its tools."""
    store = tmp_path / "conversations.db"
    async with conversation(ScriptedAgent(answers_as_printed), SQLiteStore(store)) as client:
        answer = await answer_to(client, example(CREATING, cwd=str(tmp_path)))
        session_id = answer["result"]["sessionId"]
        assert {**answer, "result": {"sessionId": session_id}} == answer
        await client.until(lambda: client.updates(session_id))
        assert "'filesystem' cannot be reached" in text_of(client.updates(session_id)[0])
        assert await client.prompt(session_id, "What's the capital of France?")

    async with conversation(ScriptedAgent(answers_as_printed), SQLiteStore(store)) as client:
        initialized = client.received[0]["result"]
        assert initialized["protocolVersion"] == 1
        assert initialized["agentCapabilities"]["loadSession"] is True
        assert initialized["agentCapabilities"]["mcpCapabilities"] == {"http": True, "sse": True}
        request = example(LOADING, cwd=str(tmp_path), sessionId=session_id)
        assert await answer_to(client, request) == example(LOADED)
        shown = [
            message for message in client.received if message.get("method") == "session/update"
        ]
        for expected, message in zip(
            example(REPLAYED, sessionId=session_id), shown[1:3], strict=True
        ):
            update = message["params"]["update"]
            found = {name: update[name] for name in expected["params"]["update"]}
            assert {**message, "params": {**message["params"], "update": found}} == expected
        # "All": the answer comes after them.
        assert client.received.index(client.strays[0]) == len(client.received) - 1


async def says_headers(agent: ScriptedAgent, session_id: str, name: str) -> None:
    result = await current_conversation().mcp[name].call_tool("headers", {})
    await agent.say(session_id, text_of_result(result))


@pytest.mark.parametrize("method", ["session/new", "session/load"])
async def test_the_servers_of_the_examples_are_connected_with_their_headers(
    method: str, tmp_path: Path
) -> None:
    """The example over HTTP was "Internal error": it names ``Content-Type``."""
    server = MCPServer[Any]("headers")

    @server.tool()
    async def headers(ctx: Context[Any, Any]) -> str:  # pyright: ignore[reportUnusedFunction]
        request = ctx.request_context.request
        assert isinstance(request, Request)
        return json.dumps(dict(request.headers))

    with serve(SessionLayer(server).asgi_app()) as modern, serve(server.sse_app()) as old:
        agent = ScriptedAgent(says_headers)
        async with conversation(agent) as client:
            request = example(CREATING, cwd=str(tmp_path))
            if method == "session/load":
                created = (await answer_to(client, request))["result"]["sessionId"]
                await client.until(client.updates)
                request = example(LOADING, cwd=str(tmp_path), sessionId=created)
            request["params"]["mcpServers"] = [
                example(STDIO),
                example(HTTP, url=modern.url()),
                example(SSE, url=old.url("/sse")),
            ]
            answer = await answer_to(client, request)
            session_id = (answer["result"] or request["params"])["sessionId"]
            await client.until(client.updates)
            for name, header, value in (
                ("api-server", "authorization", "Bearer token123"),
                ("api-server", "content-type", "application/json"),
                ("event-stream", "x-api-key", "apikey456"),
            ):
                await client.prompt(session_id, name)
                assert json.loads(text_of(client.updates(session_id)[-1]))[header] == value
        assert "secret123" not in json.dumps(client.received)
