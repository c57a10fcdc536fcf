"""Both notes servers, wrapped, over real HTTP: they do the same."""

import importlib
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import fastmcp
import mcp
import pytest
from notes_store import NotesStore
from plain_client import Message, PlainClient, Refused

from mcp_sessions import SessionLayer
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.servers import serve

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("notes_server", "notes_server_fastmcp")
INVALID_PARAMS = -32602
TOOLS = [
    *("append_note", "delete_note", "index_notes", "list_notes"),
    *("open_note", "recent_notes", "search_notes", "write_note"),
]


@dataclass
class Served:
    name: str
    """Of its file."""
    server: Any
    """The ``MCPServer`` or ``FastMCP``."""
    notes: NotesStore
    url: str


@pytest.fixture(scope="module", params=SERVERS)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    """Each server, wrapped, with its own directory for the notes of this module."""
    module = importlib.import_module(request.param)
    module.notes.directory = tmp_path_factory.mktemp("notes")
    layer = getattr(module, "layer", None) or SessionLayer(module.mcp)
    with serve(layer.asgi_app()) as running:
        yield Served(name=request.param, server=module.mcp, notes=module.notes, url=running.url())


@pytest.fixture
def served(running: Served) -> Served:
    for name in running.notes.names():
        running.notes.delete(name)
    return running


def changes(messages: list[Message]) -> list[tuple[str, str]]:
    """Notifications as (method without its beginning, URI)."""
    return [
        (message["method"].removeprefix("notifications/"), message["params"].get("uri", ""))
        for message in messages
    ]


async def test_a_stock_client_works_with_the_notes(served: Served) -> None:
    """The SDK's own client, handshake era, which knows nothing of sessions."""
    with anyio.fail_after(20):
        async with mcp.Client(served.url, mode="legacy") as client:
            assert sorted(tool.name for tool in (await client.list_tools()).tools) == TOOLS
            await client.call_tool("write_note", {"name": "todo", "text": "Bread\nand butter"})
            await client.call_tool("append_note", {"name": "todo", "text": "Zürich"})
            resources = (await client.list_resources()).resources
            assert [str(resource.uri) for resource in resources] == ["note://todo"]
            read = await client.read_resource("note://todo")
            assert [getattr(part, "text", None) for part in read.contents] == [
                "Bread\nand butter\nZürich\n"
            ]
            found = await client.call_tool("search_notes", {"query": "BUTTER and"})
            assert found.structured_content == {
                "result": [{"name": "todo", "line": 2, "text": "and butter"}]
            }
            await client.call_tool("delete_note", {"name": "todo"})
            assert (await client.list_resources()).resources == []
    assert served.notes.names() == []


async def test_what_a_caller_does_wrong_is_reported_in_a_sentence(served: Served) -> None:
    """As the tool's answer, so that a model can read it and do better."""
    async with PlainClient(served.url) as client:
        await client.initialize()
        with pytest.raises(Refused, match="starting with a letter or digit: not '../secret'"):
            await client.call_tool("write_note", name="../secret", text="text")
        with pytest.raises(Refused, match="there is no note 'nothing'"):
            await client.call_tool("append_note", name="nothing", text="text")

    assert list(served.notes.directory.iterdir()) == []


@pytest.mark.parametrize("uri", ["note://nothing", "note://..%2Fsecret", "note://Todo"])
async def test_a_note_that_is_not_there_is_an_invalid_parameter(served: Served, uri: str) -> None:
    """And so is a name that no note can have."""
    async with PlainClient(served.url) as client:
        await client.initialize()
        with pytest.raises(Refused) as refused:
            await client.request("resources/read", {"uri": uri})

    assert refused.value.code == INVALID_PARAMS


async def test_a_session_gets_changes_of_what_it_subscribed_to_and_of_the_list(
    served: Served,
) -> None:
    """Changing, creating and deleting, done by a client that has no session."""
    async with PlainClient(served.url) as client, PlainClient(served.url) as other:
        await other.initialize()
        await other.call_tool("write_note", name="mine", text="text")
        await other.call_tool("write_note", name="not-mine", text="text")
        await client.initialize()
        await client.request("session/start")
        for uri in ("note://mine", "note://later"):
            await client.request("resources/subscribe", {"uri": uri})
        await client.open_stream()

        await other.call_tool("append_note", name="not-mine", text="more")
        await other.call_tool("append_note", name="mine", text="more")
        await other.call_tool("write_note", name="mine", text="other")
        await other.call_tool("write_note", name="later", text="text")
        await other.call_tool("delete_note", name="mine")

        assert changes(await client.has_received(6)) == [
            ("resources/updated", "note://mine"),
            ("resources/updated", "note://mine"),
            ("resources/updated", "note://later"),
            ("resources/list_changed", ""),
            ("resources/updated", "note://mine"),
            ("resources/list_changed", ""),
        ]


