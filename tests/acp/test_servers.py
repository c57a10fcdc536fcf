"""The MCP servers of a conversation: over stdio, HTTP and SSE, and again after a load."""

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from starlette.applications import Starlette
from starlette.requests import Request

from mcp_sessions.acp import AcpSessionLayer, current_conversation
from mcp_sessions.ids import SessionId
from mcp_sessions.layer import SessionLayer
from mcp_sessions.security import mint_key
from mcp_sessions.server.requests.handle import current_session
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.board import Board
from tests.support.conversations import (
    Json,
    KeptMemory,
    RawClient,
    ScriptedAgent,
    conversation,
    text_of,
    text_of_result,
    two_clients,
)
from tests.support.servers import RunningServer, serve

COUNTER = """
from mcp.server import MCPServer
from mcp_sessions import SessionLayer, current_session
mcp = MCPServer("counter")
@mcp.tool()
async def count() -> str:
    session = current_session(default=None)
    if session is None or session.source != "session":
        return "no session"
    async with session.data.edit() as data:
        data["n"] = data.get("n", 0) + 1
        return f"{data['n']} in {session.id}"
SessionLayer(mcp, store="sqlite:///counter.db").run("stdio")
"""

VARIABLES = """
import json, os
from mcp.server import MCPServer
server = MCPServer("variables")
@server.tool()
def variables() -> str:
    return json.dumps(dict(os.environ))
server.run("stdio")
"""


def make_server() -> MCPServer[Any]:
    """Counts in its session, and says with which headers it was asked."""
    server = MCPServer[Any]("counter")

    @server.tool()
    async def count() -> str:  # pyright: ignore[reportUnusedFunction]
        session = current_session(default=None)
        if session is None or session.source != "session":
            return "no session"
        async with session.data.edit() as data:
            data["n"] = data.get("n", 0) + 1
            return f"{data['n']} in {session.id}"

    @server.tool()
    async def flavour(ctx: Context[Any, Any]) -> str:  # pyright: ignore[reportUnusedFunction]
        request = ctx.request_context.request
        assert isinstance(request, Request)
        return request.headers.get("x-flavour", "none")

    @server.tool()
    async def headers(ctx: Context[Any, Any]) -> str:  # pyright: ignore[reportUnusedFunction]
        request = ctx.request_context.request
        assert isinstance(request, Request)
        return json.dumps(request.headers.items())

    return server


@pytest.fixture(scope="module")
def over_http() -> Generator[RunningServer]:
    with serve(SessionLayer(make_server()).asgi_app()) as server:
        yield server


@pytest.fixture(scope="module")
def over_sse() -> Generator[RunningServer]:
    app: Starlette = make_server().sse_app()
    with serve(app) as server:
        yield server


async def call(agent: ScriptedAgent, session_id: str, text: str) -> None:
    """Call the tool that the prompt names, of the server that it names."""
    name, tool = text.split()
    try:
        client = current_conversation().mcp[name]
    except KeyError:
        await agent.say(session_id, f"no {name}")
        return
    result = await client.call_tool(tool, {})
    await agent.say(session_id, text_of_result(result))


def http_entry(server: RunningServer, name: str = "web") -> Json:
    headers = [{"name": "X-Flavour", "value": "pistachio"}]
    return {"type": "http", "name": name, "url": server.url(), "headers": headers}


def sse_entry(server: RunningServer) -> Json:
    return {**http_entry(server, "old"), "type": "sse", "url": server.url("/sse")}


def stdio_entry(tmp_path: Path) -> Json:
    """An entry of ``mcpServers``: a child that keeps its sessions in a file."""
    program = tmp_path / "counter.py"
    program.write_text(COUNTER)
    keys = {"name": "MCP_SESSIONS_KEYS", "value": mint_key()}
    return {"name": "child", "command": sys.executable, "args": [str(program)], "env": [keys]}


async def ask(client: RawClient, session_id: str, text: str) -> str:
    """A prompt, and the text that it is answered with."""
    await client.prompt(session_id, text)
    return text_of(client.updates(session_id)[-1])


