"""Every MUST of documents 000, 001 and 003 that binds an agent, with bad input for each.

000 and 001 are the same page (Session Setup); 003 is Initialization. The quotes say which
sentence a test owns.
"""

import os
import sys
from pathlib import Path
from typing import Any

import acp
import pytest
from acp import schema

from mcp_sessions.acp import AcpSessionLayer, current_conversation
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from tests.support.conversations import (
    ALL_CAPABILITIES,
    Json,
    KeptMemory,
    RawClient,
    ScriptedAgent,
    client_of,
    conversation,
    prompt,
    text_of,
    text_of_result,
)

INVALID_PARAMS = -32602
INVALID_REQUEST = -32600
NOT_FOUND = -32002

DIRECTORY_SERVER = """
import os, sys
from mcp.server import MCPServer
server = MCPServer("place")
@server.tool()
def place() -> str:
    return os.getcwd() + " " + os.environ.get("FLAVOUR", "-") + " " + " ".join(sys.argv[1:])
server.run("stdio")
"""


def directory_server(tmp_path: Path, name: str = "place") -> Json:
    """An entry of ``mcpServers``: a child that says where it runs, and with what."""
    program = tmp_path / "directory_server.py"
    program.write_text(DIRECTORY_SERVER)
    return {
        "name": name,
        "command": sys.executable,
        "args": [str(program), "--stdio"],
        "env": [{"name": "FLAVOUR", "value": "vanilla"}],
    }


async def says_position(agent: ScriptedAgent, session_id: str, text: str) -> None:
    """Ask the MCP server where it is."""
    here = current_conversation()
    result = await here.mcp["place"].call_tool("place", {})
    await agent.say(session_id, f"{here.cwd} | {text_of_result(result)}")


async def still_works(client: RawClient) -> None:
    """After whatever was refused: a new session, a prompt, its answer."""
    session_id = await client.new()
    assert await client.prompt(session_id, "well?") == {"stopReason": "end_turn"}
    assert text_of(client.updates(session_id)[-1]) == "echo well?"


# --- 003, Protocol version -----------------------------------------------------------------


async def test_the_requested_version_is_answered_if_it_is_supported() -> None:
    """003, Version Negotiation: "If the Agent supports the requested version, it MUST respond
    with the same version".
    """
    agent = ScriptedAgent()
    async with client_of(AcpSessionLayer(agent)) as client:
        result = await client.ask("initialize", {"protocolVersion": 1})

    assert result["protocolVersion"] == 1
    assert agent.calls[0][1]["protocol_version"] == 1


@pytest.mark.parametrize("requested", [0, 2, 99, 65_535, 65_536, 2**40, 2**80])
async def test_a_version_of_another_product_is_answered_with_our_latest(requested: int) -> None:
    """003, Version Negotiation: "Otherwise, the Agent MUST respond with the latest version it
    supports", and Protocol version: both "MUST agree on a protocol version".
    """
    agent = ScriptedAgent()
    async with client_of(AcpSessionLayer(agent)) as client:
        result = await client.ask("initialize", {"protocolVersion": requested})
        assert result["protocolVersion"] == acp.PROTOCOL_VERSION == 1
        # The agent is asked for what was agreed on, not for what was requested.
        assert agent.calls[0][1]["protocol_version"] == 1
        await still_works(client)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"protocolVersion": None},
        {"protocolVersion": "1"},
        {"protocolVersion": 1.5},
        {"protocolVersion": True},
        {"protocolVersion": -1},
        {"protocolVersion": [1]},
        {"protocolVersion": 1, "clientCapabilities": "all"},
        {"protocolVersion": 1, "clientCapabilities": []},
    ],
)
async def test_an_initialize_without_a_version_is_refused_and_can_be_repeated(params: Json) -> None:
    """003, Version Negotiation: the request "MUST include the latest protocol version"."""
    async with client_of(AcpSessionLayer(ScriptedAgent())) as client:
        refused = await client.refusal("initialize", params)
        assert refused.code == INVALID_PARAMS
        assert ("clientCapabilities" if len(params) == 2 else "protocolVersion") in refused.message

        early = await client.refusal("session/new", {"cwd": "/", "mcpServers": []})
        assert early.code == INVALID_REQUEST

        await client.initialize()
        await still_works(client)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("session/new", {"cwd": "/", "mcpServers": []}),
        ("session/load", {"sessionId": "x", "cwd": "/", "mcpServers": []}),
        ("session/resume", {"sessionId": "x", "cwd": "/"}),
        ("session/list", {}),
        ("session/close", {"sessionId": "x"}),
        ("session/prompt", prompt("x", "hello")),
        ("session/set_mode", {"sessionId": "x", "modeId": "y"}),
        ("authenticate", {"methodId": "x"}),
    ],
)
async def test_nothing_is_served_before_initialize(method: str, params: Json) -> None:
    """003: "Before a Session can be created, Clients MUST initialize the connection"; 000: "MUST
    first complete the initialization phase".
    """
    agent, store = ScriptedAgent(), MemoryStore()
    async with client_of(AcpSessionLayer(agent, store=store)) as client:
        refused = await client.refusal(method, params)
        assert refused.code == INVALID_REQUEST
        assert "initialize" in refused.message
        assert (agent.calls, list(await store.all_sessions())) == ([], [])

        await client.initialize()
        await still_works(client)