async def test_indexing_reports_progress_and_keeps_the_index_as_a_note(served: Served) -> None:
    """One step per note; who subscribed to the index is notified that there is a new one."""
    served.notes.write("a", "Bread and butter")
    served.notes.write("b", "Bread")
    steps: list[Message] = []
    async with PlainClient(served.url) as client:
        await client.initialize()
        await client.request("session/start")
        await client.request("resources/subscribe", {"uri": "note://word-index"})
        await client.open_stream()
        result = await client.request(
            "tools/call",
            {"name": "index_notes", "arguments": {"pause": 0}, "_meta": {"progressToken": "t"}},
            on_message=steps.append,
        )
        notified = changes(await client.has_received(2))

    assert [(step["params"]["progress"], step["params"]["total"]) for step in steps] == [
        (1, 2),
        (2, 2),
    ]
    assert {step["params"]["progressToken"] for step in steps} == {"t"}
    assert result["structuredContent"]["result"] == (
        "3 words in 2 notes, kept as note://word-index"
    )
    assert notified == [("resources/updated", "note://word-index"), ("resources/list_changed", "")]
    assert "bread: a, b (2)" in served.notes.read("word-index")


async def test_an_index_does_not_contain_itself(served: Served) -> None:
    """Indexing twice gives the same index."""
    served.notes.write("a", "Bread")
    async with PlainClient(served.url) as client:
        await client.initialize()
        await client.call_tool("index_notes", pause=0)
        first = served.notes.read("word-index")
        await client.call_tool("index_notes", pause=0)

    assert served.notes.read("word-index") == first


async def test_each_session_remembers_what_it_opened(served: Served) -> None:
    """Newest first, once each; another session knows nothing of it, nor does one that the client
    starts know what its connection remembered.
    """
    for name in ("a", "b"):
        served.notes.write(name, f"text of {name}")
    async with PlainClient(served.url) as client, PlainClient(served.url) as other:
        await client.initialize()
        await other.initialize()
        assert await client.call_tool("open_note", name="a") == "text of a"
        assert await client.call_tool("recent_notes") == ["a"]
        assert await other.call_tool("recent_notes") == []

        await client.request("session/start")
        assert await client.call_tool("recent_notes") == []
        for name in ("a", "b", "a"):
            await client.call_tool("open_note", name=name)
        await other.request("session/start")
        await other.call_tool("open_note", name="b")

        assert await client.call_tool("recent_notes") == ["a", "b"]
        assert await other.call_tool("recent_notes") == ["b"]


async def test_a_session_remembers_ten_notes(served: Served) -> None:
    """Its memory is bounded."""
    names = [f"note-{number:02}" for number in range(12)]
    for name in names:
        served.notes.write(name, "text")
    async with PlainClient(served.url) as client:
        await client.initialize()
        await client.request("session/start")
        for name in names:
            await client.call_tool("open_note", name=name)

        assert await client.call_tool("recent_notes") == names[:1:-1]


async def test_a_session_continues_over_another_connection(served: Served) -> None:
    """Its subscriptions, its missed events and what it remembers come with it."""
    served.notes.write("a", "text")
    async with PlainClient(served.url) as first:
        await first.initialize()
        started = await first.request("session/start")
        await first.request("resources/subscribe", {"uri": "note://a"})
        await first.call_tool("open_note", name="a")
    async with PlainClient(served.url) as other:
        await other.initialize()
        for number in range(5):
            await other.call_tool("append_note", name="a", text=str(number))
    async with PlainClient(served.url) as second:
        await second.initialize()
        resumed = await second.request(
            "session/resume",
            {
                "sessionId": started["sessionId"],
                "lastSessionEventId": started["sessionEventId"],
            },
        )
        await second.open_stream()

        assert (resumed["catchup"], resumed["replayed"]) == (True, 1)
        assert changes(await second.has_received(1)) == [("resources/updated", "note://a")]
        assert await second.call_tool("recent_notes") == ["a"]


async def test_the_server_also_works_unwrapped(served: Served) -> None:
    """No layer, no session: a note is opened and nothing is remembered."""
    served.notes.write("a", "text")
    with anyio.fail_after(20):
        if served.name == "notes_server_fastmcp":
            async with fastmcp.Client[Any](served.server) as client:
                await client.call_tool("open_note", {"name": "a"})
                recent = (await client.call_tool("recent_notes", {})).structured_content
        else:
            async with mcp.Client(served.server) as client:
                await client.call_tool("open_note", {"name": "a"})
                recent = (await client.call_tool("recent_notes", {})).structured_content

    assert recent == {"result": []}


@pytest.mark.parametrize("name", SERVERS)
def test_the_file_can_be_run(name: str, tmp_path: Path) -> None:
    """``python examples/notes_server.py`` listens on PORT and makes NOTES_DIR."""
    port = free_port()
    environment = {
        **os.environ,
        "PORT": str(port),
        "NOTES_DIR": str(tmp_path / "notes"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / f"{name}.py")],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until_it_listens(process, port, (tmp_path / "log").read_text)
        anyio.run(write_one_note, f"http://127.0.0.1:{port}/mcp")
    finally:
        process.terminate()
        process.wait(timeout=10)

    assert (tmp_path / "notes" / "todo.md").read_text() == "text"


async def write_one_note(url: str) -> None:
    async with PlainClient(url) as client:
        await client.initialize()
        await client.call_tool("write_note", name="todo", text="text")