async def test_a_server_over_http_is_reached_with_its_headers(over_http: RunningServer) -> None:
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[http_entry(over_http)])
        assert await ask(client, session_id, "web flavour") == "pistachio"


async def test_a_server_over_sse_is_reached_with_its_headers(over_sse: RunningServer) -> None:
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[sse_entry(over_sse)])
        assert await ask(client, session_id, "old flavour") == "pistachio"
        assert await ask(client, session_id, "old count") == "no session"


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_server_on_this_machine_is_asked_past_the_proxies_of_the_environment(
    kind: str,
    over_http: RunningServer,
    over_sse: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    entry = http_entry(over_http) if kind == "http" else sse_entry(over_sse)
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[entry])
        assert await ask(client, session_id, f"{entry['name']} flavour") == "pistachio"


async def test_each_conversation_has_a_session_of_its_own_with_each_server(
    over_http: RunningServer,
) -> None:
    async with conversation(ScriptedAgent(call)) as client:
        servers = [http_entry(over_http, "a"), http_entry(over_http, "b")]
        first, second = await client.new(servers=servers), await client.new(servers=servers)
        answers = [
            await ask(client, session_id, f"{name} count")
            for session_id in (first, second)
            for name in ("a", "b")
        ]
        assert all(answer.startswith("1 in ") for answer in answers)
        assert len(set(answers)) == 4


async def test_sessions_with_servers_continue_in_another_process(
    over_http: RunningServer, tmp_path: Path
) -> None:
    """The servers are connected again, and their sessions resumed."""
    servers = [http_entry(over_http), stdio_entry(tmp_path)]
    store = tmp_path / "conversations.db"
    async with conversation(ScriptedAgent(call), SQLiteStore(store)) as client:
        session_id = await client.new(str(tmp_path), servers)
        before = [await ask(client, session_id, f"{name} count") for name in ("web", "child")]

    async with conversation(ScriptedAgent(call), SQLiteStore(store)) as client:
        await client.load(session_id, str(tmp_path), servers)
        after = [await ask(client, session_id, f"{name} count") for name in ("web", "child")]

    assert [answer[0] for answer in before + after] == ["1", "1", "2", "2"]
    assert [answer[1:] for answer in before] == [answer[1:] for answer in after]


class Watched(KeptMemory):
    def __init__(self) -> None:
        super().__init__()
        self.saved = ""
        self.board = Board()

    async def replace_data(self, session_id: SessionId, value: Any, **options: Any) -> bool:
        done = await super().replace_data(session_id, value, **options)
        self.saved = str(value)
        self.board.announce()
        return done


async def test_a_session_with_a_server_is_kept_soon_and_not_only_at_the_end(
    over_http: RunningServer,
) -> None:
    """A killed process has no end."""
    store = Watched()
    async with conversation(ScriptedAgent(call), store) as client:
        session_id = await client.new(servers=[http_entry(over_http)])
        mcp_session = (await ask(client, session_id, "web count")).removeprefix("1 in ")

        with anyio.fail_after(5):
            await store.board.until(lambda: mcp_session in store.saved, what="the session")
        assert mcp_session in store.saved, "while the conversation is open"


async def test_a_session_with_one_server_is_not_offered_to_another(
    over_http: RunningServer,
) -> None:
    """The same name, at another address."""
    with serve(SessionLayer(make_server()).asgi_app()) as other:
        store = KeptMemory()
        async with conversation(ScriptedAgent(call), store) as client:
            session_id = await client.new(servers=[http_entry(over_http)])
            before = await ask(client, session_id, "web count")
        async with conversation(ScriptedAgent(call), store) as client:
            await client.load(session_id, servers=[http_entry(other)])
            after = await ask(client, session_id, "web count")
        assert (before[0], after[0]) == ("1", "1")
        sent = [exchange.sent for exchange in other.wire.exchanges]
        assert sent
        assert before.removeprefix("1 in ") not in str(sent)


