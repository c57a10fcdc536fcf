"""Sessions by handle: for hosts that say nothing, the model relays which session a call is of."""

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.server import MCPServer, Server
from mcp.server.mcpserver import Context, Elicit, Resolve
from pydantic import BaseModel

from mcp_sessions import Conversations, SessionLayer, current_session
from mcp_sessions.core.conversation_keys import KNOWN_HOSTS
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore
from mcp_sessions.testing import connect
from tests.server.dispatch.test_conversation_sessions import SECURITY
from tests.support.modern import ModernClient
from tests.support.raw import Carrier, Json, RawClient, in_session
from tests.support.replicas import cluster, user
from tests.support.world import Ctx, World, world

Era = Literal["handshake", "modern"]
ERAS: tuple[Era, ...] = ("handshake", "modern")
ON = Conversations(handle={"count"})


def tools(w: World) -> World:
    """Adds ``count``, which counts in its session and says which arguments it saw."""

    async def count(ctx: Ctx, arguments: Json) -> str:
        session = current_session(default=None)
        if session is None:
            return "none"
        async with session.data.edit() as data:
            data["n"] = data.get("n", 0) + 1
        return f"{session.source} {data['n']} {sorted(arguments)}"

    w.box.tools.update(count=count)
    return w


async def sent(
    carrier: Carrier, era: Era, method: str, params: Json, meta: Json | None = None
) -> Json:
    """A request's result, on a connection of its own."""
    if era == "modern":
        return await ModernClient(carrier).send(method, params, meta=meta).result()
    client = RawClient(carrier)
    await client.initialize()
    return await client.send(method, {**params, **({"_meta": meta} if meta else {})}).result()


async def call(carrier: Carrier, era: Era, meta: Json | None = None, **arguments: Any) -> Json:
    params = {"name": "count", "arguments": arguments}
    return await sent(carrier, era, "tools/call", params, meta)


def text(result: Json) -> str:
    return str(result["content"][0]["text"])


def handle_of(result: Json) -> str:
    """The handle that a result says: in a line of text, and in the structured content."""
    handle = str(result["structuredContent"]["session"])
    [_, line] = result["content"]
    assert line["text"] == f'To go on in this session, pass session="{handle}" to count.'
    return handle


async def conversations(w: World) -> int:
    """How many sessions there are that no client started."""
    return [each.mode for each in await w.layer.sessions.list()].count("conversation")


