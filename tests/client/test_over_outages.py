"""The server, or what stands before it, goes away and comes back: each era over each transport.

The application is notified of each loss once, and once how it ended (``on_lost``, ``on_resume``).
"""

import logging
from asyncio import to_thread
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions import ConnectionLost
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client.sdk import is_outcome_unknown
from mcp_sessions.client_transport import resumable
from tests.support.board import Board
from tests.support.processes import KilledServer
from tests.support.proxy import Side, TcpProxy
from tests.support.resuming import MODES, QUICK, app_of, serving, text_of
from tests.support.servers import serve

WAYS = [(mode, scheme) for mode in MODES for scheme in ("http", "ws")]

PATIENT = ReconnectPolicy(backoff_base=0.05, backoff_cap=0.3, give_up_after=90)
"""A server process takes seconds to start on a busy machine."""


@dataclass
class AppendedChange:
    words: list[ConnectionLost | ResumeOutcome] = field(
        default_factory=list[ConnectionLost | ResumeOutcome]
    )
    board: Board = field(default_factory=Board)

    def receive(self, word: ConnectionLost | ResumeOutcome) -> None:
        """For ``on_lost`` and ``on_resume``."""
        self.words.append(word)
        self.board.announce()

    @property
    def lost(self) -> list[ConnectionLost]:
        return [word for word in self.words if isinstance(word, ConnectionLost)]

    @property
    def outcomes(self) -> list[ResumeOutcome]:
        return [word for word in self.words if isinstance(word, ResumeOutcome)]

    async def is_lost(self, count: int = 1) -> ConnectionLost:
        await self.board.until(lambda: len(self.lost) >= count, what=lambda: f"a loss: {self}")
        return self.lost[count - 1]

    async def is_back(self, count: int = 1) -> ResumeOutcome:
        """How the ``count``-th loss ended."""
        await self.board.until(
            lambda: len(self.outcomes) >= count, what=lambda: f"an outcome: {self}", within=90
        )
        return self.outcomes[count - 1]

    def expect_pairs(self, count: int) -> None:
        """So many losses, each followed by its outcome."""
        kinds = [type(word) for word in self.words]
        assert kinds == [ConnectionLost, ResumeOutcome] * count, self.words


@asynccontextmanager
async def killed(folder: Path) -> AsyncGenerator[KilledServer]:
    server = KilledServer(folder)
    await to_thread(server.start)
    try:
        yield server
    finally:
        await to_thread(server.kill)


@asynccontextmanager
async def client_of(
    url: str, mode: str, notified: AppendedChange, policy: ReconnectPolicy = PATIENT, **options: Any
) -> AsyncGenerator[Client]:
    transport = resumable(
        url,
        on_lost=notified.receive,
        on_resume=notified.receive,
        policy=policy,
        headers={"x-key": "secret"},
    )
    with anyio.fail_after(150):
        async with Client(transport, mode=mode, **options) as client:
            yield client