# --- 003, Capabilities ---------------------------------------------------------------------

CLIENT_CALLS: dict[str, tuple[str, Json]] = {
    "fs/read_text_file": ("read_text_file", {"path": "/a"}),
    "fs/write_text_file": ("write_text_file", {"path": "/a", "content": "text"}),
    "terminal/create": ("create_terminal", {"command": "true"}),
    "terminal/output": ("terminal_output", {"terminal_id": "t"}),
    "terminal/release": ("release_terminal", {"terminal_id": "t"}),
    "terminal/wait_for_exit": ("wait_for_terminal_exit", {"terminal_id": "t"}),
    "terminal/kill": ("kill_terminal", {"terminal_id": "t"}),
    "elicitation/create": ("create_elicitation", {"message": "?"}),
}
"""Method on the wire → the library's name for it, and its arguments but the session's id."""


async def ask_client(agent: ScriptedAgent, session_id: str, method: str) -> None:
    name, arguments = CLIENT_CALLS[method]
    if name == "create_elicitation":
        scope = {"sessionId": session_id, "requestedSchema": {"type": "object"}}
        mode = schema.ElicitationFormSessionMode.model_validate(scope)
        await agent.client.create_elicitation(mode=mode, **arguments)
    else:
        await getattr(agent.client, name)(session_id=session_id, **arguments)


ANSWERS: dict[str, Any] = {
    "fs/read_text_file": {"content": "text"},
    "fs/write_text_file": None,
    "terminal/create": {"terminalId": "t"},
    "terminal/output": {"output": "", "truncated": False},
    "terminal/release": None,
    "terminal/wait_for_exit": {"exitCode": 0},
    "terminal/kill": None,
    "elicitation/create": {"action": "decline"},
}

WITHOUT: dict[str, list[Json]] = {
    "fs/read_text_file": [
        {"fs": {"writeTextFile": True}},
        {"fs": {"readTextFile": False}},
        {"fs": {"readTextFile": "yes"}},
        {"fs": True},
    ],
    "fs/write_text_file": [{"fs": {"readTextFile": True}}, {"fs": {"writeTextFile": 1}}],
    "elicitation/create": [{"elicitation": {"url": {}}}, {"elicitation": True}],
}