def is_refused(result: Json) -> bool:
    """Whether it is an error that says how to go on, and the tool did not run."""
    [block] = result["content"]
    return result["isError"] and "Call again without session" in block["text"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_without_a_handle_starts_a_session_that_later_calls_pass(era: Era) -> None:
    """Each on a connection of its own. The tool never sees the argument, and what the tool says
    stays where hosts look that show their model nothing but structured content.
    """
    async with world(conversations=ON) as w:
        tools(w)
        first = await call(w.carrier, era, a=1)
        handle = handle_of(first)
        assert first["structuredContent"]["result"] == text(first) == "conversation 1 ['a']"
        second = await call(w.carrier, era, a=1, session=handle)
        assert [block["text"] for block in second["content"]] == ["conversation 2 ['a']"]
        assert "structuredContent" not in second
        other = await call(w.carrier, era, session="")
        assert text(other) == "conversation 1 []" and handle_of(other) != handle
        assert handle_of(await call(w.carrier, era, session=None))
        assert text(await call(w.carrier, era, session=handle)) == "conversation 3 []"


async def test_the_eras_share_a_handle() -> None:
    async with world(conversations=ON) as w:
        tools(w)
        handle = handle_of(await call(w.carrier, "modern"))
        said = [text(await call(w.carrier, era, session=handle)) for era in ERAS]
        assert said == ["conversation 2 []", "conversation 3 []"]


@pytest.mark.parametrize("era", ERAS)
async def test_what_is_no_handle_is_an_error_that_says_how_to_continue(era: Era) -> None:
    """Guessed, of another type, too long, not to be printed, somebody's session id, a host's key,
    somebody else's: nothing is started, nothing is run, and nobody's session is found.
    """
    async with world(conversations=ON) as w:
        tools(w)
        ann, bob = [await w.carrier_of(user(name)) for name in ("ann", "bob")]
        handle = handle_of(await call(ann, era))
        session_id = (await w.client().start())["sessionId"]
        await call(ann, era, meta={"openai/session": "one"})
        before = await conversations(w)
        ran = len(w.box.calls)
        nothing: Json = {}
        for given in ("guessed", 7, True, [handle], nothing, "x" * 10_000, "\0", session_id, "one"):
            assert is_refused(await call(ann, era, session=given)), given
        assert is_refused(await call(bob, era, session=handle))
        assert is_refused(await call(w.carrier, era, session=handle))
        assert len(w.box.calls) == ran
        assert await conversations(w) == before == 2
        assert text(await call(ann, era, session=handle)) == "conversation 2 []"


async def test_a_handle_whose_session_has_ended_is_an_error_too() -> None:
    async with world(conversations=ON, idle_timeout=100, forget_after=100) as w:
        tools(w)
        handle = handle_of(await call(w.carrier, "modern"))
        w.clock.advance(101)
        for era in ERAS:
            assert is_refused(await call(w.carrier, era, session=handle))


@pytest.mark.parametrize("era", ERAS)
async def test_a_handle_said_as_a_hosts_key_is_another_conversation(era: Era) -> None:
    async with world(conversations=ON) as w:
        tools(w)
        handle = handle_of(await call(w.carrier, era))
        for rule in KNOWN_HOSTS:
            if rule.source == "meta":
                said = await call(w.carrier, era, meta={rule.name: handle})
                assert text(said) == "conversation 1 []"


@pytest.mark.parametrize("era", ERAS)
async def test_who_has_a_session_gets_no_handle(era: Era) -> None:
    """One that the client named, then one of the handle, then the host's; but the one of all that
    a user does is less than a handle.
    """
    async with world(conversations=Conversations(handle={"count"}, per_principal=True)) as w:
        tools(w)
        ann = await w.carrier_of(user("ann"))
        handle = handle_of(await call(ann, era))
        of_host = {"openai/session": "one"}
        named = in_session((await RawClient(ann).start())["sessionId"])
        plain = await call(ann, era, meta=of_host)
        assert text(plain) == "conversation 1 []" and len(plain["content"]) == 1
        assert text(await call(ann, era, meta=of_host, session=handle)) == "conversation 2 []"
        started = await call(ann, era, meta={**of_host, **named}, session=handle)
        assert text(started) == "session 1 []" and len(started["content"]) == 1


@pytest.mark.parametrize("era", ERAS)
async def test_only_the_tools_that_are_named_take_one(era: Era) -> None:
    """And nothing of it is there where no option says so, or for who may have no conversation."""
    async with world() as w:
        tools(w)
        before = await sent(w.carrier, era, "tools/list", {})
        plain = await call(w.carrier, era, session="x")
    assert "['session']" in text(plain) or text(plain) == "none"
    async with world(conversations=ON) as w:
        tools(w)
        now = await sent(w.carrier, era, "tools/list", {})
        said = {"name": "echo", "arguments": {"text": "hi", "session": "x"}}
        assert text(await sent(w.carrier, era, "tools/call", said)) == "hi"
    for old, new in zip(before["tools"], now["tools"], strict=True):
        if new["name"] == "count":
            assert new["inputSchema"]["properties"].pop("session")["type"] == "string"
            old["inputSchema"]["properties"] = {}
        assert new == old
    async with world() as w:
        before = await sent(tools(w).carrier, era, "tools/list", {})
    async with world(conversations=Conversations(handle={"count"}, anonymous=False)) as w:
        assert await sent(tools(w).carrier, era, "tools/list", {}) == before
        assert text(await call(w.carrier, era, session="x")) == text(plain)
        assert len((await call(w.carrier, era))["content"]) == 1


@pytest.mark.parametrize("by", ["lowlevel", "sdk"])
async def test_a_call_of_several_rounds_is_one_session(by: str) -> None:
    """Its model gets the handle with the last. The server's own state comes back to it as it was;
    whoever takes over a state has no more than who it is.
    """

    async def counted() -> str:
        async with current_session().data.edit() as data:
            data["n"] = data.get("n", 0) + 1
        return str(data["n"])

    if by == "sdk":
        mcp = MCPServer("rounds")

        async def ask(ctx: Context[Any, Any]) -> Elicit[Total]:
            await counted()
            return Elicit("how many?", Total)

        @mcp.tool()
        async def count(total: Annotated[Total, Resolve(ask)]) -> str:
            return await counted()

        server: object = mcp
    else:

        async def on_call_tool(ctx: Ctx, params: types.CallToolRequestParams) -> Any:
            said = await counted()
            if params.request_state == "own 2":
                return types.CallToolResult(content=[types.TextContent(text=said)])
            return types.InputRequiredResult(request_state=f"own {said}")

        async def on_list_tools(ctx: Ctx, params: Any) -> types.ListToolsResult:
            return types.ListToolsResult(tools=[tool("count", FREE)])

        server = Server("rounds", on_call_tool=on_call_tool, on_list_tools=on_list_tools)

    async with world(server=server, conversations=ON) as w:
        ann, bob = [await w.carrier_of(user(name)) for name in ("ann", "bob")]
        params: Json = {"name": "count", "arguments": {}}
        said: Json = {}
        rounds = 0
        client = ModernClient(ann, capabilities={"elicitation": {"form": {}}})
        while said.get("resultType", "input_required") == "input_required":
            if said:
                params["requestState"] = said["requestState"]
                params["inputResponses"] = {
                    key: {"action": "accept", "content": {"total": 3}}
                    for key in said.get("inputRequests", {})
                }
                assert is_refused(await sent(bob, "modern", "tools/call", params))
            said = await client.send("tools/call", params).result()
            rounds += 1
        # The SDK asks its own code again in the last round, before the tool.
        assert int(text(said)) == rounds + (by == "sdk") and rounds > 1
        handle = handle_of(said)
        assert await conversations(w) == 1
        again = await client.send(
            "tools/call", {**params, "arguments": {"session": handle}}
        ).answer()
        assert await conversations(w) == 1 and "error" not in again


async def test_it_is_found_at_every_replica_and_after_a_restart(tmp_path: Path) -> None:
    async with cluster(3, security=SECURITY, conversations=ON) as c:
        for w in c.worlds:
            tools(w)
        handle = handle_of(await call(c[0].carrier, "modern"))
        said = [text(await call(w.carrier, era, session=handle)) for w in c.worlds for era in ERAS]
        assert said == [f"conversation {n} []" for n in range(2, 8)]

    path = str(tmp_path / "sessions.db")
    async with world(store=SQLiteStore(path), conversations=ON) as w:
        handle = handle_of(await call(tools(w).carrier, "modern"))
    async with world(store=SQLiteStore(path), conversations=ON) as w:
        assert text(await call(tools(w).carrier, "modern", session=handle)) == "conversation 2 []"


@pytest.mark.parametrize("era", ERAS)
async def test_a_store_that_is_away_is_no_wrong_handle(era: Era) -> None:
    """Its model must not be asked to begin anew: the sender is asked to come back."""
    async with cluster(1, security=SECURITY, conversations=ON) as c:
        w = tools(c[0])
        handle = handle_of(await call(w.carrier, era))
        cases: list[dict[str, Any]] = [{"session": handle}, {}]
        for arguments in cases:
            c.backplane.is_away = True
            if era == "modern":
                reply = ModernClient(w.carrier).call("count", arguments).reply
            else:
                reply = w.client().call("count", **arguments).reply
            assert (await reply.done()).status == 503
            c.backplane.is_away = False
        assert text(await call(w.carrier, era, session=handle)) == "conversation 2 []"
        assert await conversations(w) == 1


async def test_a_flood_of_first_calls_meets_its_senders_limit() -> None:
    async with world(conversations=ON, max_sessions_per_principal=3) as w:
        tools(w)
        for _ in range(3):
            assert handle_of(await call(w.carrier, "modern"))
        assert (await call(w.carrier, "modern"))["content"] == [{"type": "text", "text": "none"}]


async def test_a_handle_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mcp_sessions")
    async with world(conversations=ON) as w:
        tools(w)
        handle = handle_of(await call(w.carrier, "modern"))
        await call(w.carrier, "modern", session=handle)
        assert is_refused(await call(w.carrier, "modern", session="guessed"))
    assert handle not in caplog.text and "guessed" not in caplog.text


# --- schemas -------------------------------------------------------------------------------


class Total(BaseModel, extra="forbid"):
    total: int


def served_by(kind: str) -> Any:
    """A server with tools of every return type."""
    mcp: Any = MCPServer("tools") if kind == "sdk" else FastMCP("tools")

    async def counted() -> int:
        async with current_session().data.edit() as data:
            data["n"] = data.get("n", 0) + 1
        return int(data["n"])

    @mcp.tool()
    async def typed() -> Total:
        return Total(total=await counted())

    @mcp.tool()
    async def plain(step: int = 1) -> str:
        return str(await counted())

    @mcp.tool()
    async def loose() -> dict[str, int]:
        return {"total": await counted()}

    return mcp


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("kind", ["sdk", "fastmcp"])
async def test_a_strict_client_finds_every_answer_valid(kind: str, mode: Any) -> None:
    """The SDK's validates what it is answered by the schema that was listed."""
    named = ("typed", "plain", "loose")
    layer = SessionLayer(
        served_by(kind), conversations=Conversations(handle=named, handle_name="thread")
    )
    async with connect(layer, session=False, mode=mode) as client:
        for tool in (await client.list_tools()).tools:
            assert tool.input_schema["properties"]["thread"]["type"] == "string"
            assert "thread" not in tool.input_schema.get("required", ())
        for name in named:
            first = await client.call_tool(name, {})
            assert first.structured_content is not None and not first.is_error
            handle = first.structured_content["thread"]
            last = await client.call_tool(name, {"thread": handle})
            assert "2" in str(last.content) and handle not in str(last)


def lowlevel(*listed: types.Tool) -> Server[Any]:
    """A server whose list is made for each request, and whose tools say what they are passed."""

    async def on_list_tools(ctx: Ctx, params: Any) -> types.ListToolsResult:
        cursor = params.cursor if params is not None else None
        at = int(cursor or 0)
        more = str(at + 1) if at + 1 < len(listed) else None
        return types.ListToolsResult(tools=[listed[at]], next_cursor=more)

    async def on_call_tool(ctx: Ctx, params: types.CallToolRequestParams) -> types.CallToolResult:
        said = types.TextContent(text=str(params.arguments))
        return types.CallToolResult(content=[said], structured_content={"session": "its own"})

    return Server("pages", on_list_tools=on_list_tools, on_call_tool=on_call_tool)


def tool(name: str, schema: Json, output: Json | None = None) -> types.Tool:
    return types.Tool(name=name, input_schema=schema, output_schema=output)


OWN: Json = {"type": "object", "properties": {"session": {"type": "string"}}}
CLOSED: Json = {"type": "object", "allOf": [{"additionalProperties": False}]}
FREE: Json = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize("schema", [OWN, CLOSED], ids=["own", "closed"])
@pytest.mark.parametrize("era", ERAS)
async def test_a_tool_that_can_take_none_is_left_alone_where_lists_are_made_anew(
    era: Era, schema: Json, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a call before anybody listed, and on another page than the first; said once."""
    server = lowlevel(tool("first", FREE), tool("count", schema))
    async with world(server=server, conversations=ON) as w:
        said = await call(w.carrier, era, session="mine")
        assert text(said) == "{'session': 'mine'}" and len(said["content"]) == 1
        for _ in range(2):
            [listed] = (await sent(w.carrier, era, "tools/list", {"cursor": "1"}))["tools"]
            assert listed["inputSchema"] == schema
    notified = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(notified) == 1 and "the tool count has an argument session of its own" in notified[0]


async def test_a_tool_that_nobody_lists_starts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with world(server=lowlevel(tool("other", FREE)), conversations=ON) as w:
        assert len((await call(w.carrier, "modern"))["content"]) == 1
        assert await w.layer.sessions.list() == []


@pytest.mark.parametrize("era", ERAS)
async def test_what_a_tool_says_itself_is_not_written_over(era: Era) -> None:
    """Its handle is in the text then."""
    server = lowlevel(tool("count", FREE, OWN))
    async with world(server=server, conversations=ON) as w:
        said = await call(w.carrier, era)
        assert said["structuredContent"] == {"session": "its own"}
        assert 'pass session="' in said["content"][1]["text"]
        [listed] = (await sent(w.carrier, era, "tools/list", {}))["tools"]
        assert listed["outputSchema"] == OWN
        assert listed["inputSchema"]["additionalProperties"] is False


@pytest.mark.parametrize("kind", ["sdk", "fastmcp"])
async def test_a_tool_that_can_take_none_is_refused_at_the_start(kind: str) -> None:
    layer = SessionLayer(
        served_by(kind), conversations=Conversations(handle={"plain"}, handle_name="step")
    )
    with pytest.raises(ConfigurationError, match="plain has an argument step of its own"):
        async with layer.lifespan():
            raise AssertionError("it runs")


@pytest.mark.parametrize("kind", ["sdk", "fastmcp"])
async def test_a_tool_that_is_not_there_is_warned_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = SessionLayer(served_by(kind), conversations=Conversations(handle={"plain", "plane"}))
    async with layer.lifespan():
        pass
    assert "the server has no tool plane, which should take a handle" in caplog.messages


@pytest.mark.parametrize(
    "wrong",
    [
        {"handle": "count"},
        {"handle": [""]},
        {"handle": [1]},
        {"handle_name": ""},
        {"handle_name": 1},
        {"handle": ["count"], "meta": ["handle"]},
        {"handle": ["count"], "headers": ["Handle"]},
    ],
)
def test_what_names_no_tool_or_two_kinds_of_key_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        Conversations(**wrong)
