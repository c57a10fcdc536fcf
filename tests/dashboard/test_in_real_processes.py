"""The page of a server that runs as a process: its address, SIGHUP, and a store that is away."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from tests.dashboard.test_layer_dashboard import ACCEPT, begun
from tests.serve.test_tls import Files
from tests.support.redis_server import redis_server
from tests.support.serving import INITIALIZE, read_lines, serving

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

SERVER = "from mcp.server import MCPServer\nmcp = MCPServer('notes')\n"
PAGE = ("server.py", "--dashboard", "/sessions")


def page_of(lines: str) -> str:
    """The address of the page, as the command says it."""
    found = re.search(r"page +(https?://\S+/sessions/)\n", lines)
    assert found is not None, lines
    return found[1]


async def has(lines: AsyncIterator[str], text: str) -> None:
    """Read the changes of a page until one has a text."""
    async with asyncio.timeout(60):
        async for line in lines:
            if text in line:
                return
    raise AssertionError(f"the page was closed before it said: {text}")


@pytest.mark.redis
async def test_two_open_pages_say_that_the_store_is_away_and_follow_it_when_it_is_back(
    tmp_path: Path,
) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    with (
        redis_server() as redis,
        serving(tmp_path, *PAGE, "--store", redis.url, within=150) as process,
    ):
        url = page_of(await asyncio.to_thread(read_lines, process, 6))
        base = url.removesuffix("/sessions/")
        async with (
            httpx2.AsyncClient(base_url=base, timeout=90) as client,
            client.stream("GET", f"{url}live/now") as now,
            client.stream("GET", f"{url}live/sessions") as listed,
        ):
            tabs = now.aiter_lines(), listed.aiter_lines()
            await has(tabs[1], "0 of 0 sessions")
            redis.suspend()
            try:
                for tab in tabs:
                    await has(tab, "The store does not answer")
                new = await client.get(url)
                assert new.status_code == 200 and "The store does not answer" in new.text
            finally:
                redis.resume()
            async with asyncio.timeout(60):
                while (await client.post("/mcp", json=INITIALIZE, headers=ACCEPT)).is_error:  # noqa: ASYNC110
                    # Its connections to the store come back one after the other.
                    await asyncio.sleep(0.1)
            await has(tabs[0], '<div class="number">1</div>')
            await has(tabs[1], "1 of 1 sessions")


async def test_a_page_stays_open_while_the_certificate_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    files = Files(tmp_path)
    certificate, key = files.issue("served")
    pair = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    with serving(tmp_path, *PAGE, *pair, within=150) as process:
        url = page_of(await asyncio.to_thread(read_lines, process, 6))
        base = url.removesuffix("/sessions/")
        async with (
            httpx2.AsyncClient(base_url=base, verify=files.trusts, timeout=90) as client,
            client.stream("GET", f"{url}live/sessions") as listed,
        ):
            tab = listed.aiter_lines()
            await has(tab, "0 of 0 sessions")
            files.issue("served")
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            while "reloaded" not in (line := await asyncio.to_thread(process.stderr.readline)):
                assert line, "it ended"
            await begun(client)
            await has(tab, "1 of 1 sessions")
