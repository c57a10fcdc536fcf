"""A handler that blocks the event loop has a line in the log: nobody else is served meanwhile.

The code that blocks waits for that line. So no test depends on how fast this machine is.
"""

import asyncio
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.server import MCPServer, Server

from mcp_sessions import SessionLayer
from mcp_sessions.server.requests.blocking import LoopWatch
from mcp_sessions.testing import connect
from tests.support.virtual_time import Backend

THREAD = "the watch over the event loop"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    return "asyncio", {"use_uvloop": request.param}


class Block(logging.Handler):
    """Blocks its caller until the watch has logged a line with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.lines: list[str] = []
        self._logged = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self._text in self.lines[-1]:
            self._logged.set()

    def __call__(self) -> None:
        assert self._logged.wait(10)


@contextmanager
def watched(text: str) -> Generator[Block]:
    """The running loop, with a short time."""
    block = Block(text)
    logger = logging.getLogger("mcp_sessions.server.requests.blocking")
    logger.addHandler(block)
    watch = LoopWatch(0.05)
    watch.start()
    try:
        yield block
    finally:
        watch.close()
        logger.removeHandler(block)


def lowlevel(block: Block) -> Server[Any]:
    async def call(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        block()
        return types.CallToolResult(content=[])

    async def tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name="slow", input_schema={"type": "object"})]
        )

    return Server("lowlevel", on_call_tool=call, on_list_tools=tools)


@pytest.mark.parametrize("kind", [MCPServer, FastMCP])
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_tool_that_blocks_is_named(kind: Any, mode: str) -> None:
    """Rule 1, at its first call, and not its arguments."""
    with watched("tools/call of 'slow' blocks it") as block:
        server = kind("s")

        @server.tool(name="slow")
        async def function(secret: str) -> str:  # pyright: ignore[reportUnusedFunction]
            if secret == "late":
                await asyncio.sleep(0)
            block()
            return "done"

        async with connect(server, session=False, mode=mode) as client:
            await client.call_tool("slow", {"secret": "late"})
            await client.call_tool("slow", {"secret": "early"})
    assert "early" not in str(block.lines) and "late" not in str(block.lines)


async def test_a_prompt_that_blocks_is_named() -> None:
    with watched("prompts/get of 'greeting' blocks it") as block:
        server = MCPServer("s")

        @server.prompt()
        async def greeting() -> str:  # pyright: ignore[reportUnusedFunction]
            block()
            return "hello"

        async with connect(server, session=False) as client:
            await client.get_prompt("greeting")
    assert block.lines


async def test_a_resource_that_blocks_is_not_named() -> None:
    """A URI may have an id. The line says where the code is."""
    with watched("resources/read blocks it, at ") as block:
        server = MCPServer("s")

        @server.resource("notes://{name}")
        async def note(name: str) -> str:  # pyright: ignore[reportUnusedFunction]
            block()
            return "note"

        async with connect(server, session=False) as client:
            await client.read_resource("notes://secret")
    assert block.lines and "secret" not in str(block.lines)


async def test_a_name_that_no_list_has_is_not_written() -> None:
    """A lowlevel server has one handler for all names, and a client may send an id as one."""
    with watched("tools/call blocks it, at ") as block:
        async with connect(lowlevel(block), session=False) as client:
            await client.call_tool("secret", {})
    assert block.lines and "secret" not in str(block.lines)


async def test_a_name_that_was_listed_is_written() -> None:
    with watched("tools/call of 'slow' blocks it") as block:
        async with connect(lowlevel(block), session=False) as client:
            await client.list_tools()
            await client.call_tool("slow", {})
    assert block.lines


async def test_code_that_is_no_call_is_not_taken_for_one() -> None:
    """Rule 1: a call waits meanwhile, and does not block."""
    with watched("which call blocks it is not known, at ") as block:
        server, begun, go = MCPServer("s"), asyncio.Event(), asyncio.Event()

        @server.tool()
        async def waits() -> str:  # pyright: ignore[reportUnusedFunction]
            begun.set()
            await go.wait()
            return "done"

        async with connect(server, session=False) as client:
            calling = asyncio.create_task(client.call_tool("waits", {}))
            await begun.wait()
            block()
            go.set()
            await calling
    assert block.lines and "waits" not in str(block.lines)


async def test_calls_of_one_turn_are_not_taken_for_one_that_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rule 1: each is seen once, and the loop gets no turn between them."""
    watch, server, go = LoopWatch(1), MCPServer("s"), asyncio.Event()
    arrived = asyncio.Semaphore(0)

    @server.tool()
    async def short(at: float) -> str:  # pyright: ignore[reportUnusedFunction]
        arrived.release()
        await go.wait()
        watch.step(at)
        return "done"

    async with connect(server, session=False) as client, asyncio.TaskGroup() as calls:
        for number in range(6):
            calls.create_task(client.call_tool("short", {"at": number / 2}))
            await arrived.acquire()
        go.set()
    (line,) = [message for message in caplog.messages if "had no turn" in message]
    assert "for 2.0 s: which call blocks it is not known" in line


async def test_a_call_is_not_named_because_the_process_was_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rule 2. After some looks it is."""
    watch, server = LoopWatch(1), MCPServer("s")
    lines: list[list[str]] = []

    @server.tool()
    async def stopped() -> str:  # pyright: ignore[reportUnusedFunction]
        for now in (0, 0.5, 100, 100.5, 101):
            watch.step(now)
            lines.append([message for message in caplog.messages if "had no turn" in message])
        return "done"

    async with connect(server, session=False) as client:
        await client.call_tool("stopped", {})
    assert [len(each) for each in lines] == [0, 0, 1, 2, 2]
    assert "for 100.0 s: which call blocks it is not known" in lines[-1][0]
    assert "for 100.5 s: tools/call of 'stopped' blocks it" in lines[-1][1]


def threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


async def test_one_thread_watches_a_loop_and_ends_with_its_last_layer() -> None:
    """Rule 3."""
    before = threads()
    async with SessionLayer(MCPServer("a")).lifespan():
        async with SessionLayer(MCPServer("b")).lifespan():
            assert threads() == before + 1
        assert threads() == before + 1
    assert threads() == before
