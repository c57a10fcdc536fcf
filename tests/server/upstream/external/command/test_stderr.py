"""A process's standard error: what the log and clients get of it, and what they never get."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from mcp_sessions import StdioServer
from mcp_sessions.server.upstream.external.process import StandardError, reason_of
from tests.support.children import child_world, until
from tests.support.raw import RawClient, initialize_params
from tests.support.world import world

NODE = """\
node:internal/modules/cjs/loader:1148
  throw err;
  ^

Error: Cannot find module '/srv/no-such.js'
    at Module._resolveFilename (node:internal/modules/cjs/loader:1145:15)
    at node:internal/main/run_main_module:28:49 {
  code: 'MODULE_NOT_FOUND',
  requireStack: []
}

Node.js v20.20.2
"""
NPM = """\
npm error code E404
npm error 404 Not Found - GET https://registry/@a%2fb - Not found
npm error 404
npm error 404  The requested resource '@a/b@*' could not be found or you do not have permission.
npm error 404
npm error 404 Note that you can also install from a
npm error 404 tarball, folder, http url, or git url.
npm error A complete log of this run can be found in: /home/ann/.npm/_logs/x-debug-0.log
"""
NPM_10 = """\
npm error code E404
npm error 404 Not Found - GET https://registry/no-such-server - Not found
npm error 404
npm error 404  'no-such-server@*' is not in this registry.
npm error 404
npm error 404 Note that you can also install from a
npm error 404 tarball, folder, http url, or git url.
npm error A complete log of this run can be found in: /home/ann/.npm/_logs/x-debug-0.log
"""
PYTHON = """\
Traceback (most recent call last):
  File "server.py", line 1, in <module>
KeyError: 'API_KEY'
"""


@pytest.mark.parametrize(
    ("written", "notified"),
    [
        (NODE, "Error: Cannot find module '/srv/no-such.js'"),
        (
            NPM,
            "npm error 404  The requested resource '@a/b@*' could not be found "
            "or you do not have permission.",
        ),
        (NPM_10, "npm error 404  'no-such-server@*' is not in this registry."),
        (
            NPM_10.replace("npm error", "npm ERR!"),
            "npm ERR! 404  'no-such-server@*' is not in this registry.",
        ),
        (PYTHON, "KeyError: 'API_KEY'"),
        ("warming up\nit is too cold\n", "it is too cold"),
        (
            "╭─ Error ──────────╮\n│ Missing argument. │\n╰───────────────────╯\n",
            "Missing argument.",
        ),
        ("Node.js v20.20.2\n", "Node.js v20.20.2"),
        ("npm error 404\n", ""),
        ("", ""),
    ],
)
def test_the_line_that_says_why(written: str, notified: str) -> None:
    assert reason_of(written.split("\n")) == notified


async def said(written: bytes, given: dict[str, str]) -> str:
    """The last words of a process that wrote that, and had that in its environment."""
    stream = asyncio.StreamReader()
    stream.feed_data(written)
    stream.feed_eof()
    errors = StandardError(stream, lambda: "the server", given)
    await errors.read()
    return errors.last_words


async def test_what_it_was_given_is_neither_sent_nor_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    given = {"TOKEN": "hunter2", "KEY": "first line\nsecond line\n", "LONG": "x" * 2_000, "N": "1"}
    written = b"1 token: hunter2 of second line, " + b"x" * 2_000
    assert await said(written, given) == "1 token: $TOKEN of $KEY, $LONG"
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["the server: 1 token: $TOKEN of $KEY, $LONG"]


async def test_a_long_value_is_not_said_either_and_the_rest_of_a_line_that_was_cut_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    key = "key-" + "k" * 20_000
    assert await said(b"wrong: " + key.encode(), {"KEY": key}) == "wrong: $KEY"
    # Whatever is cut: a value may begin anywhere in it.
    for before in range(65_536 - 64, 65_536 + 64, 16):
        line = b"x" * before + b"hunter2hunter2" + b"y" * 150_000
        assert await said(line + b"\nthe end", {"TOKEN": "hunter2hunter2"}) == "the end"
    assert "kkk" not in caplog.text and "unter" not in caplog.text


async def test_a_flood_is_bounded_in_the_log_and_its_end_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    written = b"".join(b"line %d\n" % number for number in range(5_000)) + b"out of memory"
    assert await said(written, {}) == "out of memory"
    assert len(caplog.records) < 300


async def refused(client: RawClient) -> str:
    params = initialize_params("another")
    return str((await client.error("initialize", params))["message"])


async def test_no_client_reads_the_environment_in_the_error_of_a_start() -> None:
    options = {"env": {"SECRET": "hunter2"}}
    async with child_world("dies", "key: hunter2", options=options) as w:
        assert "the key: $SECRET is missing" in await refused(w.client())


async def test_the_log_says_that_it_did_not_start_that_it_died_and_that_there_is_no_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, each of them, and with whose it was."""
    async with child_world("dies", "key") as w:
        for _ in range(3):
            await refused(w.client())
    async with child_world(options={"max_children": 1}) as w:
        client = await w.connected()
        for _ in range(3):
            await refused(w.client())
        os.kill(int(await client.text("pid")), signal.SIGKILL)
        await until(lambda: "status -9" in caplog.text, "its end is logged")
    async with child_world() as w:
        await w.connected()
    of_children = [record for record in caplog.records if "upstream" in record.name]
    logged = [each.getMessage() for each in of_children if each.levelno >= logging.WARNING]
    assert [line.partition(": ")[2] for line in logged] == [
        "the server did not start: it ended with status 1: the key is missing",
        "the limit max_children (1) is reached; raise it with --max-children",
        "it ended with status -9",
    ]
    assert all(line.startswith("the server") for line in logged)


@pytest.mark.full
async def test_a_fastmcp_server_that_is_a_command_logs_no_banner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = tmp_path / "server.py"
    server.write_text("from fastmcp import FastMCP\nFastMCP('notes').run()\n")
    async with world(server=StdioServer(sys.executable, str(server), start_timeout=60)) as w:
        await w.connected()
    assert "Starting MCP server" in caplog.text
    assert not set("╭│╰─") & set(caplog.text)
