"""Incidents that an operator finds from the page alone, as ``docs/dashboard.md`` says.

A client that names a dead id is in ``test_layer_dashboard.py``.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.server import MCPServer

from mcp_sessions import SessionLayer, SessionPolicy, StdioServer
from mcp_sessions.authentication.credential import OPERATOR
from mcp_sessions.authentication.tokens import LEEWAY
from mcp_sessions.core.ends import EndReason, SessionEnd
from mcp_sessions.core.story import Entry
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.security import mint_key
from mcp_sessions.server.cluster.replica_messages import Instruct
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.stores.record_changes import Tell
from mcp_sessions.stores.redis import RedisStore
from tests.cli.test_serve_with_tokens import COMMAND, issuing, served, token
from tests.dashboard.pages import PROCESS, made, opened, pages_of
from tests.dashboard.test_layer_dashboard import (
    ACCEPT,
    Waiting,
    begun,
    browser,
    call,
    seen,
)
from tests.support.children import until
from tests.support.duplex import duplex_world, websocket
from tests.support.persistent_clients import CAPABILITIES
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.raw import call_params
from tests.support.redis_server import asked, namespace, redis_server, shared_redis
from tests.support.servers import serve
from tests.support.serving import INITIALIZE

Process = subprocess.Popen[bytes]


class Replicas:
    """Replicas that say what a test makes them say."""

    hint = ""

    def __init__(self, *said: Mapping[str, Any]) -> None:
        self.said = said

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Do nothing: they stay until the test ends."""

    async def look(self) -> Sequence[Mapping[str, Any]]:
        return self.said

    async def latest_method(self, session_id: SessionId) -> str | None:
        return None

    async def is_alive(self, process: str) -> bool | None:
        return True

    async def instruct(self, process: str, message: Instruct) -> bool:
        return False


async def test_a_client_that_floods_is_named_and_its_session_says_what_was_refused() -> None:
    """It has as many requests as one connection may have, and sends more."""
    waiting, answers = Waiting(), list[str]()
    layer = SessionLayer(waiting.server, policy=SessionPolicy(max_running_requests=2))
    app = layer.asgi_app(dashboard="/sessions")
    with serve(app) as server:
        async with (
            httpx2.AsyncClient(base_url=server.url(""), timeout=30) as flooder,
            httpx2.AsyncClient(base_url=server.url(""), timeout=30) as operator,
            anyio.create_task_group() as tasks,
        ):
            session_id = await begun(flooder)
            headers = ACCEPT | {"mcp-session-id": session_id}

            async def send(number: int) -> None:
                answer = await flooder.post("/mcp", json=call(number), headers=headers)
                answers.append(answer.text)

            # What the process counts has what other layers in it did.
            await seen(operator, "/sessions/", "nobody")
            for number in range(2, 12):
                tasks.start_soon(send, number)
            await until(lambda: len(answers) == 8, "all but two are refused", seconds=30)
            assert all("max_running_requests" in each for each in answers)

            await seen(operator, "/sessions/", "<li><span>127.0.0.1</span><b>8<")
            name = digest(session_id)
            refused = f"{name}</a> requests that a limit refused</span><b>8<"
            await seen(operator, "/sessions/", refused)
            said = await seen(operator, f"/sessions/session/{name}", "refused tools/call")
            assert "refused tools/call (max_running_requests), 8 times" in said
            assert "tools/call at " in said
            await server.call(waiting.end)
        assert len(answers) == 10


async def test_a_websocket_that_floods_is_named_and_so_is_its_session() -> None:
    """Its requests were refused before a session was known, and no story had them."""
    async with duplex_world(max_running_requests=1) as world:
        client = await world.websocket()
        await client.initialize()
        name = digest(SessionId((await client.start())["sessionId"]))
        first = await client.send("tools/call", call_params("wait", {"gate": "g"}))
        await world.inner.box.gate("g").started.wait()
        for _ in range(3):
            refused = await client.error("tools/call", call_params("echo", {"value": 1}))
            assert refused["data"]["limit"] == "max_running_requests"

        await seen_anew(world.layer, "/", "<span>127.0.0.1</span><b>3<")
        await seen_anew(world.layer, f"/session/{name}", "refused tools/call")
        world.inner.box.gate("g").go.set()
        await client.answer(first)