@pytest.mark.parametrize("method", list(CLIENT_CALLS))
async def test_a_client_is_never_asked_for_what_it_did_not_declare(method: str) -> None:
    """003, Capabilities: "Clients and Agents MUST treat all capabilities omitted in the
    initialize request as UNSUPPORTED".
    """

    async def call(agent: ScriptedAgent, session_id: str, text: str) -> None:
        try:
            await ask_client(agent, session_id, method)
        except acp.RequestError as refused:
            await agent.say(session_id, f"refused {refused.code}: {refused}")
        else:
            await agent.say(session_id, "answered")

    everything_else = {
        name: value for name, value in ALL_CAPABILITIES.items() if name != method.split("/")[0]
    }
    for declared in [{}, everything_else, *WITHOUT.get(method, [{"terminal": "yes"}])]:
        async with client_of(AcpSessionLayer(ScriptedAgent(call))) as client:
            await client.initialize(declared)
            await client.prompt(await client.new(), "ask")
            assert not client.questions
            [text] = client.texts()
            assert text.startswith("refused -32601") and method in text

    # And with it the question comes, and its answer goes back.
    async with client_of(AcpSessionLayer(ScriptedAgent(call))) as client:
        await client.initialize()
        session_id = await client.new()
        answer = await client.begin("session/prompt", prompt(session_id, "ask"))
        await client.until(lambda: client.questions)
        [question] = client.questions
        assert question["method"] == method
        assert question["params"]["sessionId"] == session_id
        await client.send({"id": question["id"], "result": ANSWERS[method]})
        assert (await answer)["result"] == {"stopReason": "end_turn"}
        assert client.texts() == ["answered"]


async def test_what_the_layer_provides_is_declared_and_what_the_agent_declares_is_kept() -> None:
    """003, Agent Capabilities: the agent "SHOULD specify"."""
    agent = ScriptedAgent()
    agent.capabilities = schema.AgentCapabilities(
        load_session=False,
        prompt_capabilities=schema.PromptCapabilities(image=True),
        mcp_capabilities=schema.McpCapabilities(http=False, acp=True),
        session_capabilities=schema.SessionCapabilities(
            fork=schema.SessionForkCapabilities(),
            resume=schema.SessionResumeCapabilities(field_meta={"a": 1}),
        ),
        field_meta={"agent": "its own"},
    )
    async with client_of(AcpSessionLayer(agent)) as client:
        declared = (await client.initialize())["agentCapabilities"]

    assert declared == {
        "loadSession": False,
        "promptCapabilities": {"image": True},
        "mcpCapabilities": {"http": True, "sse": True, "acp": True},
        "sessionCapabilities": {
            "resume": {"_meta": {"a": 1}},
            **{name: {} for name in ("list", "close", "delete", "fork")},
        },
        "_meta": {"agent": "its own"},
    }


@pytest.mark.parametrize("agents", [True, False])
async def test_load_session_is_declared_where_conversations_outlive_the_process(
    agents: bool, tmp_path: Path
) -> None:
    """001, Loading Sessions: "This feature enables persistence across restarts". In memory they
    do not outlive it, whatever the agent keeps itself.
    """
    agent = ScriptedAgent()
    agent.capabilities = schema.AgentCapabilities(load_session=agents)
    for store, expected in ((MemoryStore(), False), (SQLiteStore(str(tmp_path / "c.db")), True)):
        async with client_of(AcpSessionLayer(agent, store=store)) as client:
            declared = (await client.initialize())["agentCapabilities"]
            assert declared["loadSession"] is expected
            assert "resume" in declared["sessionCapabilities"]