GHOST: Json = {"name": "ghost", "command": "/nowhere/at/all", "args": [], "env": []}
UNREACHABLE: Json = {
    "type": "http",
    "name": "nobody",
    "url": "http://127.0.0.1:1/mcp",
    "headers": [],
}
UNREACHABLE_OLD: Json = {**UNREACHABLE, "type": "sse", "name": "nobody-old"}
MUTE: Json = {
    "name": "mute",
    "command": sys.executable,
    "args": ["-c", "import sys; sys.stdin.read()"],
    "env": [{"name": "TOKEN", "value": "s3cret"}],
}
CRASHES: Json = {"name": "crashes", "command": sys.executable, "args": ["-c", "1/0"], "env": []}


@pytest.mark.parametrize("bad", [GHOST, UNREACHABLE, UNREACHABLE_OLD, MUTE, CRASHES])
async def test_a_server_that_cannot_be_reached_is_reported_and_the_session_lives(
    bad: Json, over_http: RunningServer
) -> None:
    """Said as a message of the agent, which every client can show."""
    name = bad["name"]
    store = KeptMemory()
    servers = [bad, http_entry(over_http)]
    async with conversation(ScriptedAgent(call), store, connect_timeout=1) as client:
        session_id = await client.new(servers=servers)
        await client.until(client.updates)
        # The id is known before anything is said about it.
        assert [message.get("method") for message in client.received[1:]] == [
            None,
            "session/update",
        ]
        [notice] = client.updates(session_id)
        assert notice["sessionUpdate"] == "agent_message_chunk"
        assert text_of(notice).startswith(f"The MCP server {name!r} cannot be reached: ")
        assert notice["_meta"] == {"io.github.mcp-sessions/notice": {"server": name}}
        assert "s3cret" not in text_of(notice)
        assert await ask(client, session_id, f"{name} count") == f"no {name}"
        assert (await ask(client, session_id, "web count")).startswith("1 in ")

    async with conversation(ScriptedAgent(call), store, connect_timeout=1) as client:
        await client.load(session_id, servers=servers)
        assert await client.prompt(session_id, "web count") == {"stopReason": "end_turn"}
        # The replay has said so already; to say it at each load would only fill the record.
        assert len([text for text in client.texts() if "cannot be reached" in text]) == 1

        # A resume replays nothing, so it is said again.
        before = len(client.updates())
        await client.ask(
            "session/resume", {"sessionId": session_id, "cwd": "/", "mcpServers": servers}
        )
        await client.until(lambda: len(client.updates()) > before)
        assert text_of(client.updates()[-1]).startswith(f"The MCP server {name!r} cannot be")


def http(**changed: Any) -> Json:
    return {**UNREACHABLE, "name": "wrong", **changed}


def with_header(name: str, value: str) -> Json:
    return http(headers=[{"name": name, "value": value}])


def command(**changed: Any) -> Json:
    return {**CRASHES, "name": "wrong", **changed}


_TWICE = ("Authorization", "authorization")