@asynccontextmanager
async def two_replicas(here: Path, store: str) -> AsyncGenerator[list[tuple[Process, int]]]:
    """Two processes that serve, each with its page, and their ports."""
    (here / "server.py").write_text("from mcp.server import MCPServer\nmcp = MCPServer('notes')\n")
    environment = {**os.environ, "MCP_SESSIONS_KEYS": mint_key()}
    served: list[tuple[Process, int]] = []
    try:
        for _ in range(2):
            port = free_port()
            command = [
                sys.executable, "-m", "mcp_sessions.cli", "serve", "server.py", "--store", store,
                "--port", str(port), "--dashboard", "/sessions", "--log-level", "error",
            ]  # fmt: skip
            process = subprocess.Popen(command, cwd=here, env=environment)  # noqa: ASYNC220
            served.append((process, port))
            wait_until_it_listens(process, port)
        yield served
    finally:
        for process, _ in served:
            process.kill()
            process.wait(10)


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.timeout(180)
async def test_a_replica_that_is_killed_gives_no_sign_of_life(tmp_path: Path) -> None:
    """``kill -9``, and its client does not come back at once. When it does, the story has it."""
    with redis_server() as redis:
        async with two_replicas(tmp_path, redis.url) as ((first, port), (_, other)):
            url = f"http://127.0.0.1:{other}"
            async with (
                httpx2.AsyncClient(base_url=url, timeout=30) as operator,
                websocket(f"ws://127.0.0.1:{port}/mcp", capabilities=CAPABILITIES) as client,
            ):
                await client.initialize()
                started = await client.start()
                name = digest(SessionId(started["sessionId"]))
                page = f"/sessions/session/{name}"
                await seen(operator, page, "attached by websocket at replica")
                listed = await seen(operator, "/sessions/replicas", r"(?s)alive<.*alive<")
                assert "no sign of life" not in listed
                first.kill()

                await seen(operator, "/sessions/replicas", "no sign of life</span></td>\n<td>1<")
                await seen(
                    operator,
                    "/sessions/",
                    r"Replica \S+ gives no sign of life\. Sessions that are attached there: 1\.",
                )
            async with websocket(f"ws://127.0.0.1:{other}/mcp", capabilities=CAPABILITIES) as again:
                await again.initialize()
                await again.resume(started["sessionId"], started["sessionEventId"])
                async with httpx2.AsyncClient(base_url=url, timeout=30) as operator:
                    await seen(operator, page, "resumed by websocket")


async def test_a_window_that_is_too_small_is_in_the_story_of_its_session() -> None:
    async with duplex_world(max_events=3) as world:
        client = await world.websocket()
        await client.initialize()
        started = await client.start()
        uris = [f"note://{number}" for number in range(10)]
        for uri in uris:
            await client.result("resources/subscribe", {"uri": uri})
        await client.leave()
        await world.publish(started["sessionId"], *uris, wait=True)
        back = await world.websocket()
        await back.initialize()
        resumed = await back.resume(started["sessionId"], started["sessionEventId"])
        assert resumed["catchup"] is False and not back.events

        name = digest(SessionId(started["sessionId"]))
        await seen_anew(world.layer, "/", f"{name}</a> resumes without replay</span><b>1<")
        said = "nothing replayed (evicted); events up to 7 were evicted"
        await seen_anew(world.layer, f"/session/{name}", said)
        await seen_anew(world.layer, f"/session/{name}", "the window was too small")


async def test_a_token_that_expires_while_its_client_goes_on(tmp_path: Path) -> None:
    """Its WebSocket is cut, and its requests get 401."""
    audience = "https://mcp.example/mcp"
    with issuing() as issuer:
        with served(tmp_path, issuer, audience, "--dashboard", "/sessions", *COMMAND) as setup:
            key = token(issuer, audience, sub="ops", scope=f"use {OPERATOR}")
            soon = token(issuer, audience, exp=int(time.time() - LEEWAY) + 4)
            base = f"http://127.0.0.1:{setup.port}"
            async with httpx2.AsyncClient(base_url=base, auth=("", key), timeout=30) as operator:
                await seen(operator, "/sessions/", "nothing yet")
                url = f"ws://127.0.0.1:{setup.port}/mcp"
                fields = {"Authorization": f"Bearer {soon}"}
                async with websocket(url, headers=fields) as client:
                    await client.initialize()
                    name = digest(SessionId((await client.start())["sessionId"]))
                    code, reason = await client.closed()
                assert (code, reason) == (1008, "credential expired")
                for _ in range(3):
                    assert await asyncio.to_thread(setup.initialize, soon) == 401

                cut = f"{name}</a> cut: its credential expired</span><b>1<"
                await seen(operator, "/sessions/", cut)
                counted = r"Requests without a good credential \([^<]*</span><b>[3-9]<"
                await seen(operator, "/sessions/", counted)
                said = await seen(operator, f"/sessions/session/{name}", "credential-expired")
                assert "the client has to come back with a new credential" in said


async def test_a_store_that_was_emptied_is_the_first_line() -> None:
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        now = pages.snapshots.clock()
        end = SessionEnd("0123456789ab", EndReason.EMPTIED, now - 60)
        await store.remember_ends([end], now=now)

        assert "The store was emptied or replaced" in await pages.get()
        assert "0123456789ab" in await pages.get("/ended?reason=emptied")


