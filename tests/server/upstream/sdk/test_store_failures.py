"""The store fails while a handler asks it (HTP5, KEY11).

Its client reads the store's error and not a crash of the handler's. The log has one line, and no
traceback.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
import pytest
from fastmcp import FastMCP
from fastmcp.exceptions import ToolError as FastMCPToolError
from mcp.server import MCPServer
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError

from mcp_sessions import SessionLayer
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.requests.handle import current_session
from tests.support.interposed import Interposed
from tests.support.raw import keyed
from tests.support.world import World, world

LOST = {"code": -32603, "message": "the session store failed during the request"}


async def read() -> None:
    await current_session().data.read()


async def edit() -> None:
    async with current_session().data.edit() as data:
        data["a"] = 1


async def hide() -> None:
    await current_session().hide(tools={"x"})


async def notify() -> None:
    await current_session().notify("notifications/message", {"level": "info", "data": "x"})


async def at_once() -> None:
    await asyncio.gather(read(), read())


async def in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(read())


async def wrapped() -> None:
    try:
        await read()
    except StoreUnavailable as failed:
        raise RuntimeError("of the handler's own") from failed


DOORS: dict[str, tuple[str, Callable[[], Awaitable[None]]]] = {
    "read": ("load_data", read),
    "edit": ("replace_data", edit),
    "hide": ("change_state", hide),
    "gather": ("load_data", at_once),
    "group": ("load_data", in_a_group),
    "wrapped": ("load_data", wrapped),
}


def mcp_server(ask: Callable[[], Awaitable[None]]) -> object:
    server = MCPServer("notes")

    @server.tool()
    async def do() -> str:
        await ask()
        return "done"

    @server.resource("note://1")
    async def note() -> str:
        await ask()
        return "done"

    @server.prompt()
    async def write() -> str:
        await ask()
        return "done"

    return server


def fastmcp(ask: Callable[[], Awaitable[None]], *, masked: bool = False) -> object:
    server: FastMCP[Any] = FastMCP("notes", mask_error_details=masked)

    async def do() -> str:
        await ask()
        return "done"

    async def note() -> str:
        await ask()
        return "done"

    async def write() -> str:
        await ask()
        return "done"

    server.tool(do)
    server.resource("note://1")(note)
    server.prompt(write)
    return server


def lowlevel(ask: Callable[[], Awaitable[None]]) -> object:
    async def call(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        await ask()
        return types.CallToolResult(content=[])

    async def resource(ctx: Any, params: types.ReadResourceRequestParams) -> Any:
        await ask()
        return types.ReadResourceResult(contents=[])

    async def prompt(ctx: Any, params: types.GetPromptRequestParams) -> Any:
        await ask()
        return types.GetPromptResult(messages=[])

    return Server("notes", on_call_tool=call, on_read_resource=resource, on_get_prompt=prompt)


SERVERS: dict[str, Callable[[Callable[[], Awaitable[None]]], object]] = {
    "MCPServer": mcp_server,
    "Server": lowlevel,
    "FastMCP": fastmcp,
    "masked FastMCP": lambda ask: fastmcp(ask, masked=True),
}

REQUESTS: dict[str, dict[str, Any]] = {
    "tools/call": {"name": "do", "arguments": {}},
    "resources/read": {"uri": "note://1"},
    "prompts/get": {"name": "write"},
}


async def notified(w: World, method: str) -> tuple[int | None, dict[str, Any]]:
    """Status and message with which a request in a session is answered."""
    client = await w.connected()
    await client.start()
    sent = client.send(method, REQUESTS[method])
    reply = await sent.reply.done()
    [message] = [each for each in reply.messages if "id" in each]
    return reply.status, message


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert not [each for each in caplog.records if each.exc_info]
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("method", list(REQUESTS))
@pytest.mark.parametrize("door", list(DOORS))
@pytest.mark.parametrize("kind", list(SERVERS))
async def test_a_client_reads_that_the_store_failed_its_request(
    kind: str, door: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """HTP5: not "Error executing tool". It is no 503 either: the handler began."""
    fails, ask = DOORS[door]
    interposed = Interposed()
    async with world(store=interposed.store, server=SERVERS[kind](ask)) as w:
        interposed.fails(fails, "before")
        status, message = await notified(w, method)
    assert message["error"] == LOST
    assert status == 200
    assert len(errors_of(caplog)) == 1
    assert "away" in errors_of(caplog)[0]


@pytest.mark.parametrize("method", list(REQUESTS))
@pytest.mark.parametrize("kind", list(SERVERS))
async def test_an_event_that_waits_for_the_store_fails_no_request(kind: str, method: str) -> None:
    """It is kept, and stored when the store is back."""
    interposed = Interposed()
    async with world(store=interposed.store, server=SERVERS[kind](notify)) as w:
        interposed.fails("append", "before", times=3)
        status, message = await notified(w, method)
        assert status == 200 and "result" in message and not message["result"].get("isError")
        [session] = [
            each for each in await w.layer.store.all_sessions() if each.mode is Mode.PROTOCOL
        ]
        await asyncio.sleep(30)
        head = await w.layer.store.head(session.session_id)
        assert head is not None and head.number == 1


@pytest.mark.parametrize("kind", list(SERVERS))
async def test_with_a_key_its_outcome_is_unknown(kind: str) -> None:
    """KEY11: also when it is sent again, and it does not run again."""
    runs = 0

    async def ask() -> None:
        nonlocal runs
        runs += 1
        await edit()

    interposed = Interposed()
    async with world(store=interposed.store, server=SERVERS[kind](ask)) as w:
        interposed.fails("replace_data", "before")
        client = await w.connected()
        await client.start()
        for _ in range(2):
            params = {**REQUESTS["tools/call"], "_meta": keyed("k")}
            sent = client.send("tools/call", params)
            assert (await sent.error())["code"] == -31012
            interposed.mend()
    assert runs == 1


@pytest.mark.parametrize("kind", ["MCPServer", "FastMCP", "Server"])
async def test_a_handler_that_deals_with_it_keeps_its_answer(kind: str) -> None:
    """Its own error, its own result, or a result although the store failed."""
    own: dict[str, Exception | None] = {
        "a result": None,
        "a tool's error": (FastMCPToolError if kind == "FastMCP" else ToolError)("not saved"),
        "a protocol error": MCPError(-32000, "not saved"),
    }
    for name, error in own.items():
        if kind == "Server" and name == "a tool's error" or kind == "FastMCP" and "proto" in name:
            # A lowlevel server has no such error. FastMCP takes any other exception for a crash.
            continue

        async def ask(error: Exception | None = error) -> None:
            try:
                await read()
            except StoreUnavailable as failed:
                if error is not None:
                    raise error from failed

        interposed = Interposed()
        async with world(store=interposed.store, server=SERVERS[kind](ask)) as w:
            interposed.fails("load_data", "before")
            _, message = await notified(w, "tools/call")
        if name == "a result":
            assert not message["result"].get("isError")
        elif name == "a tool's error":
            assert "not saved" in message["result"]["content"][0]["text"]
        else:
            assert message["error"] == {"code": -32000, "message": "not saved"}


async def test_changes_and_lists_of_sessions_are_doors_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a handler asks of its layer."""
    layers: list[SessionLayer] = []

    async def listing() -> None:
        await layers[0].sessions.list()

    interposed = Interposed()
    async with world(store=interposed.store, server=mcp_server(listing)) as w:
        layers.append(w.layer)
        interposed.fails("all_sessions", "before")
        _, message = await notified(w, "tools/call")
    assert message["error"] == LOST
    assert len(errors_of(caplog)) == 1
