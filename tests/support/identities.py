"""Servers with authentication, the tokens of their users, and what happened to a session.

The tokens are words that the test chooses. The verifier knows them as long as the test wants.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from mcp.server import MCPServer
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context
from mcp_types import NotificationParams
from pydantic import AnyHttpUrl, BaseModel

from mcp_sessions import SessionLayer, SessionPolicy, current_session
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.memory import MemoryStore
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.support.modern import BearerCarrier, ModernClient
from tests.support.raw import AsgiCarrier, RawClient, in_process
from tests.support.world import Clock, Gate

ISSUER = "https://issuer.example"
FAR = 4_000_000_000.0
"""The layer's clock in these tests: later than any machine's, since the SDK compares a
token's ``expires_at`` with the machine's own."""


AUTHENTICATES: str = "server"
"""What authenticates in :func:`guarded`: the wrapped ``server``, or the ``layer`` before it."""


class Verifier:
    """The SDK's ``TokenVerifier`` over a table."""

    def __init__(self) -> None:
        self.tokens: dict[str, AccessToken] = {}
        self.asked = 0
        self.broken = False
        """It raises instead of answering."""
        self.hangs = False
        """It does not answer."""

    def add(
        self,
        token: str,
        subject: str | None,
        *scopes: str,
        client_id: str = "client",
        issuer: str | None = ISSUER,
        expires_at: float | None = None,
    ) -> str:
        self.tokens[token] = AccessToken(
            token=token,
            client_id=client_id,
            scopes=list(scopes or ("use",)),
            subject=subject,
            claims={"iss": issuer} if issuer is not None else None,
            expires_at=int(expires_at) if expires_at is not None else None,
        )
        return token

    async def verify_token(self, token: str) -> AccessToken | None:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.broken:
            raise RuntimeError("the authorization server is away")
        return self.tokens.get(token)


def auth_settings(**options: Any) -> AuthSettings:
    """Settings that ask for the scope ``use``."""
    given: dict[str, Any] = {
        "issuer_url": AnyHttpUrl(ISSUER),
        "resource_server_url": AnyHttpUrl("https://server.example/mcp"),
        "validate_token_resource": False,
        "required_scopes": ["use"],
    }
    return AuthSettings(**{**given, **options})


@dataclass
class Tools:
    """What the tools of :func:`guarded_server` share with a test."""

    gates: dict[str, Gate] = field(default_factory=dict[str, Gate])
    calls: list[str] = field(default_factory=list[str])
    background: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    notified: list[str] = field(default_factory=list[str])

    def gate(self, name: str) -> Gate:
        return self.gates.setdefault(name, Gate())


class _Answer(BaseModel):
    """The form that ``ask`` asks a client's user to fill in."""

    answer: str


def who() -> str:
    """Whose token is in the context of this task."""
    token = get_access_token()
    return "nobody" if token is None else f"{token.subject} {token.token}"


