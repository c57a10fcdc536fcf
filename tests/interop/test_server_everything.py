"""npm's ``server-everything`` behind the layer: a stock client gets what it gets directly."""

import asyncio
import json
import os
import re
import socket
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import mcp_types as types
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from mcp_sessions import HTTPServer, SessionLayer, StdioServer
from mcp_sessions.external_server import ExternalServer
from tests.interop.environments import HERE, ROOT, node_project
from tests.support.duplex import listening
from tests.support.serving import initialize, read_lines, serving

pytestmark = pytest.mark.full

HOME = HERE / "server_everything"
PROGRAM = str(HOME / "node_modules/@modelcontextprotocol/server-everything/dist/index.js")


ASKED_FOR: dict[str, dict[str, Any]] = {
    "echo": {"message": "hello"},
    "get-structured-content": {"location": "New York"},
    "get-tiny-image": {},
    "get-resource-reference": {"resourceType": "Text", "resourceId": 1},
    "trigger-elicitation-request": {},
    "trigger-sampling-request": {"prompt": "x", "maxTokens": 10},
    "get-roots-list": {},
}
"""Calls of the newer TypeScript client."""


async def _elicit(context: Any, params: Any) -> types.ElicitResult:
    return types.ElicitResult(action="decline")


async def _sample(context: Any, params: Any) -> types.CreateMessageResult:
    text = types.TextContent(text="sampled")
    return types.CreateMessageResult(role="assistant", content=text, model="m")


async def _roots(context: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///x")])  # pyright: ignore[reportArgumentType]


def client(transport: Any, **options: Any) -> Client:
    return Client(
        transport,
        elicitation_callback=_elicit,
        sampling_callback=_sample,
        list_roots_callback=_roots,
        **options,
    )


async def seen(client: Client) -> dict[str, Any]:
    got: dict[str, Any] = {
        "tools": (await client.list_tools()).tools,
        "prompts": (await client.list_prompts()).prompts,
        "resources": (await client.list_resources()).resources,
        "templates": (await client.list_resource_templates()).resource_templates,
    }
    calls: dict[str, dict[str, Any]] = {
        "echo": {"message": "hello"},
        "get-sum": {"a": 1, "b": 2},
        "get-structured-content": {"location": "New York"},
        "get-tiny-image": {},
        "get-annotated-message": {"messageType": "success", "includeImage": True},
        "trigger-elicitation-request": {},
        "trigger-sampling-request": {"prompt": "x", "maxTokens": 10},
        "get-roots-list": {},
    }
    for name, arguments in calls.items():
        got[name] = await client.call_tool(name, arguments)
    reports: list[tuple[float, float | None, str | None]] = []

    async def report(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total, message))

    long = {"duration": 0.2, "steps": 2}
    got["long"] = await client.call_tool(
        "trigger-long-running-operation", long, progress_callback=report
    )
    got["progress"] = reports
    got["prompt"] = await client.get_prompt(got["prompts"][0].name, {})
    got["resource"] = await client.read_resource(got["resources"][0].uri)
    return got


async def test_a_stock_client_gets_what_it_gets_directly() -> None:
    """Lists, structured content, images, progress, prompts, resources, and what it is asked."""
    node = node_project(HOME)
    direct = stdio_client(StdioServerParameters(command=node, args=[PROGRAM]))
    async with client(direct, mode="legacy") as stock:
        expected = await seen(stock)
    await expect_served(StdioServer(node, PROGRAM), expected)


async def test_a_stock_client_gets_what_it_gets_directly_of_the_same_server_at_a_url() -> None:
    """Its own Streamable HTTP, of the TypeScript SDK, which resumes its streams."""
    node = node_project(HOME)
    async with at_a_url(node) as url:
        async with client(url, mode="legacy") as stock:
            expected = await seen(stock)
        await expect_served(HTTPServer(url), expected)


