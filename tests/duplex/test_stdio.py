"""stdio: a process with ``layer.run("stdio")`` at the other end of real pipes."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from mcp_sessions_transports.stdio.stdio_server import lines
from tests.support import apps
from tests.support.duplex import DECLARED, ELICITS, WITHIN, websocket
from tests.support.modern import ModernClient
from tests.support.process_peer import ProcessPeer
from tests.support.raw import SocketCarrier, at_most, text_of

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(
    *arguments: str, one_socket: bool = False, **options: Any
) -> AsyncGenerator[ProcessPeer]:
    """The program, running.

    Args:
        one_socket: Its standard input and output are one socket, as under inetd or socat.
    """
    command = [sys.executable, "-m", "tests.support.stdio_program", *arguments]
    started_in: dict[str, Any] = {"cwd": ROOT, "env": {"PYTHONPATH": f"{ROOT}:{ROOT}/transports"}}
    if one_socket:
        ours, theirs = socket.socketpair()
        running = await asyncio.create_subprocess_exec(
            *command, stdin=theirs.fileno(), stdout=theirs.fileno(), **started_in
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**20)
    else:
        running = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=2**20, **started_in
        )
        assert running.stdout is not None and running.stdin is not None
        reader, writer = running.stdout, running.stdin
    peer = ProcessPeer(running, reader, writer, **options)
    try:
        yield peer
    finally:
        if running.returncode is None:
            running.kill()
            await at_most(WITHIN, running.wait())
        writer.close()


@pytest.mark.parametrize("one_socket", [False, True])
async def test_nothing_but_protocol_is_on_standard_output(one_socket: bool) -> None:
    """A tool prints, its child prints, another child reads: none of it reaches the wire. The
    input of a server whose input and output are one socket ended at once.
    """
    async with process("stdio", one_socket=one_socket) as peer:
        await peer.initialize()
        assert await peer.text("noisy") == "a child reads 0 bytes of the protocol"
        await peer.leave()
        assert await peer.exit() == 0
        assert all(message["jsonrpc"] == "2.0" for message in peer.messages)


async def test_an_input_that_is_reset_has_ended() -> None:
    """STD4: a host that dies with an answer unread resets the socket. The thread that reads died
    of it, and the server, with all its sessions, waited for ever.
    """
    host, ours = socket.socketpair()
    with ours, ours.makefile("rb") as wire_in:
        ours.sendall(b"an answer\n")
        host.sendall(b"{}\n")
        async with lines(wire_in, limit=100) as received:
            assert await at_most(WITHIN, received.get()) == b"{}\n"
            host.close()
            assert await at_most(WITHIN, received.get()) is None


async def test_the_end_of_input_answers_what_runs_and_exits_0() -> None:
    """End of stdin detaches and shuts down in order; the modern era as well."""
    async with process("stdio", modern=True) as peer:
        assert (await peer.result("server/discover"))["capabilities"]["sessions"] == {}
        session_id = (await peer.start())["sessionId"]
        working = await peer.call("work", meta={"progressToken": "t"})
        await peer.notified("notifications/progress")
        await peer.leave()
        assert text_of((await peer.answer(working))["result"]) == "worked"
        assert await peer.exit() == 0
        assert session_id


_WITH_A_DEFECT = """
from mcp_sessions_transports.duplex import DuplexConnection
from tests.support import stdio_program

async def take(self, line):
    raise RuntimeError("a defect")

DuplexConnection.take = take
stdio_program.main()
"""


async def test_a_defect_of_the_server_ends_it_with_a_status_that_is_not_0() -> None:
    """Its host took it for a server that had ended in order, and nobody learned why."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _WITH_A_DEFECT, "stdio"),
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT}/transports"},
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    _, said = await at_most(WITHIN, running.communicate(b"{}\n"))
    assert running.returncode == 1
    assert b"RuntimeError: a defect" in said


