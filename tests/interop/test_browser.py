"""A page in Chromium runs the stock TypeScript clients at a server of another origin."""

import json
import queue
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tests.interop.environments import HERE, node_project
from tests.support.browser import browsing, chromium_program
from tests.support.servers import serve
from tests.support.serving import read_lines, serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

PROJECT = HERE / "browser"
WITHIN = 90.0
"""Seconds for one page."""

SERVER = """
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

mcp = MCPServer("notes")

@mcp.tool()
def echo(text: str) -> str:
    return text

@mcp.tool()
async def touch(ctx: Context) -> str:
    await ctx.session.send_resource_updated("note://a")
    return "touched"
"""

Result = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def chromium() -> str:
    return chromium_program()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's script, with the clients in it."""
    node_project(PROJECT)
    bundle = tmp_path_factory.mktemp("bundle") / "page.js"
    command = [str(PROJECT / "node_modules" / ".bin" / "esbuild"), str(PROJECT / "page.mjs")]
    options = ["--bundle", "--format=esm", "--platform=browser", f"--outfile={bundle}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return bundle.read_text()


class Pages:
    def __init__(self, script: str) -> None:
        self._script = script
        self._results: queue.Queue[Result] = queue.Queue()
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/page.js", self._bundle),
                Route("/result", self._result, methods=["POST"]),
            ]
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse('<!doctype html><script type="module" src="/page.js"></script>')

    async def _bundle(self, request: Request) -> Response:
        return Response(self._script, media_type="text/javascript")

    async def _result(self, request: Request) -> Response:
        self._results.put(json.loads(await request.body()))
        return Response()

    def result(self) -> Result:
        return self._results.get(timeout=WITHIN)


def read_by_a_page(
    chromium: str, script: str, here: Path, allowed: Callable[[str], str]
) -> tuple[Result, str]:
    """What a page read, and what the server logged.

    Args:
        allowed: The origin that the server allows, by that of the page.
    """
    (here / "app.py").write_text(SERVER)
    pages = Pages(script)
    with serve(pages.app) as site:
        origin = site.url("")
        with serving(here, "--allowed-origin", allowed(origin), "app.py", within=300) as process:
            found = re.search(r"http://127\.0\.0\.1:\d+/mcp", read_lines(process, 5))
            assert found is not None
            with browsing(chromium, here / "profile", f"{origin}/?server={found[0]}"):
                result = pages.result()
            process.terminate()
            assert process.stderr is not None
            return result, process.stderr.read()


def test_a_page_of_an_allowed_origin_uses_everything(
    chromium: str, script: str, tmp_path: Path
) -> None:
    """Handshake, call, the stream of a GET, DELETE; the 2026 era; WebSocket."""
    result, _ = read_by_a_page(chromium, script, tmp_path, lambda origin: origin)
    assert result["legacy"] == {
        "version": "2025-11-25",
        "hasSession": True,
        "echo": "legacy",
        "changed": "note://a",
    }
    assert result["modern"] == {
        "version": "2026-07-28",
        "hasSession": False,
        "echo": "2026-07-28",
    }
    assert result["websocket"] == {"echo": "websocket"}


def test_a_page_of_another_origin_reads_nothing(chromium: str, script: str, tmp_path: Path) -> None:
    """The browser asks first, and the server does not allow it."""
    other = "https://app.example"
    result, said = read_by_a_page(chromium, script, tmp_path, lambda _: other)
    for way in ("legacy", "modern", "websocket"):
        assert list(result[way]) == ["failed"], result
    assert "refused a request (403)" in said