async def test_a_stock_typescript_client_gets_what_it_gets_directly() -> None:
    """All of that, and completions, a log and updates that come by themselves; in the newer era
    what that has a way for, which the server itself does not speak.
    """
    node = node_project(HOME)
    clients = {name: node_project(HERE / name) for name in ("typescript", "typescript2")}
    older = [clients["typescript"], str(HERE / "typescript/everything.mjs")]
    newer = [clients["typescript2"], str(HERE / "typescript2/everything.mjs")]
    expected = await said_by(*older, "stdio", PROGRAM)
    assert expected["updated"] and len(expected["asked"]) == 2
    async with at_a_url(node) as url:
        for server in (StdioServer(node, PROGRAM), HTTPServer(url)):
            layer = SessionLayer(server)
            app = layer.asgi_app()
            async with layer.lifespan(), listening(app) as port:
                here = f"http://127.0.0.1:{port}/mcp"
                assert await said_by(*older, "http", here) == expected
                for mode in ("legacy", "2026-07-28"):
                    found = await said_by(*newer, here, mode, CALLS=json.dumps(ASKED_FOR))
                    version = found.pop("version")
                    assert version == (mode if mode != "legacy" else "2025-11-25")
                    calls = found.pop("calls")
                    for name in ASKED_FOR:
                        assert calls[name] == expected["calls"][name], (mode, name)
                    known = expected | {"tools": [without_tasks(t) for t in expected["tools"]]}
                    found["tools"] = [without_tasks(tool) for tool in found["tools"]]
                    for name, value in found.items():
                        assert value == known[name], (mode, name)


def without_tasks(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the client leaves it in an era in which it has no such tasks."""
    return {name: value for name, value in tool.items() if name != "execution"}


async def said_by(*command: str, **env: str) -> dict[str, Any]:
    """What a program writes: one JSON object."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, stderr=PIPE, env={**os.environ, **env}
    )
    try:
        async with asyncio.timeout(60):
            written, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()[-2000:]
        # Some of its resources say when they were made.
        return json.loads(re.sub(rb"created at [\d:]+ ?[AP]?M?", b"created", written))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_the_example_of_a_file_serves_both_of_its_servers() -> None:
    node_project(HOME)
    example = str(ROOT / "examples/config/npm.json")
    # There npx finds both packages, and asks no registry.
    with serving(HOME, "--config", example) as process:
        said = read_lines(process, 6)
        urls = re.findall(r"^  at +(\S+)$", said, re.M)
        names = [cast("dict[str, Any]", initialize(url)["serverInfo"])["name"] for url in urls]
        assert names == ["mcp-servers/everything", "memory-server"], said


@asynccontextmanager
async def at_a_url(node: str) -> AsyncGenerator[str]:
    """The server on its own HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        node, PROGRAM, "streamableHttp", env={**os.environ, "PORT": str(port)}, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while f"listening on port {port}" not in (await process.stderr.readline()).decode():
                assert process.returncode is None
        # It logs each request.
        draining = asyncio.create_task(process.stderr.read())
        yield f"http://127.0.0.1:{port}/mcp"
        draining.cancel()
    finally:
        process.kill()
        await process.wait()


async def expect_served(server: ExternalServer, expected: dict[str, Any]) -> None:
    """Behind the layer a client of each era gets that."""
    layer = SessionLayer(server)
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port:
        url = f"http://127.0.0.1:{port}/mcp"
        async with client(url, mode="legacy") as stock:
            found = await seen(stock)
        assert found == expected
        async with client(url) as modern:
            assert modern.session.protocol_version == "2026-07-28"
            for name in ("trigger-elicitation-request", "trigger-sampling-request"):
                arguments = {"prompt": "x", "maxTokens": 10} if "sampling" in name else {}
                asked = await modern.call_tool(name, arguments)
                assert asked.content == expected[name].content, "it is asked in results"
            echoed = await modern.call_tool("echo", {"message": "hello"})
            assert echoed.content == expected["echo"].content