async def test_sigterm_drains() -> None:
    """WSS17: clients are notified, running requests are answered, the process ends with 0."""
    async with process("stdio", capabilities=DECLARED) as peer:
        await peer.initialize()
        session_id = (await peer.start())["sessionId"]
        working = await peer.call("work", meta={"progressToken": "t"})
        await peer.notified("notifications/progress")
        peer.process.send_signal(signal.SIGTERM)
        notified = await peer.notified("notifications/sessions/detached")
        assert notified["params"] == {
            "sessionId": session_id,
            "reason": "draining",
            "retryAfter": 5,
        }
        assert text_of((await peer.answer(working))["result"]) == "worked"
        assert await peer.exit() == 0


async def test_garbage_and_messages_over_the_limit_are_answered_and_the_rest_is_served() -> None:
    """Neither ends the connection. A message that was too big was dropped in silence, and one of
    exactly the limit was too big, by its line break.
    """
    async with process("stdio") as peer:
        await peer.initialize()
        await peer.put("garbage")
        await peer.put("")
        await peer.put("\xff\x00 \u2028")
        ping = '{"jsonrpc":"2.0","id":"%s","method":"ping","params":{"pad":"%s"}}'
        await peer.put(ping % ("big", "x" * 200_000))
        await peer.put(ping % ("one", "x" * (20_001 - len(ping % ("one", "")))))
        await peer.put(ping % ("fit", "x" * (20_000 - len(ping % ("fit", "")))))
        assert "result" in await peer.answer("fit")
        codes = [m["error"]["code"] for m in peer.messages if m.get("id", 0) is None]
        assert codes == [-32700, -32700, -32600, -32600]
        await peer.leave()
        assert await peer.exit() == 0


async def test_a_session_of_a_pipe_is_resumed_over_http_and_websocket_in_one_process() -> None:
    """``layer.run("stdio", port=…)``: one layer; both eras; then the end of the pipe."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    async with process("both", str(port), capabilities=DECLARED) as peer:
        await peer.initialize()
        started = await peer.start()
        session_id, position = started["sessionId"], started["sessionEventId"]
        async with websocket(f"ws://127.0.0.1:{port}/mcp", capabilities=ELICITS) as other:
            await other.initialize()
            assert (await other.resume(session_id, position))["catchup"] is True
            notified = await peer.notified("notifications/sessions/detached")
            assert notified["params"]["reason"] == "taken_over"
            assert (await peer.error("tools/list"))["code"] == -31010
            carrier = SocketCarrier("127.0.0.1", port)
            modern = ModernClient(carrier)
            host = {"Host": f"127.0.0.1:{port}"}
            resumed = modern.send("session/resume", {"sessionId": session_id}, headers=host)
            assert (await resumed.result())["resumed"] is True
            await carrier.aclose()
            await peer.leave()
            assert (await other.closed())[0] == 1012
        assert await peer.exit() == 0


async def test_our_own_server_compresses_nothing_and_drains_with_1012() -> None:
    """SEC9, WSS17: ``layer.run`` and SIGTERM. With nothing running uvicorn
    closed the connection before a word of ours was written.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    url = f"ws://127.0.0.1:{port}/mcp"
    command = [sys.executable, "-m", "tests.support.stdio_program", "http", str(port)]
    started_in: dict[str, Any] = {"cwd": ROOT, "env": {"PYTHONPATH": f"{ROOT}:{ROOT}/transports"}}
    running = await asyncio.create_subprocess_exec(*command, stderr=PIPE, **started_in)
    try:
        assert running.stderr is not None
        assert await at_most(WITHIN, running.stderr.readline()) == b"up\n"
        async with connect(url, proxy=None) as offering:
            assert offering.protocol.extensions == []
        async with websocket(url, capabilities=DECLARED) as peer:
            await peer.initialize()
            session_id = (await peer.start())["sessionId"]
            running.send_signal(signal.SIGTERM)
            notified = await peer.notified("notifications/sessions/detached")
            assert notified["params"]["sessionId"] == session_id
            assert (await peer.closed())[0] == 1012
        assert await at_most(WITHIN, running.wait()) == 0
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