async def test_a_question_that_waits_is_in_the_story() -> None:
    """Behind a proxy that buffers it does not arrive, and nothing is refused."""
    async with opened(MemoryStore) as store, pages_of(store) as pages:
        session_id = await made(store)
        entry = Entry(time.time(), "asked elicitation/create 45")
        assert await store.change(session_id, Tell([entry]))

        assert "no live session was cut or refused" in await pages.get()
        said = await pages.get(f"/session/{digest(session_id)}")
        assert "elicitation/create waited for its client for 45s" in said


async def test_what_is_counted_has_a_rate() -> None:
    """An eviction a minute is not what a flood of them is."""
    before = {"Sessions over (protocol, evicted)": 100}
    replicas = Replicas({"name": "abcdefgh", "process": PROCESS, "counts": before})
    async with opened(MemoryStore) as store, pages_of(store, replicas) as pages:
        now = pages.snapshots.clock()
        pages.snapshots.clock = lambda: now
        assert "evicted)</span><b>100<" in await pages.get()
        pages.snapshots.clock = lambda: now + 30
        replicas.said = ({**replicas.said[0], "counts": {next(iter(before)): 120}},)
        assert "evicted) · 40 a minute</span><b>120<" in await pages.get()


async def test_a_clock_that_is_an_hour_off_is_the_first_line() -> None:
    facts = {"name": "abcdefgh", "process": PROCESS, "age": 9.0, "memory": None, "clock_off": 3_600}
    async with opened(MemoryStore) as store, pages_of(store, Replicas(facts)) as pages:
        assert "The clock of replica abcdefgh is 1h ahead." in await pages.get()
        assert "1h ahead" in await pages.get("/replicas")


@pytest.mark.redis
async def test_a_redis_that_somebody_flushes_is_the_first_line() -> None:
    with redis_server() as redis:
        store = RedisStore(redis.url)
        layer = SessionLayer(MCPServer("notes"), store=store)
        async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
            name = digest(SessionId(await begun(client)))
            await seen(client, "/sessions/", r">1</div><div class=\"label\">sessions")
            assert await asked(store, "FLUSHALL") == b"OK"

            said = await seen(client, "/sessions/", "The store was emptied or replaced")
            assert "1 sessions ended by that" in said
            ended = (await client.get(f"/sessions/session/{name}")).text
            assert "The store was emptied or replaced. What to do: give the sessions a" in ended


@pytest.mark.redis
async def test_a_clock_that_is_an_hour_ahead_of_redis_is_the_first_line() -> None:
    store = RedisStore(shared_redis().url, namespace=namespace(), clock=lambda: time.time() + 3_600)
    layer = SessionLayer(MCPServer("notes"), store=store)
    async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
        await begun(client)

        await seen(client, "/sessions/", r"The clock of replica \S+ is (1h|59m59s) ahead\.")


async def seen_anew(layer: SessionLayer, path: str, text: str) -> None:
    """A new page has a text, in the end. The clock of the layer does not move, so an open one would
    not be read again.
    """
    with anyio.fail_after(40):
        while True:
            async with browser(layer.dashboard()) as client:
                if text in (await client.get(path)).text:
                    return
            await anyio.sleep(0.1)


async def test_a_client_that_does_not_read_is_named() -> None:
    """First its buffer is full. Then it is cut, and its session stays."""
    limits: dict[str, Any] = {"send_buffer": 20_000, "slow_timeout": 3.0}
    async with duplex_world(send_buffer_of_kernel=16_384, **limits) as world:
        slow = await world.websocket(receive_buffer=4_096)
        await slow.initialize()
        session_id = SessionId((await slow.start())["sessionId"])
        await slow.stall()
        flood = [f"note://{number}/{'x' * 800}" for number in range(300)]
        await world.publish(session_id, *flood)

        await seen_anew(world.layer, "/", "Clients whose buffer is full</span><b>1<")
        name = digest(session_id)
        cut = f"{name}</a> cut: its client took nothing</span><b>1<"
        await seen_anew(world.layer, "/", cut)
        what_to_do = "look at the client, and for a proxy that buffers"
        await seen_anew(world.layer, f"/session/{name}", what_to_do)
        slow.unstall()


async def test_a_command_that_crashes_at_each_start_is_counted() -> None:
    layer = SessionLayer(StdioServer(sys.executable, "-c", "raise SystemExit(3)"))
    async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
        await client.get("/sessions/")
        await client.post("/mcp", json=INITIALIZE, headers=ACCEPT)

        await seen(client, "/sessions/", r"that were begun \(failed\)[^<]*</span><b>[1-9]")
