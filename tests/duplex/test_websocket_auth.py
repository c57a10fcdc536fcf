"""WebSocket and credentials: at the handshake, and for the life of the connection."""

import base64
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from mcp.server import MCPServer
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl
from websockets.exceptions import InvalidStatus

from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.support import apps
from tests.support.duplex import listening, websocket
from tests.support.raw import SocketCarrier
from tests.support.world import Clock

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(apps.DEPRECATED)]


@dataclass
class Verifier:
    """Knows the tokens that the test gave out."""

    tokens: dict[str, AccessToken] = field(default_factory=dict[str, AccessToken])
    asked: int = 0

    async def verify_token(self, token: str) -> AccessToken | None:
        self.asked += 1
        return self.tokens.get(token)

    def give(self, token: str, user: str, *scopes: str, expires_at: int | None = None) -> None:
        self.tokens[token] = AccessToken(
            token=token,
            client_id="app",
            subject=user,
            scopes=list(scopes or ("use",)),
            expires_at=expires_at,
        )


@dataclass
class Guarded:
    port: int
    verifier: Verifier
    clock: Clock
    layer: SessionLayer

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/mcp"

    async def refused(self, **options: Any) -> InvalidStatus:
        with pytest.raises(InvalidStatus) as refusal:
            async with websocket(self.url, **options):
                pass
        return refusal.value


@asynccontextmanager
async def guarded(**limits: Any) -> AsyncGenerator[Guarded]:
    """A server with authentication, running; alice and bob have tokens."""
    verifier = Verifier()
    verifier.give("alice-1", "alice")
    verifier.give("bob-1", "bob")
    verifier.give("weak-1", "alice", "other")
    server = MCPServer[Any](
        "guarded",
        token_verifier=verifier,
        auth=AuthSettings(
            issuer_url=AnyHttpUrl("https://issuer.example"),
            resource_server_url=AnyHttpUrl("https://server.example/mcp"),
            validate_token_resource=False,
            required_scopes=["use"],
        ),
    )

    @server.tool()
    async def who() -> str:
        token = get_access_token()
        return str(token.subject if token is not None else None)

    del who
    clock = Clock(time.time())
    layer = ClockedLayer(server, policy=SessionPolicy(**limits), clock=clock)
    app = layer.asgi_app()
    async with layer.lifespan(), listening(app) as port:
        yield Guarded(port, verifier, clock, layer)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def offered(token: str) -> str:
    return "mcp.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


async def test_without_a_credential_the_answer_is_what_http_answers() -> None:
    """401, with the ``WWW-Authenticate`` and the body of the server's own HTTP application."""
    async with guarded() as server:
        refused = (await server.refused()).response
        carrier = SocketCarrier("127.0.0.1", server.port)
        reply = await carrier.send("GET", "/mcp", [("Accept", "text/event-stream")], b"").done()
        assert refused.status_code == reply.status == 401
        assert refused.headers["WWW-Authenticate"] == reply.header("www-authenticate")
        assert refused.body == bytes(reply.body)
        assert (await server.refused(headers=bearer("forged"))).response.status_code == 401


async def test_a_credential_without_the_required_scopes_is_refused_as_over_http() -> None:
    """403, ``insufficient_scope``."""
    async with guarded() as server:
        refused = (await server.refused(headers=bearer("weak-1"))).response
        assert refused.status_code == 403
        assert "insufficient_scope" in refused.headers["WWW-Authenticate"]


