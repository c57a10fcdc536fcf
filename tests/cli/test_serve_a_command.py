"""``mcp-sessions serve -- COMMAND``: a server in any language, by its command line alone."""

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.settings_from_options import given_options
from tests.support.children import CHILD, MODERN_CHILD, child_world, children_of, is_alive
from tests.support.duplex import ELICITS, listening
from tests.support.modern import MODERN, envelope
from tests.support.processes import wait_until_it_listens
from tests.support.raw import RawClient, SocketCarrier, text_of
from tests.support.serving import initialize, read_lines, serving

COMMAND = ("--", sys.executable, "-S", CHILD)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_is_served_and_nothing_of_it_is_left(
    tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tmp_path, "--lazy", *COMMAND, "stubborn") as process:
        said = read_lines(process, 5)
        found = re.search(r"^  at +(http://127\.0\.0\.1:\d+/mcp)$", said, re.M)
        assert found is not None, said
        assert f"serves {sys.executable}\n" in said, "its arguments may hold secrets"
        assert initialize(found.group(1))["serverInfo"] == {
            "name": "child",
            "version": "1",
            "ofAnotherKind": True,
        }
        children = children_of(process.pid)
        assert len(children) == 2, "the server, and the guard"
        process.send_signal(number)
        process.wait(20)
        for _ in range(100_000):
            if not any(is_alive(pid) for pid in children):
                return
        raise AssertionError("a process is left")


def pid_of(client: http.client.HTTPConnection) -> int:
    """The process that serves a client which can be asked."""
    params = {"name": "pid", "arguments": {}, "_meta": envelope(capabilities=ELICITS)}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": MODERN,
        "mcp-method": "tools/call",
        "mcp-name": "pid",
    }
    client.request("POST", "/mcp", json.dumps(message), headers)
    return int(text_of(json.loads(client.getresponse().read())["result"]))


def connected(port: int, own: int) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.sock = socket.socket()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Its end leaves nothing behind that keeps the port.
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sock.bind(("127.0.0.1", own))
    client.sock.settimeout(30)
    client.sock.connect(("127.0.0.1", port))
    return client


def pids_from_one_port(port: int) -> list[int]:
    """Two requests on a connection, and one on a later connection from the same port."""
    first = connected(port, 0)
    own = first.sock.getsockname()[1]
    pids = [pid_of(first), pid_of(first)]
    first.close()
    second = connected(port, own)
    pids.append(pid_of(second))
    second.close()
    return pids


def test_a_later_connection_from_the_same_port_is_another_client(tmp_path: Path) -> None:
    """The process of the first one ends with it."""
    with serving(tmp_path, "--lazy", *COMMAND) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp$", read_lines(process, 5), re.M)
        assert found is not None
        pids = pids_from_one_port(int(found.group(1)))
        assert pids[0] == pids[1] != pids[2]


def test_a_client_is_told_how_long_its_connection_is_kept(tmp_path: Path) -> None:
    """RFC 2068, 19.7.1.1. ``fetch`` of Node.js would close it after 4 seconds, and its process ends
    with it. By this it keeps both from one call to the next.
    """
    with serving(tmp_path, "--lazy", *COMMAND) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp$", read_lines(process, 5), re.M)
        assert found is not None
        client = connected(int(found.group(1)), 0)
        client.request("GET", "/health")
        assert client.getresponse().headers["keep-alive"] == "timeout=75"
        client.close()


async def test_so_it_is_if_another_server_serves_the_layer() -> None:
    """A plain uvicorn does not say when a connection ends."""
    async with child_world() as w, listening(w.layer_app) as port:
        pids = await asyncio.to_thread(pids_from_one_port, port)
        assert pids[0] == pids[1] != pids[2]


def test_a_connection_of_a_named_proxy_has_several_clients(tmp_path: Path) -> None:
    """Also if the proxy adds nothing to their requests."""
    named = ("--forwarded-allow-ips", "127.0.0.1")
    with serving(tmp_path, "--lazy", *named, *COMMAND) as process:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/mcp$", read_lines(process, 5), re.M)
        assert found is not None
        proxy = connected(int(found.group(1)), 0)
        pids = [pid_of(proxy), pid_of(proxy)]
        proxy.close()
        assert pids[0] != pids[1]