async def test_text_and_links_reach_the_agent_as_they_were_sent_and_are_replayed() -> None:
    """003, Prompt capabilities: "all Agents MUST support ContentBlock::Text and
    ContentBlock::ResourceLink in session/prompt requests".
    """
    agent = ScriptedAgent()
    link = {"type": "resource_link", "uri": "file:///a%20b", "name": "a b", "mimeType": "text/x"}
    async with conversation(agent) as client:
        session_id = await client.new()
        blocks = [{"type": "text", "text": "see "}, link]
        await client.ask("session/prompt", {"sessionId": session_id, "prompt": blocks})
        [text, resource] = agent.calls[-1][1]["prompt"]
        assert (text.text, resource.uri, resource.name) == ("see ", "file:///a%20b", "a b")

        await client.load(session_id)
        replayed = client.updates()[1:3]
        assert [update["content"] for update in replayed] == blocks


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": "hello"},
        {"prompt": None},
        {},
        {"prompt": [{"type": "smell", "smell": "?"}]},
        {"prompt": [{"type": "text"}]},
        {"prompt": [{"type": "text", "text": 7}]},
        {"prompt": [{"type": "resource_link", "name": "no uri"}]},
        {"prompt": [{"type": "text", "text": "fine"}, "not a block"]},
    ],
)
async def test_a_prompt_that_cannot_be_read_is_refused_and_leaves_no_trace(bad: Json) -> None:
    """003, Prompt capabilities, with bad input."""
    agent = ScriptedAgent()
    async with conversation(agent) as client:
        session_id = await client.new()
        refused = await client.refusal("session/prompt", {"sessionId": session_id, **bad})
        assert refused.code == INVALID_PARAMS
        assert "prompt" in refused.message
        assert [name for name, _ in agent.calls] == ["initialize", "new_session"]

        await client.load(session_id)
        assert client.updates() == []
        await still_works(client)


# --- 000 and 001, Creating a Session -------------------------------------------------------


async def test_every_session_has_an_id_of_its_own_that_nobody_can_guess() -> None:
    """001, Creating a Session: "The Agent MUST respond with a unique Session ID"."""
    store = KeptMemory()
    ids: set[str] = set()
    for _ in range(2):
        async with conversation(store=store) as client:
            ids |= {await client.new() for _ in range(20)}

    assert len(ids) == 40
    # 256 bits of base64, and no part that repeats.
    assert min(len(session_id) for session_id in ids) >= 43
    assert len({session_id[:12] for session_id in ids}) == 40


@pytest.mark.parametrize("wrong", ["cwd", "additionalDirectories"])
@pytest.mark.parametrize("method", ["session/new", "session/load", "session/resume"])
async def test_a_directory_that_is_not_there_is_refused(
    method: str, wrong: str, tmp_path: Path
) -> None:
    """A file is none. Nothing is made, and the session is where it was."""
    before, moved = tmp_path / "before", tmp_path / "moved"
    before.mkdir()
    (tmp_path / "file").touch()
    agent = ScriptedAgent()
    async with conversation(agent) as client:
        session_id = await client.new(str(before))
        for path, reason in (("file", "is not a directory"), ("nothing", "does not exist")):
            folder = str(tmp_path / path)
            params: Json = {"sessionId": session_id, "cwd": str(before), "mcpServers": []}
            params[wrong] = folder if wrong == "cwd" else [str(before), folder]
            refused = await client.refusal(method, params)
            assert refused.code == INVALID_PARAMS
            assert wrong in refused.message and reason in refused.message
        [listed] = (await client.ask("session/list", {}))["sessions"]
        assert (listed["sessionId"], listed["cwd"]) == (session_id, str(before))
        assert await client.prompt(session_id, "still here") == {"stopReason": "end_turn"}
        # A client can load it in another directory when its own was moved.
        before.rename(moved)
        await client.load(session_id, str(moved))


@pytest.mark.parametrize(
    "cwd", ["", ".", "project", "./a", "~/project", "C:relative", None, 7, ["/"], {"path": "/"}]
)
@pytest.mark.parametrize("method", ["session/new", "session/load", "session/resume"])
async def test_a_working_directory_that_is_not_absolute_is_refused(cwd: Any, method: str) -> None:
    """001, Working Directory: "MUST be an absolute path"."""
    agent, store = ScriptedAgent(), MemoryStore()
    async with conversation(agent, store) as client:
        session_id = await client.new("/tmp")
        params: Json = {"sessionId": session_id, "cwd": cwd, "mcpServers": []}
        refused = await client.refusal(method, params)
        assert refused.code == INVALID_PARAMS
        assert "cwd" in refused.message

        missing = await client.refusal(method, {"sessionId": session_id, "mcpServers": []})
        assert (missing.code, "cwd" in missing.message) == (INVALID_PARAMS, True)

        # Nothing was made, and the session is where it was.
        listed = (await client.ask("session/list", {}))["sessions"]
        assert [session["cwd"] for session in listed] == ["/tmp"]
        assert await client.prompt(session_id, "still here") == {"stopReason": "end_turn"}