WRONG: list[tuple[Json, str]] = [
    *[
        ({**entry, "type": kind}, said)
        for kind in ("http", "sse")
        for entry, said in [
            (http(url="ftp://host/"), "an address begins with http:// or https://"),
            (http(url="ws://127.0.0.1:1/"), "an address begins with http:// or https://"),
            (http(url="/mcp"), "'/mcp' has no scheme"),
            (http(url="http://[bad"), "is not a whole address"),
            (http(url="http://127.0.0.1:99999/mcp"), "is not a whole address"),
            (http(url="https://me:s3cret@"), "'https://' is not a whole address"),
            (http(url=f"http://{'a' * 300}/mcp"), ""),
            (with_header("A b", "s3cret"), "the header 'A b' cannot be sent"),
            (with_header("", "s3cret"), "the header '' cannot be sent"),
            (with_header("A", "s3cret\r\nX: y"), "the header 'A' cannot be sent"),
            (with_header("A", "s3cret-é"), "the header 'A' cannot be sent"),
            (with_header("A", " s3cret"), "begins or ends with a space"),
            (with_header("A", "s3cret" * 10_000), "no server takes more than"),
            (
                http(headers=[{"name": n, "value": "s3cret"} for n in _TWICE]),
                "the header 'authorization' is there twice",
            ),
        ]
    ],
    (command(type="carrier-pigeon"), "its type is not stdio, http or sse"),
    ({"type": "acp", "name": "wrong", "serverId": "a"}, "its type is not stdio, http or sse"),
    (http(name="web"), "another server of the session has this name"),
    (command(command="no-such-command"), ""),
    (command(command="/"), ""),
    (command(command="/bin/\0true"), ""),
    (command(args=["\0"]), ""),
    (command(env=[{"name": "A=B", "value": "s3cret"}]), ""),
    (command(env=[{"name": "", "value": "s3cret"}]), ""),
    (command(env=[{"name": "A", "value": "s3cret\0"}]), ""),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
async def test_a_wrong_entry_costs_the_session_its_own_tools_only(
    wrong: Json, said: str, over_http: RunningServer
) -> None:
    """``session/new`` was an internal error, or refused the session with all its servers."""
    store = KeptMemory()
    servers = [http_entry(over_http), wrong]
    async with conversation(ScriptedAgent(call), store, connect_timeout=5) as client:
        session_id = await client.new(servers=servers)
        await client.until(client.updates)
        [notice] = client.updates(session_id)
        begin = f"The MCP server {wrong['name']!r} cannot be reached: "
        assert text_of(notice).startswith(begin)
        assert said in text_of(notice) and "s3cret" not in text_of(notice)
        assert (await ask(client, session_id, "web count")).startswith("1 in ")

    async with conversation(ScriptedAgent(call), store, connect_timeout=5) as client:
        await client.load(session_id, servers=servers)
        assert (await ask(client, session_id, "web count")).startswith("2 in ")


async def test_a_command_gets_what_says_how_to_reach_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An editor sends what its user configured, and the agent has the proxy."""
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", "/etc/ssl/ca.pem")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:s3cret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "agents")
    monkeypatch.setenv("GITHUB_TOKEN", "s3cret")
    program = tmp_path / "variables.py"
    program.write_text(VARIABLES)
    env = [{"name": "NO_PROXY", "value": "editors"}]
    entry = {"name": "child", "command": sys.executable, "args": [str(program)], "env": env}
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(str(tmp_path), [entry])
        found = json.loads(await ask(client, session_id, "child variables"))
    assert found["NODE_EXTRA_CA_CERTS"] == "/etc/ssl/ca.pem"
    assert found["NO_PROXY"] == "editors"
    assert "s3cret" not in str(found) + caplog.text
    assert "the MCP server 'child' does not get HTTPS_PROXY" in caplog.text


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_a_header_that_the_client_sends_itself_is_left_out(
    kind: str, over_http: RunningServer, over_sse: RunningServer
) -> None:
    """Otherwise they were sent beside the right ones, or the session was an internal error."""
    given = ["accept", "Content-Length", "Host", "Mcp-Session-Id", "MCP-Protocol-Version"]
    given += ["Mcp-Method", "Connection", "Transfer-Encoding", "Content-Type", "CONTENT-TYPE"]
    entry = http_entry(over_http) if kind == "http" else sse_entry(over_sse)
    entry["headers"] += [{"name": name, "value": "wr0ng"} for name in given]
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[entry])
        assert client.updates(session_id) == []
        sent = await ask(client, session_id, f"{entry['name']} headers")
    assert "pistachio" in sent and "wr0ng" not in sent


async def test_a_header_that_is_there_twice_is_sent_with_both_values(
    over_http: RunningServer,
) -> None:
    """RFC 9110, 5.3: two lines with one name mean the same as one line with both values."""
    entry = http_entry(over_http)
    entry["headers"].append({"name": "x-flavour", "value": "lemon"})
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[entry])
        assert await ask(client, session_id, "web flavour") == "pistachio, lemon"


@pytest.mark.parametrize("kind", ["http", "sse"])
async def test_cookies_of_several_headers_are_sent_as_cookies(
    kind: str, over_http: RunningServer, over_sse: RunningServer
) -> None:
    """A comma is part of a cookie's value (RFC 9113, 8.2.3): the server saw one cookie of two."""
    entry = http_entry(over_http) if kind == "http" else sse_entry(over_sse)
    entry["headers"] += [
        {"name": "Cookie", "value": "theme=dark"},
        {"name": "cookie", "value": "route=b; lang=en"},
    ]
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[entry])
        sent = json.loads(await ask(client, session_id, f"{entry['name']} headers"))
    assert [value for name, value in sent if name == "cookie"] == ["theme=dark; route=b; lang=en"]


