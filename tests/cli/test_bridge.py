"""``mcp-sessions bridge``: a stdio-only host, a remote server, and a network between them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.support.apps import DEPRECATED
from tests.support.proxy import TcpProxy
from tests.support.resuming import Received, serving, text_of

CLIENT = {"name": "test", "version": "1"}
COMMAND = [sys.executable, "-m", "mcp_sessions.cli", "bridge"]


def bridge(*arguments: str) -> StdioServerParameters:
    """How a host starts it."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return StdioServerParameters(
        command=COMMAND[0], args=[*COMMAND[1:], *arguments], env=environment
    )


def run(*arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """A bridge that has ended; it was given this text on standard input."""
    return subprocess.run(
        [*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=50
    )


def lines_of(*messages: object) -> str:
    return "".join(json.dumps({"jsonrpc": "2.0", **cast(Any, each)}) + "\n" for each in messages)


def opening(**capabilities: object) -> list[dict[str, Any]]:
    """The first two messages of a host."""
    params = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": CLIENT}
    initialize = {"id": 0, "method": "initialize", "params": params}
    return [initialize, {"method": "notifications/initialized"}]


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize(
    ("mode", "scheme"),
    [
        ("auto", "http"),
        ("legacy", "ws"),
        pytest.param("auto", "ws", marks=pytest.mark.full),
        pytest.param("legacy", "http", marks=pytest.mark.full),
    ],
)
async def test_a_call_survives_the_network_under_the_bridge(mode: str, scheme: str) -> None:
    with serving() as (app, _, server):
        async with TcpProxy(server.host, server.port) as proxy:
            with anyio.fail_after(50):
                transport = stdio_client(bridge(proxy.url(scheme=scheme)))
                async with Client(transport, mode=mode) as client:
                    answers: list[str] = []

                    async def call() -> None:
                        result = await client.call_tool("slow", {"steps": 2, "gate": "g"})
                        answers.append(text_of(result))

                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(call)
                        await app.stage.reached("g:started", within=30)
                        proxy.cut_all()
                        app.stage.mark("g:go")

        assert answers == ["2 steps"]
        assert app.stage.count("g:started") == 1


@pytest.mark.filterwarnings(DEPRECATED)
async def test_the_jar_keeps_the_session_from_host_to_host(tmp_path: Path) -> None:
    with serving() as (_, _, server), anyio.fail_after(50):
        found: list[str] = []
        for _ in range(2):
            received = Received()
            transport = stdio_client(bridge(server.url(), "--jar", str(tmp_path / "jar")))
            async with Client(
                transport, mode="legacy", message_handler=received.on_message
            ) as client:
                found.append(text_of(await client.call_tool("session_id", {})))

        assert found[0] == found[1] != "none"


async def test_a_host_of_the_modern_era_gets_what_it_listens_for() -> None:
    """It speaks stdio, and so gives none of the headers that a listen has over HTTP."""
    with serving() as (_, layer, server), anyio.fail_after(50):
        async with Client(stdio_client(bridge(server.url())), mode="auto") as client:
            assert client.protocol_version == "2026-07-28"
            async with client.listen(resource_subscriptions=["note://1"]) as changes:
                await server.call(layer.notify_resource_updated, "note://1")
                assert getattr(await anext(changes), "uri", None) == "note://1"


@pytest.mark.filterwarnings(DEPRECATED)
async def test_headers_are_sent() -> None:
    with serving() as (_, _, server), anyio.fail_after(50):
        transport = stdio_client(bridge(server.url(), "--header", "X-Team: blue"))
        async with Client(transport, mode="legacy") as client:
            await client.list_tools()

        sent = [exchange.headers for exchange in server.wire.exchanges]
        assert sent
        assert all(headers["x-team"] == "blue" for headers in sent)


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_it_ends_when_its_host_closes_stdin(scheme: str) -> None:
    """By itself: a host that had to kill it would leave the session to its idle time."""
    with serving() as (_, _, server):
        done = run(server.url(scheme=scheme))

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: URL"),
        (["ftp://host/"], "an address begins with http://, https://, ws:// or wss://"),
        (["https:///mcp"], "did you mean https://mcp?"),
        (["https://host/mcp", "--header", "secret"], "must be 'NAME: VALUE'"),
        (["https://host/mcp", "--header", "X: secret", "--header", "X: b"], "'X' is there twice"),
        (["https://host/mcp", "--jar", "/nowhere/at/all/jar"], "there is no folder"),
    ],
)
def test_what_the_user_did_wrong_is_one_line(arguments: list[str], said: str) -> None:
    done = run(*arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert said in line
    assert "secret" not in line


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_a_server_that_cannot_be_reached_is_named_on_stderr_with_the_cause(scheme: str) -> None:
    """A host shows its user what a server that it started wrote there, and how it ended."""
    program = subprocess.Popen(
        [*COMMAND, f"{scheme}://user:secret@127.0.0.1:1/mcp?token=secret"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(lines_of(opening()[0]))
        program.stdin.flush()
        answer = program.stdout.readline()
        rest, errors = program.communicate(timeout=50)
    finally:
        program.kill()

    assert "error" in json.loads(answer)
    assert program.returncode == 1, errors
    last = errors.splitlines()[-1]
    assert f"{scheme}://127.0.0.1:1/mcp" in last
    assert "connection refused: nothing listens there" in last
    assert "secret" not in errors + answer + rest


def piped(*more: object, url: str, arguments: tuple[str, ...] = ()) -> tuple[list[Any], Any]:
    """The answers of a bridge to a host that writes all its messages and closes the pipe."""
    done = run(url, *arguments, text=lines_of(*opening(), *more))
    return [json.loads(line) for line in done.stdout.splitlines()], done


def called(request_id: int, tool: str, **arguments: object) -> dict[str, Any]:
    return {
        "id": request_id,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_what_was_asked_is_answered_before_it_ends_with_its_input(scheme: str) -> None:
    """In the sessions that it would have if each answer had been waited for."""
    with serving() as (_, _, server):
        answers, done = piped(
            called(1, "slow", steps=3),
            {"id": 2, "method": "session/start"},
            called(3, "session_id"),
            called(4, "echo", text="last"),
            url=server.url(scheme=scheme),
        )

    assert done.returncode == 0, done.stderr
    results = {each["id"]: each["result"] for each in answers if "id" in each}
    assert sorted(results) == [0, 1, 2, 3, 4]
    texts = {number: results[number]["content"][0]["text"] for number in (1, 3, 4)}
    assert texts == {1: "3 steps", 3: results[2]["sessionId"], 4: "last"}


def test_what_is_never_answered_does_not_keep_it() -> None:
    """It gets an error from here, and standard error names it."""
    with serving() as (_, _, server):
        url = server.url(scheme="ws")
        answers, done = piped(
            called(1, "slow", steps=1, gate="g"),
            called(2, "echo", text="hi"),
            url=url,
            arguments=("--last-wait", "2"),
        )

    assert done.returncode == 1
    found = {each["id"]: each for each in answers}
    error = found[1]["error"]
    assert error["code"] == -31012 and "result" in found[2]
    assert "slow may have run: ws://" in error["message"] and "--last-wait" in error["message"]
    last = done.stderr.splitlines()[-1]
    assert "1 not answered (tools/call)" in last and "--last-wait" in last


def test_a_question_that_nobody_can_answer_any_more_is_refused() -> None:
    """Its handler learns of it at once, and the call has its answer."""
    messages = [*opening(elicitation={}), called(1, "ask", question="?")]
    with serving() as (_, _, server):
        done = run(server.url(scheme="ws"), text=lines_of(*messages))

    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["id"] for each in answers if "method" not in each] == [0, 1], done.stderr
    assert done.returncode == 0


def test_it_ends_in_order_at_a_sigterm() -> None:
    with serving() as (_, _, server):
        host = subprocess.Popen(
            [*COMMAND, server.url()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert host.stdin is not None and host.stdout is not None and host.stderr is not None
        try:
            host.stdin.write(lines_of(opening()[0]))
            host.stdin.flush()
            answer = json.loads(host.stdout.readline())
            host.terminate()
            status = host.wait(50)
        finally:
            host.kill()
            host.wait()
            rest = host.stdout.read() + host.stderr.read()
            for each in (host.stdin, host.stdout, host.stderr):
                each.close()

    assert (answer["id"], status, rest) == (0, 0, "")


def test_it_ends_when_nobody_reads_what_it_writes() -> None:
    """A host that is gone keeps no bridge, also while a call runs."""
    with serving() as (_, _, server):
        program = subprocess.Popen(
            [*COMMAND, server.url(scheme="ws")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert program.stdin is not None and program.stdout is not None
            sent = lines_of(*opening(), called(1, "slow", steps=1, gate="g"))
            program.stdin.write(sent.encode())
            program.stdin.flush()
            program.stdout.readline()
            program.stdout.close()
            program.stdin.close()
            assert program.wait(timeout=20) == 0
        finally:
            program.kill()


def test_what_is_no_message_is_answered() -> None:
    """WSS14, STD3, REQ2: whoever sent it may be waiting."""
    lines = ["nonsense", "[]", '{"jsonrpc": "2.0", "id": 7}', "x" * 5_000]
    done = run("http://127.0.0.1:1/mcp", "--max-message", "4000", text="\n".join(lines) + "\n")

    answers = [json.loads(line) for line in done.stdout.splitlines()]
    found = [(each["id"], each["error"]["code"]) for each in answers]
    assert found == [(None, -32700), (None, -32600), (7, -32600), (None, -32600)]
