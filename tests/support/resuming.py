"""A real server, a proxy before it, and the resumable client behind that.

    async with connected(app_of("mcpserver"), mode="legacy") as it:
        await it.client.call_tool("echo", {"text": "hi"})
        it.proxy.cut_all()

`app` is one of `tests.support.apps`; its server runs under a `SessionLayer`, in a thread of
its own. What the application of the client receives is on `it.received`, and can be waited for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import mcp_types as types
from mcp import Client
from mcp.client import ClientRequestContext

from mcp_sessions.client.jar import Jar
from mcp_sessions.client.reconnect_policy import ReconnectPolicy
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client.sdk import ResumableTransport
from mcp_sessions.client_transport import resumable
from mcp_sessions.layer import SessionLayer
from tests.support.apps import App, make_app
from tests.support.board import Board
from tests.support.proxy import TcpProxy
from tests.support.servers import RunningServer, serve

QUICK = ReconnectPolicy(
    backoff_base=0.02,
    backoff_cap=0.2,
    connect_timeout=5,
    give_up_after=15,
    jar_interval=0.05,
)
"""For tests: the same rules, in less time."""

MODES = ("legacy", "auto")
"""The handshake era and the modern one, as ``mcp.Client`` calls them."""


@dataclass
class Received:
    """The messages that a client's application got."""

    outcomes: list[ResumeOutcome] = field(default_factory=list[ResumeOutcome])
    notifications: list[Any] = field(default_factory=list[Any])
    questions: list[str] = field(default_factory=list[str])
    board: Board = field(default_factory=Board)

    async def on_message(self, message: Any) -> None:
        self.notifications.append(message)
        self.board.announce()

    def on_resume(self, outcome: ResumeOutcome) -> None:
        self.outcomes.append(outcome)
        self.board.announce()

    async def on_question(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        self.questions.append(params.message)
        self.board.announce()
        return types.ElicitResult(action="accept", content={"answer": "yes"})

    @property
    def updates(self) -> list[str]:
        """The resources whose updates arrived, in order."""
        return [
            str(n.params.uri)
            for n in self.notifications
            if isinstance(n, types.ResourceUpdatedNotification)
        ]

    @property
    def methods(self) -> list[str]:
        return [n.method for n in self.notifications if not isinstance(n, Exception)]

    async def has(self, look: Any, what: str) -> None:
        """Return once ``look()`` holds."""
        await self.board.until(look, what=lambda: f"{what}: {self}")

    async def outcome(self, count: int = 1) -> ResumeOutcome:
        await self.has(lambda: len(self.outcomes) >= count, f"{count} outcomes")
        return self.outcomes[count - 1]


@dataclass
class Connected:
    client: Client
    transport: ResumableTransport
    app: App
    layer: SessionLayer
    server: RunningServer
    proxy: TcpProxy
    received: Received

    async def call(self, tool: str, **arguments: Any) -> str:
        return text_of(await self.client.call_tool(tool, arguments))

    async def change_from_another(self, *uris: str) -> None:
        """Resources change, and this client had no part in it."""
        for uri in uris:
            await self.server.call(self.layer.notify_resource_updated, uri)


def text_of(result: Any) -> str:
    [block] = result.content
    assert isinstance(block, types.TextContent)
    return block.text


async def subscribe(client: Client, uri: str) -> None:
    """Handshake era: learn of a resource's changes."""
    await client.subscribe_resource(uri)  # pyright: ignore[reportDeprecated]


def app_of(kind: Any = "mcpserver") -> tuple[App, SessionLayer]:
    app = make_app(kind)
    layer = SessionLayer(app.server)
    app.publish = layer.notify_resource_updated
    return app, layer


@contextmanager
def serving(
    made: tuple[App, SessionLayer] | None = None, *, port: int = 0
) -> Generator[tuple[App, SessionLayer, RunningServer]]:
    app, layer = made or app_of()
    with serve(layer.asgi_app(), port=port) as server:
        yield app, layer, server


@asynccontextmanager
async def connected(
    mode: str = "legacy",
    scheme: str = "http",
    *,
    policy: ReconnectPolicy = QUICK,
    jar: Jar | None = None,
    made: tuple[App, SessionLayer] | None = None,
    within: float = 40.0,
) -> AsyncGenerator[Connected]:
    with serving(made) as (app, layer, server):
        async with TcpProxy(server.host, server.port) as proxy:
            received = Received()
            transport = resumable(
                proxy.url(scheme=scheme), on_resume=received.on_resume, policy=policy, jar=jar
            )
            with anyio.fail_after(within):
                async with Client(
                    transport,
                    mode=mode,
                    message_handler=received.on_message,
                    elicitation_callback=received.on_question,
                ) as client:
                    yield Connected(client, transport, app, layer, server, proxy, received)