def guarded_server(verifier: Verifier, **options: Any) -> tuple[MCPServer[Any], Tools]:
    """An ``MCPServer`` with authentication; all of its tools are async functions."""
    given: dict[str, Any] = {"token_verifier": verifier, "auth": auth_settings()}
    server = MCPServer[Any]("guarded", version="1", **{**given, **options})
    tools = Tools()

    @server.tool(structured_output=False)
    async def whoami() -> str:
        tools.calls.append("whoami")
        return who()

    @server.tool(structured_output=False)
    async def wait(gate: str) -> str:
        tools.calls.append("wait")
        await tools.gate(gate).arrive()
        return who()

    @server.tool(structured_output=False)
    async def later(gate: str) -> str:
        async def work() -> None:
            await tools.gate(gate).arrive()
            tools.notified.append(who())

        task = asyncio.create_task(work())
        tools.background.add(task)
        task.add_done_callback(tools.background.discard)
        return "later"

    @server.tool(structured_output=False)
    async def remember(text: str) -> str:
        session = current_session()
        session.state["text"] = text
        async with session.data.edit() as data:
            data["text"] = text
        return "remembered"

    @server.tool(structured_output=False)
    async def update(uri: str, ctx: Context[Any, Any]) -> str:
        await ctx.session.send_resource_updated(uri)
        return "updated"

    @server.tool(structured_output=False)
    async def steps(ctx: Context[Any, Any]) -> str:
        for step in (1, 2, 3):
            await ctx.report_progress(step, 3)
        return "stepped"

    @server.tool(structured_output=False)
    async def ask(ctx: Context[Any, Any]) -> str:
        result = await ctx.elicit("which?", _Answer)
        return f"{result.action}: {result.data.answer if result.action == 'accept' else ''}"

    @server.tool(structured_output=False)
    async def session_id() -> str:
        session = current_session(default=None)
        return session.id if session is not None and session.source == "session" else "none"

    async def roots_changed(ctx: Any, params: Any) -> None:
        tools.calls.append("roots changed")
        await ctx.session.send_resource_updated("note://roots")

    lowlevel = server._lowlevel_server  # pyright: ignore[reportPrivateUsage]
    lowlevel.add_notification_handler(
        "notifications/roots/list_changed", NotificationParams, roots_changed
    )
    del whoami, wait, later, remember, update, steps, ask, session_id
    return server, tools


@dataclass
class Guarded:
    """A server with authentication, wrapped and running."""

    layer: SessionLayer
    verifier: Verifier
    tools: Tools
    clock: Clock
    carrier: AsgiCarrier
    store: MemoryStore

    def as_(self, token: str) -> BearerCarrier:
        """A carrier whose requests come with that token."""
        return BearerCarrier(self.carrier, token)

    def modern(self, token: str, **options: Any) -> ModernClient:
        return ModernClient(self.as_(token), **options)

    def older(self, token: str, **options: Any) -> RawClient:
        """A handshake-era client with that token, before its handshake."""
        return RawClient(self.as_(token), **options)

    async def connected(self, token: str, **options: Any) -> RawClient:
        client = self.older(token, **options)
        await client.initialize()
        return client


@asynccontextmanager
async def guarded(*, clock: Clock | None = None, **limits: Any) -> AsyncGenerator[Guarded]:
    """A wrapped :func:`guarded_server`; ``alice`` and ``bob`` are tokens of two users."""
    verifier = Verifier()
    verifier.add("alice", "alice")
    verifier.add("bob", "bob")
    own: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if AUTHENTICATES == "layer":
        own = {"token_verifier": None, "auth": None}
        before = {"token_verifier": verifier, "auth": auth_settings()}
    server, tools = guarded_server(verifier, **own)
    clock, store = clock or Clock(FAR), MemoryStore()
    policy = SessionPolicy(**limits)
    layer = ClockedLayer(server, store=store, policy=policy, clock=clock, **before)
    app = layer.asgi_app()
    async with layer.lifespan(), in_process(app) as carrier:
        yield Guarded(layer, verifier, tools, clock, carrier, store)


def everything_of(store: MemoryStore, session_id: str) -> Any:
    """All that the store holds of a session, to be compared with what it holds later: record
    and deadline, attachment, events, streams, keys, data.
    """
    return _spelled(store._sessions.get(SessionId(session_id)))  # pyright: ignore[reportPrivateUsage]


def _spelled(value: Any) -> Any:
    """``value`` as tuples of what can be compared, however it is kept."""
    if isinstance(value, Mapping):
        members = cast("Mapping[Any, Any]", value)
        return tuple((_spelled(k), _spelled(v)) for k, v in members.items())
    if isinstance(value, (list, tuple, deque)):
        return tuple(_spelled(item) for item in cast("Iterable[Any]", value))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(repr(item) for item in cast("Iterable[Any]", value)))
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    if not names:
        return value if isinstance(value, (str, bytes, int, float, Enum)) else repr(value)
    return tuple((name, _spelled(getattr(value, name, None))) for name in sorted(set(names)))