@pytest.mark.parametrize("way", ["header", "subprotocol"])
async def test_a_credential_is_taken_from_the_header_or_a_subprotocol(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Handlers know who calls; the token is neither echoed nor logged (SEC2)."""
    caplog.set_level(logging.INFO)
    token = "alice ~/with:odd?characters>>>"
    async with guarded() as server:
        server.verifier.give(token, "alice")
        options: dict[str, Any] = {"headers": bearer(token)}
        if way == "subprotocol":
            options = {"subprotocols": ("mcp", offered(token))}
        async with websocket(server.url, **options) as peer:
            response = peer.connection.response
            assert response is not None
            assert peer.connection.subprotocol == "mcp"
            assert offered(token) not in str(response.headers)
            await peer.initialize()
            assert await peer.text("who") == "alice"
    written = caplog.text
    assert token not in written
    assert offered(token) not in written


async def test_a_bearer_subprotocol_alone_is_not_selected() -> None:
    """Only ``mcp`` is ever selected; never the credential."""
    async with guarded() as server:
        async with websocket(server.url, subprotocols=(offered("bob-1"),)) as peer:
            assert peer.connection.subprotocol is None
            await peer.initialize()
            assert await peer.text("who") == "bob"


@pytest.mark.parametrize(
    "options",
    [
        {"subprotocols": ("mcp", offered("alice-1")), "headers": bearer("bob-1")},
        {"subprotocols": ("mcp", offered("alice-1"), offered("bob-1"))},
        {"subprotocols": ("mcp", "mcp.bearer.")},
        {"subprotocols": ("mcp", "mcp.bearer.a")},
        {"subprotocols": ("mcp", "mcp.bearer.____!")},
    ],
)
async def test_two_credentials_or_half_a_credential_are_refused_400(
    options: dict[str, Any],
) -> None:
    """Both at once: 400."""
    async with guarded() as server:
        assert (await server.refused(**options)).response.status_code == 400
        assert server.verifier.asked == 0


async def test_an_expired_credential_closes_1008_before_another_event() -> None:
    """SEC4. Its session waits, and is kept by a refreshed token (SES9)."""
    async with guarded(credential_check=0.02) as server:
        server.verifier.give("short", "alice", expires_at=int(server.clock()) + 600)
        async with websocket(server.url, headers=bearer("short")) as peer:
            await peer.initialize()
            started = await peer.start()
            server.clock.advance(601)
            assert (await peer.closed())[0] == 1008
        await server.layer.notify_tools_changed()
        assert peer.events == []
        async with websocket(server.url, headers=bearer("alice-1")) as again:
            await again.initialize()
            answer = await again.resume(started["sessionId"], started["sessionEventId"])
            assert (answer["catchup"], answer["replayed"]) == (True, 1)


async def test_a_credential_that_is_not_accepted_any_more_closes_1008() -> None:
    """SEC4: periodic re-check."""
    async with guarded(credential_check=0.02) as server:
        async with websocket(server.url, subprotocols=("mcp", offered("bob-1"))) as peer:
            await peer.initialize()
            asked = server.verifier.asked
            del server.verifier.tokens["bob-1"]
            assert (await peer.closed())[0] == 1008
            assert server.verifier.asked > asked


async def test_one_principal_may_open_so_many_and_another_is_not_affected() -> None:
    """SEC8: per-principal connection cap; who leaves makes room."""
    async with guarded(max_connections_per_principal=2) as server:
        async with (
            websocket(server.url, headers=bearer("alice-1")) as first,
            websocket(server.url, headers=bearer("alice-1")) as second,
            websocket(server.url, headers=bearer("bob-1")) as other,
        ):
            for peer in (first, second, other):
                await peer.initialize()
            full = await server.refused(headers=bearer("alice-1"))
            assert full.response.status_code == 429
            await second.connection.close()
            async with websocket(server.url, headers=bearer("alice-1")) as third:
                await third.initialize()
                assert await third.text("who") == "alice"


async def test_nobody_resumes_the_session_of_another() -> None:
    """SES8, SES10: the owner's connection is not touched."""
    async with guarded() as server:
        async with (
            websocket(server.url, headers=bearer("alice-1")) as alice,
            websocket(server.url, headers=bearer("bob-1")) as bob,
        ):
            await alice.initialize()
            await bob.initialize()
            session_id = (await alice.start())["sessionId"]
            refused = await bob.error("session/resume", {"sessionId": session_id})
            assert refused["code"] == -32043
            unknown = await bob.error("session/resume", {"sessionId": "x" * len(session_id)})
            assert unknown["message"] == refused["message"]
            await server.layer.notify_tools_changed()
            await alice.has_events(1)
            assert await alice.text("who") == "alice"