async def until(look: Callable[[], bool]) -> None:
    """Wait for what happens in another process or thread."""
    with anyio.fail_after(60):
        while not look():  # noqa: ASYNC110
            await anyio.sleep(0.01)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines at the default level."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("mcp_sessions.") and record.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize(
    ("mode", "scheme"),
    [
        pytest.param(mode, scheme, marks=[pytest.mark.full] * (mode == "legacy"))
        for mode, scheme in WAYS
    ],
)
async def test_a_killed_server_is_reported_as_lost_and_as_back(
    mode: str, scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a call in flight: it may have run, and the error says so by its name."""
    notified, errors, outcome = AppendedChange(), list[MCPError](), ResumeOutcome(False)
    async with killed(tmp_path) as server, client_of(server.url(scheme), mode, notified) as client:
        await client.call_tool("remember", {"word": "one"})

        async def wait() -> None:
            with pytest.raises(MCPError) as unknown:
                await client.call_tool("wait", {"gate": "never"})
            errors.append(unknown.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: "wait never" in server.runs)
            await to_thread(server.kill)
            loss = await notified.is_lost()
            assert loss.address == server.url(scheme)
            assert server.url(scheme) in loss.reason
            assert [line for line in warnings(caplog) if loss.reason in line]
            await to_thread(server.start)
            outcome = await notified.is_back()
        assert (outcome.recovered, outcome.connected_to) == (True, server.url(scheme))
        assert is_outcome_unknown(errors[0])
        assert "wait may have run" in str(errors[0]) and server.url(scheme) in str(errors[0])
        said = text_of(await client.call_tool("remember", {"word": "two"}))
        assert said == "one two", "the session is the same"
        notified.expect_pairs(1)
    assert server.runs.count("wait never") == 1


@pytest.mark.parametrize(("mode", "scheme"), WAYS)
async def test_a_loss_with_nothing_in_flight_is_reported(mode: str, scheme: str) -> None:
    """At once where something is open: a WebSocket, the 2025 era's stream. Over HTTP in the 2026
    era nothing is, unless the application listens: the next call finds out.
    """
    notified = AppendedChange()
    with serving() as (app, _, server):
        async with TcpProxy(server.host, server.port) as proxy:
            url = proxy.url(scheme=scheme)
            async with client_of(url, mode, notified, QUICK) as client:
                assert text_of(await client.call_tool("echo", {"text": "a"})) == "a"
                is_open = (mode, scheme) != ("auto", "http")
                if (mode, scheme) == ("legacy", "http"):
                    await proxy.carrying(b"GET /mcp")
                    await proxy.found(
                        lambda c: (
                            b"GET /mcp" in c.sent_by(Side.CLIENT)
                            and b"text/event-stream" in c.sent_by(Side.SERVER)
                        )
                    )
                with proxy.offline():
                    if is_open:
                        await notified.is_lost()
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(client.call_tool, "echo", {"text": "b"})
                        await notified.is_lost()
                        tasks.cancel_scope.cancel()
                assert (await notified.is_back()).recovered
                assert text_of(await client.call_tool("echo", {"text": "c"})) == "c"
                notified.expect_pairs(1)
    assert app


async def test_a_listen_that_is_lost_is_reported() -> None:
    """2026 era over HTTP, nothing in flight."""
    notified = AppendedChange()
    with serving() as (app, layer, server):
        async with TcpProxy(server.host, server.port) as proxy:
            async with (
                client_of(proxy.url(), "auto", notified, QUICK) as client,
                client.listen(resource_subscriptions=["note://1"]) as changes,
            ):
                with proxy.offline():
                    assert proxy.url() in (await notified.is_lost()).reason
                    await server.call(layer.notify_resource_updated, "note://1")
                assert getattr(await anext(changes), "uri", None) == "note://1"
                assert (await notified.is_back()).recovered
                notified.expect_pairs(1)
    assert app


class Gateway:
    """A proxy's answers while the server behind it is away."""

    def __init__(self, app: ASGIApp, status: int, retry_after: str | None = None) -> None:
        self.app = app
        self.status = status
        self.retry_after = retry_after
        self.is_away = False
        self.asked: list[float] = []
        """When it was asked in vain."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.is_away:
            await self.app(scope, receive, send)
            return
        self.asked.append(anyio.current_time())
        headers = [(b"content-type", b"text/html")]
        if self.retry_after is not None:
            headers.append((b"retry-after", self.retry_after.encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"<h1>Bad gateway</h1>"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_that_does_not_reach_the_server_is_an_outage(mode: str, status: int) -> None:
    notified = AppendedChange()
    app, layer = app_of()
    gateway = Gateway(layer.asgi_app(), status)
    with serve(gateway) as server:
        async with client_of(server.url(), mode, notified, QUICK) as client:
            first = text_of(await client.call_tool("session_id", {}))
            gateway.is_away = True
            answers: list[str] = []
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    answers.append(text_of(await client.call_tool("session_id", {})))

                tasks.start_soon(call)
                assert str(status) in (await notified.is_lost()).reason
                await until(lambda: len(gateway.asked) >= 5)
                gateway.is_away = False
            assert answers == [first], "the call ran in the same session"
            assert (await notified.is_back()).recovered
            notified.expect_pairs(1)
    assert app


@pytest.mark.parametrize("mode", MODES)
async def test_a_proxy_that_asks_for_a_rest_gets_it(mode: str) -> None:
    """``Retry-After``."""
    notified = AppendedChange()
    app, layer = app_of()
    gateway = Gateway(layer.asgi_app(), 503, "1")
    with serve(gateway) as server:
        async with client_of(server.url(), mode, notified, QUICK) as client:
            await client.call_tool("echo", {"text": "a"})
            gateway.is_away = True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.call_tool, "echo", {"text": "b"})
                await notified.is_lost()
                await until(lambda: len(gateway.asked) >= 3)
                gateway.is_away = False
            gaps = [b - a for a, b in zip(gateway.asked, gateway.asked[1:], strict=False)]
            assert all(gap > 0.9 for gap in gaps), gaps
    assert app


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_may_have_run_says_where_why_and_what_to_do(mode: str) -> None:
    notified = AppendedChange()
    app, layer = app_of()
    gateway = Gateway(layer.asgi_app(), 503)
    policy = ReconnectPolicy(backoff_base=0.02, backoff_cap=0.1, give_up_after=1.2)
    with serve(gateway) as server:
        url = server.url().replace("http://", "http://user:secret@") + "?token=secret"
        async with client_of(url, mode, notified, policy) as client:
            await client.call_tool("echo", {"text": "a"})
            gateway.is_away = True
            with pytest.raises(MCPError) as failed:
                await client.call_tool("echo", {"text": "b"})
            gateway.is_away = False
            said = str(failed.value)
            assert said.startswith("Outcome unknown: echo may have run: ")
            assert server.url() in said and "503" in said
            assert said.endswith("in docs/clients.md of mcp-sessions.")
            assert "secret" not in said
            assert (await notified.is_back()).reason == "gave_up"
            assert text_of(await client.call_tool("echo", {"text": "c"})) == "c"
    assert app


async def test_an_application_may_do_as_it_likes_in_on_lost() -> None:
    """It may raise, wait, or move the session: nothing waits for it."""
    notified = AppendedChange()
    with serving() as (app, _, server):
        async with (
            TcpProxy(server.host, server.port) as first,
            TcpProxy(server.host, server.port) as second,
        ):

            async def move(loss: ConnectionLost) -> None:
                notified.receive(loss)
                await transport.move_to(second.url())
                raise RuntimeError("of the application")

            transport = resumable(
                first.url(scheme="ws"), on_lost=move, on_resume=notified.receive, policy=QUICK
            )
            with anyio.fail_after(40):
                async with Client(transport, mode="auto") as client:
                    await client.call_tool("echo", {"text": "a"})
                    first.cut_all()
                    await notified.board.until(
                        lambda: any(o.connected_to == second.url() for o in notified.outcomes),
                        what="the move",
                    )
                    assert text_of(await client.call_tool("echo", {"text": "b"})) == "b"
    assert app


@pytest.mark.parametrize(("mode", "scheme"), WAYS)
async def test_progress_of_the_time_without_a_connection_comes_once_and_in_order(
    mode: str, scheme: str
) -> None:
    """KEY21. And the answer comes as soon as there is a connection."""
    notified, steps, answers = AppendedChange(), list[float](), list[str]()

    async def report(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)
        notified.board.announce()

    with serving() as (app, _, server):
        async with TcpProxy(server.host, server.port) as proxy:
            async with client_of(proxy.url(scheme=scheme), mode, notified, QUICK) as client:

                async def call() -> None:
                    arguments = {"steps": 20, "gate": "g", "last": "h"}
                    result = await client.call_tool("slow", arguments, progress_callback=report)
                    answers.append(text_of(result))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    await app.stage.reached("g:started")
                    await notified.board.until(lambda: steps == [1], what="the first report")
                    with proxy.offline():
                        await notified.is_lost()
                        app.stage.mark("g:go")
                        await app.stage.reached("h:started")
                    assert steps == [1]
                    await notified.board.until(
                        lambda: len(steps) >= 19, what=lambda: f"what was missed: {steps}"
                    )
                    app.stage.mark("h:go")
    assert answers == ["20 steps"]
    assert steps == list(range(1, 21))