async def test_servers_over_stdio_run_in_the_sessions_directory_wherever_the_agent_does(
    tmp_path: Path,
) -> None:
    """001, Working Directory: "MUST be used for the session regardless of where the Agent
    subprocess was spawned"; MCP Servers: "All Agents MUST support the stdio transport"; Stdio
    Transport: "All Agents MUST support connecting to MCP servers via stdio".
    """
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    agent = ScriptedAgent(says_position)
    async with conversation(agent) as client:
        servers = [directory_server(tmp_path)]
        session_id = await client.new(str(first), servers)
        await client.prompt(session_id, "where?")
        assert client.texts()[-1] == f"{first} | {first} vanilla --stdio"
        assert agent.calls[1][1]["cwd"] == str(first)
        assert str(first) != os.getcwd()

        # Also when it is loaded for another one.
        await client.load(session_id, str(second), servers)
        await client.prompt(session_id, "where?")
        assert client.texts()[-1] == f"{second} | {second} vanilla --stdio"


# --- 000 and 001, MCP Servers --------------------------------------------------------------


STDIO: Json = {"name": "a", "command": "/bin/true", "args": [], "env": []}
HTTP: Json = {"type": "http", "name": "a", "url": "http://localhost:1/mcp", "headers": []}
SSE: Json = {**HTTP, "type": "sse"}


def without(entry: Json, member: str) -> Json:
    return {name: value for name, value in entry.items() if name != member}


BAD_SERVERS: list[tuple[Any, str]] = [
    ({}, "mcpServers"),
    ("/bin/true", "mcpServers"),
    (None, "mcpServers"),
    (["/bin/true"], "mcpServers[0]"),
    ([STDIO, None], "mcpServers[1]"),
    ([without(STDIO, "name")], "mcpServers[0].name"),
    ([{**STDIO, "name": ""}], "mcpServers[0].name"),
    ([{**STDIO, "name": 7}], "mcpServers[0].name"),
    ([without(STDIO, "command")], "mcpServers[0].command"),
    ([{**STDIO, "command": ["/bin/true"]}], "mcpServers[0].command"),
    ([without(STDIO, "args")], "mcpServers[0].args"),
    ([{**STDIO, "args": "--stdio"}], "mcpServers[0].args"),
    ([{**STDIO, "args": ["--n", 7]}], "mcpServers[0].args[1]"),
    ([{**STDIO, "env": {"A": "b"}}], "mcpServers[0].env"),
    ([{**STDIO, "env": ["A=b"]}], "mcpServers[0].env[0]"),
    ([{**STDIO, "env": [{"value": "b"}]}], "mcpServers[0].env[0].name"),
    ([{**STDIO, "env": [{"name": "A", "value": 7}]}], "mcpServers[0].env[0].value"),
    ([{**STDIO, "type": None}], "mcpServers[0].type"),
    *[
        (bad, where)
        for entry in (HTTP, SSE)
        for bad, where in [
            ([without(entry, "name")], "mcpServers[0].name"),
            ([without(entry, "url")], "mcpServers[0].url"),
            ([without(entry, "headers")], "mcpServers[0].headers"),
            ([{**entry, "headers": {"A": "b"}}], "mcpServers[0].headers"),
            ([{**entry, "headers": [{"value": "a"}]}], "mcpServers[0].headers[0].name"),
            ([{**entry, "headers": [{"name": "A"}]}], "mcpServers[0].headers[0].value"),
        ]
    ],
]


