"""Forged tokens before a server, by every way in; the verifiers have tests of their own."""

import base64
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer
from mcp_sessions.server.upstream.sdk.authentication import SdkVerifier, resource_server
from tests.authentication.test_tokens import ATTACKS, Setup
from tests.support.children import child, children_of
from tests.support.duplex import listening, websocket
from tests.support.issuers import AUDIENCE, URL
from tests.support.raw import SocketCarrier

ACCEPTED = [("Accept", "application/json, text/event-stream"), ("Content-Type", "application/json")]
PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets."""
    return "asyncio"


@dataclass
class Guarded:
    setup: Setup
    port: int

    async def status(self, method: str, token: str) -> int | None:
        fields = [*ACCEPTED, ("Authorization", f"Bearer {token}")]
        carrier = SocketCarrier("127.0.0.1", self.port)
        reply = await carrier.send(method, "/mcp", fields, PING if method == "POST" else b"").done()
        return reply.status

    async def handshake(self, token: str, *, in_header: bool) -> int:
        fields = {"Authorization": f"Bearer {token}"} if in_header else {}
        encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
        offered = () if in_header else (f"mcp.bearer.{encoded}",)
        try:
            async with websocket(
                f"ws://127.0.0.1:{self.port}/mcp", headers=fields, subprotocols=("mcp", *offered)
            ) as peer:
                await peer.initialize()
        except InvalidStatus as refused:
            return refused.response.status_code
        return 101

    async def answers(self, token: str) -> set[int | None]:
        """The answer of each way in to that token."""
        found = {await self.status(method, token) for method in ("POST", "GET", "DELETE")}
        if len(token) < 4_096:
            # The library for WebSocket takes no longer line.
            found |= {await self.handshake(token, in_header=side) for side in (True, False)}
        return found


@asynccontextmanager
async def guarded() -> AsyncGenerator[Guarded]:
    """One over sockets, whose command is not started before somebody comes in."""
    setup = Setup()
    verifier = SdkVerifier([setup.verifier])
    authentication = resource_server(verifier, URL, AUDIENCE, ["use"])
    layer = SessionLayer(child(try_at_start=False), auth=authentication)
    async with layer.lifespan(), listening(layer.asgi_app()) as port:
        yield Guarded(setup, port)


async def test_a_forged_token_opens_no_way_in_and_starts_no_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """O, the attacks of the design: 401 on POST, GET, DELETE and WebSocket."""
    caplog.set_level(logging.INFO)
    before = children_of(os.getpid())
    async with guarded() as server:
        for name, attack in ATTACKS.items():
            token = attack(server.setup)
            if not token.isascii():
                # A header cannot have it as it is.
                token = token.encode().decode("latin-1")
            assert await server.answers(token) == {401}, name
        assert children_of(os.getpid()) == before
        assert await server.handshake(server.setup.login.token(), in_header=True) == 101
    assert "Traceback" not in caplog.text and "alice" not in caplog.text


async def test_an_issuer_that_is_away_is_503_by_every_way_in() -> None:
    """And not 401, after which clients throw their tokens away. A checked token stays good."""
    async with guarded() as server:
        known = server.setup.login.token()
        assert await server.handshake(known, in_header=False) == 101
        server.setup.login.is_away = True
        # The keys count for a day.
        server.setup.clock.now += 10
        assert await server.handshake(server.setup.login.token(), in_header=True) == 101
        server.setup.clock.now += 100_000
        assert await server.answers(server.setup.login.token(jti="another")) == {503}