async def test_servers_are_connected_at_the_same_time() -> None:
    slow = [{**MUTE, "name": f"mute-{number}"} for number in range(4)]
    async with conversation(ScriptedAgent(call), connect_timeout=1) as client:
        with anyio.fail_after(3.5):
            session_id = await client.new(servers=slow)
        await client.until(lambda: len(client.updates(session_id)) == 4)
        assert "within 1 seconds" in text_of(client.updates()[0])


async def test_a_load_with_other_servers_has_those(over_http: RunningServer) -> None:
    async with conversation(ScriptedAgent(call)) as client:
        session_id = await client.new(servers=[http_entry(over_http, "a")])
        assert (await ask(client, session_id, "a count")).startswith("1 in ")

        await client.load(session_id, servers=[http_entry(over_http, "b")])
        assert await ask(client, session_id, "a count") == "no a"
        assert (await ask(client, session_id, "b count")).startswith("1 in ")

        # The first one's session was kept meanwhile.
        await client.load(
            session_id, servers=[http_entry(over_http, "a"), http_entry(over_http, "b")]
        )
        assert (await ask(client, session_id, "a count")).startswith("2 in ")
        assert (await ask(client, session_id, "b count")).startswith("2 in ")


async def test_a_load_takes_no_server_from_a_prompt_that_is_running(
    over_http: RunningServer,
) -> None:
    begun, go_on = anyio.Event(), anyio.Event()

    async def with_a_pause(agent: ScriptedAgent, session_id: str, text: str) -> None:
        client = current_conversation().mcp["a"]
        begun.set()
        await go_on.wait()
        result = await client.call_tool("count", {})
        await agent.say(session_id, text_of_result(result))

    layer = AcpSessionLayer(ScriptedAgent(with_a_pause))
    async with two_clients(layer) as (first, second):
        session_id = await first.new(servers=[http_entry(over_http, "a")])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.prompt, session_id, "go")
            with anyio.fail_after(10):
                await begun.wait()
            await second.load(session_id)
            go_on.set()
        assert second.texts()[-1].startswith("1 in ")


async def test_an_agent_may_connect_its_servers_itself(over_http: RunningServer) -> None:
    agent = ScriptedAgent(call)
    async with conversation(agent, connect_servers=False) as client:
        session_id = await client.new(servers=[http_entry(over_http)])
        assert await ask(client, session_id, "web count") == "no web"
        [given] = agent.calls[1][1]["mcp_servers"]
        assert (given.name, given.url, given.headers[0].value) == (
            "web",
            over_http.url(),
            "pistachio",
        )


async def test_an_agent_that_connects_its_servers_is_given_none_of_an_unknown_type() -> None:
    """The library's models would take such an entry for a command."""
    agent = ScriptedAgent(call)
    async with conversation(agent, connect_servers=False) as client:
        session_id = await client.new(servers=[command(type="carrier-pigeon"), CRASHES])
        await client.until(client.updates)
        assert "its type is not stdio" in text_of(client.updates(session_id)[0])
        assert [given.name for given in agent.calls[1][1]["mcp_servers"]] == ["crashes"]


async def test_the_agent_is_given_the_servers_as_they_were_named() -> None:
    """Also without ``env``, which the document does not call required, and the library does."""
    agent = ScriptedAgent(call)
    async with conversation(agent, connect_servers=False) as client:
        entry = {"name": "a", "command": "/bin/true", "args": ["x"]}
        await client.new(servers=[entry, {**entry, "name": "b", "type": "stdio"}])
        first, second = agent.calls[1][1]["mcp_servers"]
        assert (first.name, first.command, first.args, first.env) == ("a", "/bin/true", ["x"], [])
        assert second.name == "b"