def test_it_serves_where_no_standard_file_is_open(tmp_path: Path) -> None:
    """As under some supervisors: its children have all of theirs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "mcp_sessions.cli", "serve", "--port", str(port), *COMMAND]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *serve], cwd=tmp_path)
    try:
        wait_until_it_listens(process, port)
        assert initialize(f"http://127.0.0.1:{port}/mcp")["serverInfo"]
    finally:
        process.terminate()
        process.wait(20)


def test_a_command_that_refuses_a_handshake_is_served_to_clients_that_shake_hands(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, "--", sys.executable, "-S", MODERN_CHILD) as process:
        found = re.search(r"^  at +(http://127\.0\.0\.1:\d+/mcp)$", read_lines(process, 5), re.M)
        assert found is not None
        result = initialize(found.group(1))
        assert (result["protocolVersion"], result["instructions"]) == ("2025-11-25", "ask me")


def test_processes_wait_as_many_as_are_said_and_none_is_left(tmp_path: Path) -> None:
    with serving(tmp_path, "--warm", "2", "--lazy", *COMMAND) as process:
        read_lines(process, 5)
        until = time.monotonic() + 20
        while len(children := children_of(process.pid)) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(children) == 3, "two servers, and the guard"
        process.kill()
        process.wait(20)
        while any(is_alive(pid) for pid in children) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(is_alive(pid) for pid in children)


def test_a_command_is_started_once_before_a_client_needs_it(tmp_path: Path) -> None:
    with serving(tmp_path, *COMMAND, "dies", "key") as process:
        said = read_lines(process, 7)
    assert (
        "WARNING" in said and "failed its first start: it ended with status 1: the key is" in said
    )


def test_a_lazy_server_starts_nothing_before_a_client_needs_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--lazy", *COMMAND, "dies", "key") as process:
        read_lines(process, 5)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "key" not in process.stderr.read()


def test_of_several_workers_the_first_tries() -> None:
    def tries(*more: str) -> bool:
        options = parsed([*more, "--store", "redis://localhost", *COMMAND])
        return bool(given_options(options)["try_at_start"])

    assert tries() and tries("--worker", "1,2,3,1")
    assert not tries("--worker", "1,2,3,0")
    assert not tries("--stdio") and tries("--stdio", "--port", "0") and not tries("--lazy")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lazy", "app.py"], "--lazy is only for -- COMMAND"),
        (["--", "no-such-command", "x"], "command not found: no-such-command"),
        (["--warm", "0", "--", "no-such-command"], "command not found: no-such-command"),
        (["--", "no-such -y x"], "its arguments stand by themselves: 'no-such', ..."),
        (["--", CHILD], f"not an executable file: {CHILD}"),
        (["--cwd", "/no/such/place", *COMMAND], "cwd: no such directory: /no/such/place"),
        (["--per", "session", "app.py"], "--per is only for -- COMMAND"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line_at_once(
    arguments: list[str], said: str, refused: Callable[..., str]
) -> None:
    assert said in refused("serve", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no server to serve: give TARGET"),
        (["--"], "no server to serve: give TARGET"),
        (["app.py", *COMMAND], "only one server is served: leave out app.py"),
        (["--env", "NOT_SET_HERE", *COMMAND], "NOT_SET_HERE has no value here"),
        (["--per", "tenant", *COMMAND], "--per"),
        (["--max-children", "0", *COMMAND], "--max-children"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    arguments: list[str], said: str, refused: Callable[..., str]
) -> None:
    assert "NOT_SET_HERE" not in os.environ
    assert said in refused("serve", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stroe", "x", "app.py"], "arguments: --stroe app.py; did you mean --store? (see"),
        (["app.py", "--max-event", "5"], "did you mean --max-events? (see"),
        (["app.py", "--prot=1"], "arguments: --prot=1; did you mean --port? (see"),
        (["app.py", "--unlike"], "arguments: --unlike (see"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_one_that_was_meant(
    refused: Callable[..., str], arguments: list[str], said: str
) -> None:
    assert said in refused("serve", *arguments)


@pytest.mark.parametrize("more", [[], ["-y", "server-everything"], ["server.js"]])
def test_who_forgets_what_stands_before_a_command_is_notified(
    more: list[str], refused: Callable[..., str]
) -> None:
    assert "write a command after --: mcp-sessions serve -- cat ..." in refused(
        "serve", "--port", "0", "cat", *more
    )


@pytest.mark.parametrize("quoted", ["cat -y x", "cat server.py", "cat app.py:mcp"])
def test_a_quoted_command_line_is_asked_to_stand_after_two_dashes(
    quoted: str, refused: Callable[..., str]
) -> None:
    assert "write a command after --, without quotes: mcp-sessions serve -- cat ..." in refused(
        "serve", quoted
    )


@pytest.mark.parametrize("of", ["command", "config"])
def test_what_is_to_be_hidden_nobody_sees(tmp_path: Path, of: str) -> None:
    """Of any server, which need not know of it: a tool that is not to be had here."""
    entry = {"command": sys.executable, "args": ["-S", CHILD]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"one": entry}}))
    what = COMMAND if of == "command" else ("--config", "mcp.json")

    async def tools(port: int) -> list[Any]:
        carrier = SocketCarrier("127.0.0.1", port)
        client = RawClient(carrier, path="/mcp" if of == "command" else "/one/mcp")
        await client.initialize()
        listed = await client.result("tools/list")
        params = [{"name": name, "arguments": {"text": "a"}} for name in ("echo", "nobody")]
        codes = [(await client.error("tools/call", each))["code"] for each in params]
        await carrier.aclose()
        return [listed["tools"], codes[0] == codes[1]]

    with serving(tmp_path, "--hide", "e*", "--hide", "x", *what) as process:
        said = read_lines(process, 5)
        found = re.search(r"127\.0\.0\.1:(\d+)", said)
        assert found is not None, said
        assert asyncio.run(tools(int(found.group(1)))) == [[], True]
        process.send_signal(signal.SIGTERM)
        process.wait(20)