@pytest.mark.parametrize(("servers", "where"), BAD_SERVERS)
async def test_a_malformed_server_is_refused_by_its_position(servers: Any, where: str) -> None:
    """001, Transport Types: what is "required" of each transport."""
    agent, store = ScriptedAgent(), MemoryStore()
    async with conversation(agent, store) as client:
        refused = await client.refusal("session/new", {"cwd": "/", "mcpServers": servers})
        assert refused.code == INVALID_PARAMS
        assert refused.message.startswith(f"Invalid params: {where} ")
        assert "secret" not in refused.message
        assert (await client.ask("session/list", {})) == {"sessions": []}

        session_id = await client.new()
        params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": servers}
        assert (await client.refusal("session/load", params)).code == INVALID_PARAMS
        assert await client.prompt(session_id, "well?") == {"stopReason": "end_turn"}
        assert [name for name, _ in agent.calls] == ["initialize", "new_session", "prompt"]


async def test_a_variable_may_have_several_lines_or_none_be_there(tmp_path: Path) -> None:
    """001, Stdio Transport: ``env`` is not "required". Its values are any text."""
    entry = directory_server(tmp_path)
    for env, expected in (
        ([{"name": "FLAVOUR", "value": "BEGIN\nEND\n"}], "BEGIN\nEND\n"),
        ([{"name": "FLAVOUR", "value": "a"}, {"name": "FLAVOUR", "value": "b"}], "b"),
        (None, "-"),
        ("left out", "-"),
    ):
        given = without(entry, "env") if env == "left out" else {**entry, "env": env}
        async with conversation(ScriptedAgent(says_position)) as client:
            session_id = await client.new(str(tmp_path), [given])
            await client.prompt(session_id, "where?")
            assert client.texts()[-1] == f"{tmp_path} | {tmp_path} {expected} --stdio"


# --- 000 and 001, Loading a Session --------------------------------------------------------


async def test_a_load_replays_the_entire_conversation_and_then_answers_null() -> None:
    """001, Loading a Session: "The Agent MUST replay the entire conversation to the Client in
    the form of session/update notifications", and "When all the conversation entries have been
    streamed to the Client, the Agent MUST respond to the original session/load request".
    """
    store = KeptMemory()
    async with conversation(store=store) as client:
        session_id = await client.new()
        await client.prompt(session_id, "one", "and more")
        await client.prompt(session_id, "two")

    # Another process, another client.
    async with conversation(store=store) as client:
        answer = await client.answer_to(
            "session/load", {"sessionId": session_id, "cwd": "/", "mcpServers": []}
        )

        assert answer["result"] is None
        assert client.received[-1] is answer
        assert [(update["sessionUpdate"], text_of(update)) for update in client.updates()] == [
            ("user_message_chunk", "one"),
            ("user_message_chunk", "and more"),
            ("agent_message_chunk", "echo one and more"),
            ("user_message_chunk", "two"),
            ("agent_message_chunk", "echo two"),
        ]
        assert {message["params"]["sessionId"] for message in client.received[1:-1]} == {session_id}
        # "The Client can then continue sending prompts as if the session was never interrupted."
        assert await client.prompt(session_id, "three") == {"stopReason": "end_turn"}
        assert client.texts()[-1] == "echo three"


@pytest.mark.parametrize(
    ("session_id", "code"),
    [
        ("sess_789xyz", NOT_FOUND),
        ("A" * 43, NOT_FOUND),
        ("", NOT_FOUND),
        ("snow☃", NOT_FOUND),
        ("x" * 5_000, NOT_FOUND),
        (None, INVALID_PARAMS),
        (7, INVALID_PARAMS),
        (["a"], INVALID_PARAMS),
    ],
)
@pytest.mark.parametrize(
    "method", ["session/load", "session/resume", "session/prompt", "session/close"]
)
async def test_an_unknown_session_is_an_error_and_nothing_more(
    session_id: Any, code: int, method: str
) -> None:
    """001, Session ID: what it is used for, with bad input."""
    agent = ScriptedAgent()
    async with conversation(agent) as client:
        params: Json = {"sessionId": session_id, "cwd": "/", "mcpServers": []}
        refused = await client.refusal(method, {**params, "prompt": []})
        assert refused.code == code
        assert [name for name, _ in agent.calls] == ["initialize"]
        await still_works(client)
