"""``kill -9`` and restart, over a SQLite file: clients go on, and miss nothing.

The server is ``mcp-sessions serve --store sqlite:///…`` in a process of its own, always on
the same port. Clients reach it through a proxy, which keeps a new connection waiting while
nobody listens: as systemd's sockets and most load balancers do.
"""

import asyncio
import itertools
import os
import random
import re
import socket
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError

from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client_transport import resumable
from mcp_sessions.security import mint_key
from tests.support import apps
from tests.support.modern import ModernClient
from tests.support.process_peer import ProcessPeer
from tests.support.proxy import Side, TcpProxy
from tests.support.raw import RawClient, SocketCarrier, at_most, in_session, uris
from tests.support.redis_server import redis_server
from tests.support.resuming import MODES, QUICK, Received, text_of

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)

ROOT = Path(__file__).parents[2]
BOTH = [pytest.param(mode, marks=[pytest.mark.full] * (mode == "legacy")) for mode in MODES]
"""The modes of our client; stock clients of the older era are among what every run tests."""

WITHIN = 40.0
"""Seconds that one test may take; each start of the server takes one or two."""


class Served:
    """A server over one file, in one process after the other."""

    def __init__(self, folder: Path, store: str | None = None) -> None:
        self.folder = folder
        self.file = folder / "sessions.db"
        self.store = store or f"sqlite:///{self.file}"
        self.said = ""
        """The standard error of the newest process."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT}/transports",
            "RUNS": str(folder / "runs"),
            "MCP_SESSIONS_KEYS": mint_key(),
        }

    def command(self, *arguments: str) -> list[str]:
        app = str(ROOT / "tests/support/restart_app.py") + ":mcp"
        serve = [sys.executable, "-m", "mcp_sessions.cli", "serve", app, "--store", self.store]
        return [*serve, *arguments]

    async def start(self, *options: str) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *self.command("--port", str(self.port), *options),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env=self.env,
            cwd=self.folder,
        )
        self.said = ""
        up = asyncio.Event()

        async def read() -> None:
            assert process.stderr is not None
            while line := await process.stderr.readline():
                self.said += line.decode()
                if "  store " in self.said:
                    up.set()
            up.set()

        self._reading = asyncio.create_task(read())
        await at_most(20, up.wait())
        assert "  store " in self.said, self.said

    async def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await at_most(10, self._process.wait())
        if self._reading is not None:
            await at_most(10, self._reading)
        self._process = None

    async def restart(self, proxy: TcpProxy) -> None:
        """``kill -9``, and another process on the same port and file."""
        await self.kill()
        # Also those that were stalled, through which the end does not pass.
        proxy.cut_all()
        await self.start()

    @asynccontextmanager
    async def pipe(self) -> AsyncGenerator[ProcessPeer]:
        """A client of a process that serves standard input and output, killed at the end."""
        running = await asyncio.create_subprocess_exec(
            *self.command("--stdio"), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=self.env
        )
        assert running.stdout is not None and running.stdin is not None
        peer = ProcessPeer(running, running.stdout, running.stdin)
        try:
            yield peer
        finally:
            running.kill()
            await peer.exit()

    @property
    def runs(self) -> list[str]:
        runs = self.folder / "runs"
        return runs.read_text().splitlines() if runs.exists() else []

    async def until(self, look: Callable[[], bool], *, within: float = 30) -> None:
        """Wait for what another process does."""
        async with asyncio.timeout(within):
            while not look():  # noqa: ASYNC110  (no event of this process)
                await asyncio.sleep(0.01)

    def answers(self) -> int:
        """How many answers the file keeps."""
        connection = sqlite3.connect(self.file)
        try:
            kept = "SELECT count(*) FROM keys WHERE outcome IS NOT NULL"
            return int(connection.execute(kept).fetchone()[0])
        finally:
            connection.close()


@asynccontextmanager
async def serving(
    tmp_path: Path, *, within: float = WITHIN
) -> AsyncGenerator[tuple[Served, TcpProxy]]:
    served = Served(tmp_path)
    try:
        with anyio.fail_after(within):
            await served.start()
            async with TcpProxy("127.0.0.1", served.port) as proxy:
                proxy.patience = 20
                yield served, proxy
    finally:
        await served.kill()


async def call(client: Client, tool: str, **arguments: Any) -> str:
    return text_of(await client.call_tool(tool, arguments))


async def test_a_stock_client_continues_with_last_event_id(tmp_path: Path) -> None:
    """HTL10, CUP8: it knows nothing of us. The event that was stored, and acknowledged to the
    caller that caused it, but never reached the client, comes from the file.
    """
    async with serving(tmp_path) as (served, proxy):
        received = Received()
        async with Client(
            proxy.url(), mode="legacy", message_handler=received.on_message
        ) as client:
            stream = await proxy.carrying(b"GET /mcp")
            await call(client, "touch", uri="a:1")
            await received.has(lambda: received.updates == ["a:1"], "the first event")
            stream.stall(Side.SERVER)
            await call(client, "touch", uri="a:2")
            assert received.updates == ["a:1"]
            await served.restart(proxy)
            # The same Mcp-Session-Id, which is no 404.
            assert await call(client, "touch", uri="a:3") == "touched a:3"
            await received.has(
                lambda: len(received.updates) >= 3, "what was missed, and what is new"
            )
            assert received.updates == ["a:1", "a:2", "a:3"]
        assert served.runs == ["touch a:1", "touch a:2", "touch a:3"]


async def test_a_stock_clients_call_that_died_with_its_server_is_answered(tmp_path: Path) -> None:
    """KEY3, CLI1: it comes back for the rest of its response stream, and is notified that nobody
    can know; it does not wait for ever, and nothing runs again.
    """
    async with serving(tmp_path) as (served, proxy):
        async with Client(proxy.url(), mode="legacy") as client:
            failed = list[MCPError]()

            async def wait() -> None:
                with pytest.raises(MCPError) as raised:
                    await call(client, "wait", gate="never")
                failed.append(raised.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                stream = await proxy.carrying(b'"wait"')
                # The stream is open: its client has an id to come back with.
                await stream.sent(re.compile(rb"(?m)^id: ?post"))
                await served.restart(proxy)
        assert [error.error.code for error in failed] == [-31012]
        assert served.runs == ["wait never"]


@pytest.mark.parametrize("scheme", ["http", pytest.param("ws", marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", BOTH)
async def test_our_client_resumes_with_state_data_and_events(
    tmp_path: Path, mode: str, scheme: str
) -> None:
    """Two deaths in a row: one session, nothing lost, nothing twice."""
    async with serving(tmp_path) as (served, proxy):
        received = Received()
        url = proxy.url(scheme=scheme)
        transport = resumable(url, on_resume=received.on_resume, policy=QUICK)
        async with Client(transport, mode=mode, message_handler=received.on_message) as client:
            expected = list[str]()
            for number in range(2):
                expected.append(f"word-{number}")
                assert await call(client, "remember", word=expected[-1]) == " ".join(expected)
                await served.restart(proxy)
                assert await call(client, "last") == expected[-1]
                if mode == "legacy":
                    await call(client, "touch", uri=f"a:{number}")
            if mode == "legacy":
                await received.has(lambda: len(received.updates) >= 2, "an event of each life")
                assert received.updates == ["a:0", "a:1"]
            assert all(outcome.recovered for outcome in received.outcomes), received.outcomes


@pytest.mark.parametrize("mode", BOTH)
async def test_an_answer_that_was_kept_but_never_arrived_comes_after_the_restart(
    tmp_path: Path, mode: str
) -> None:
    """KEY3: the client sends the same key again, and nothing runs for it."""
    answers = list[str]()
    async with serving(tmp_path) as (served, proxy):
        async with Client(resumable(proxy.url(), policy=QUICK), mode=mode) as client:
            await call(client, "remember", word="warm")
            before = served.answers()

            async def wait() -> None:
                answers.append(await call(client, "wait", gate="open"))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await served.until(lambda: "wait open" in served.runs)
                proxy.stall_all(Side.SERVER)
                (tmp_path / "open").touch()
                await served.until(lambda: served.answers() > before)
                await served.restart(proxy)
        assert answers == ["through open"]
        assert served.runs.count("wait open") == 1


@pytest.mark.parametrize("mode", BOTH)
async def test_a_call_that_died_with_its_server_is_answered_and_does_not_run_again(
    tmp_path: Path, mode: str
) -> None:
    """KEY3, CLI1: nobody can know how it ended, and its caller gets that answer."""
    failures = list[MCPError]()
    async with serving(tmp_path) as (served, proxy):
        async with Client(resumable(proxy.url(), policy=QUICK), mode=mode) as client:
            await call(client, "remember", word="warm")

            async def wait() -> None:
                with pytest.raises(MCPError) as failed:
                    await call(client, "wait", gate="never")
                failures.append(failed.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await served.until(lambda: "wait never" in served.runs)
                await served.restart(proxy)
            assert await call(client, "remember", word="cold") == "warm cold"
        assert [is_outcome_unknown(failure) for failure in failures] == [True]
        assert served.runs.count("wait never") == 1


CLIENTS = 50
KILLS = 6
PATIENT = replace(QUICK, give_up_after=60)


@dataclass
class Busy:
    """A client that calls and listens all the time, and what came of it."""

    answered: list[str] = field(default_factory=list[str])
    unknown: list[str] = field(default_factory=list[str])
    received: Received = field(default_factory=Received)

    async def run(self, number: int, url: str, mode: str, stop: anyio.Event) -> None:
        """One call after the other until the test stops it, and one more."""
        transport = resumable(url, on_resume=self.received.on_resume, policy=PATIENT)
        on_message = self.received.on_message
        async with Client(transport, mode=mode, message_handler=on_message) as client:
            for count in itertools.count():
                last, uri = stop.is_set(), f"{number}:{count}"
                try:
                    await call(client, "touch", uri=uri)
                    self.answered.append(uri)
                except MCPError as failed:
                    assert is_outcome_unknown(failed), failed
                    self.unknown.append(uri)
                if last:
                    break
            # What was stored before its answer was sent is received, sooner or later.
            await self.received.has(
                lambda: set(self.answered) <= set(self.received.updates), f"of client {number}: all"
            )


async def unknown_outcomes(url: str) -> list[bool]:
    """Call a tool that never returns, once for each kill; whether each outcome is unknown."""
    unknown: list[bool] = []
    async with Client(resumable(url, policy=PATIENT), mode="legacy") as client:
        for number in range(KILLS):
            with pytest.raises(MCPError) as failed:
                await call(client, "wait", gate=f"never-{number}")
            unknown.append(is_outcome_unknown(failed.value))
    return unknown


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_six_deaths_under_fifty_clients_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """CUP8, KEY3, CUP5: no event lost or repeated, no call run twice, every caller answered."""
    clients = [Busy() for _ in range(CLIENTS)]
    async with serving(tmp_path, within=360) as (served, proxy):
        stop, chance = anyio.Event(), random.Random(6)
        async with anyio.create_task_group() as tasks:
            for number, client in enumerate(clients):
                tasks.start_soon(client.run, number, proxy.url(), "legacy", stop)
            waiting = asyncio.create_task(unknown_outcomes(proxy.url()))
            for number in range(KILLS):
                # Killed as soon as it works again, at a moment that nobody chose.
                done, waits = len(served.runs) + chance.randrange(20, 200), f"wait never-{number}"
                await served.until(
                    lambda least=done, waits=waits: (
                        len(served.runs) >= least and waits in served.runs
                    ),
                    within=60,
                )
                await served.restart(proxy)
            stop.set()
            assert await waiting == [True] * KILLS
        runs = served.runs
    assert len(runs) == len(set(runs)), "a call ran twice"
    for client in clients:
        updates = client.received.updates
        assert len(updates) == len(set(updates)), "an event came twice"
        known = {*client.answered, *client.unknown}
        assert set(client.answered) <= set(updates) <= known
        assert all(f"touch {uri}" in runs for uri in client.answered)
        assert all(outcome.recovered for outcome in client.received.outcomes)
        assert [uri for uri in updates if uri in client.answered] == client.answered
    assert sum(len(client.answered) for client in clients) > CLIENTS


async def test_over_stdio_a_session_survives_the_whole_process(tmp_path: Path) -> None:
    """Architecture, "Stores": "over stdio of the whole process"; by ``session/resume``."""
    served = Served(tmp_path)
    with anyio.fail_after(WITHIN):
        async with served.pipe() as peer:
            await peer.initialize()
            session_id = (await peer.start())["sessionId"]
            assert await peer.text("remember", word="first") == "first"
            await peer.text("touch", uri="a:1")
            await peer.text("touch", uri="a:2")
            position = (await peer.has_events(2))[0]["params"]["sessionEventId"]
        async with served.pipe() as peer:
            await peer.initialize()
            resumed = await peer.resume(session_id, position)
            assert (resumed["catchup"], resumed["replayed"]) == (True, 1)
            assert uris(await peer.has_events(1)) == ["a:2"]
            assert await peer.text("remember", word="second") == "first second"
        # By name as well, with nothing resumed (ASC1).
        async with served.pipe() as peer:
            await peer.initialize()
            named = in_session(session_id)
            assert await peer.text("remember", word="third", meta=named) == "first second third"
            assert await peer.text("last", meta=named) == "third"


async def test_a_second_server_on_the_file_is_refused(tmp_path: Path) -> None:
    """One process serves from a file; the other says which, waits a little, and ends."""
    async with serving(tmp_path) as (served, _):
        second = await asyncio.create_subprocess_exec(
            *served.command("--port", "0"),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=served.env,
        )
        out, said = await at_most(20, second.communicate())
        process = served._process  # pyright: ignore[reportPrivateUsage]
        assert process is not None and out == b""
        waits, refused = said.decode().splitlines()
        in_use = f"{served.file} is in use by process {process.pid}: "
        assert waits.endswith(f"{in_use}waiting for up to 3 s")
        assert refused == f"mcp-sessions serve: {in_use}one process serves from a file at a time"
        assert second.returncode == 2


@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def test_a_conversation_continues_after_a_kill(store: str, tmp_path: Path) -> None:
    """Of a host that starts no session, whose every call comes on a connection of its own."""
    with redis_server() if store == "redis" else nullcontext() as redis:
        await expect_a_conversation_to_continue(Served(tmp_path, redis.url if redis else None))


async def expect_a_conversation_to_continue(served: Served) -> None:
    meta = {"openai/session": "one"}
    try:
        with anyio.fail_after(WITHIN):
            said: list[str] = []
            for word in ("a", "b"):
                await served.start("--conversations")
                carrier = SocketCarrier("127.0.0.1", served.port)
                client = ModernClient(carrier)
                said.append(await client.text("remember", {"word": word}, meta=meta))
                handshake = RawClient(carrier)
                await handshake.initialize()
                said.append(await handshake.text("remember", word=word, meta=meta))
                await carrier.aclose()
                await served.kill()
            assert said == ["a", "a a", "a a b", "a a b b"]
    finally:
        await served.kill()
