"""WebSocket and credentials: at the handshake, and for the life of the connection."""

import base64
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.support import apps
from tests.support.duplex import WebSocketPeer, listening, websocket
from tests.support.identities import Guarded, guarded
from tests.support.raw import SocketCarrier

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)


@dataclass
class Reachable(Guarded):
    """A server with authentication, on a port."""

    port: int = 0

    async def refused(self, **options: Any) -> InvalidStatus:
        with pytest.raises(InvalidStatus) as refusal:
            async with self.websocket(**options):
                pass
        return refusal.value

    def websocket(self, **options: Any) -> AbstractAsyncContextManager[WebSocketPeer]:
        return websocket(f"ws://127.0.0.1:{self.port}/mcp", **options)


@asynccontextmanager
async def reachable(**limits: Any) -> AsyncGenerator[Reachable]:
    """With ``weak``, a token of alice's that lacks the scope."""
    async with guarded(**limits) as server, listening(server.layer.asgi_app()) as port:
        server.verifier.add("weak", "alice", "other")
        yield Reachable(**vars(server), port=port)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def offered(token: str) -> str:
    return "mcp.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


async def test_without_a_credential_the_answer_is_what_http_answers() -> None:
    """401, with the ``WWW-Authenticate`` and the body of the server's own HTTP application."""
    async with reachable() as server:
        refused = (await server.refused()).response
        carrier = SocketCarrier("127.0.0.1", server.port)
        reply = await carrier.send("GET", "/mcp", [("Accept", "text/event-stream")], b"").done()
        assert refused.status_code == reply.status == 401
        assert refused.headers["WWW-Authenticate"] == reply.header("www-authenticate")
        assert refused.body == bytes(reply.body)
        assert (await server.refused(headers=bearer("forged"))).response.status_code == 401


async def test_a_credential_without_the_required_scopes_is_refused_as_over_http() -> None:
    """403, ``insufficient_scope``."""
    async with reachable() as server:
        refused = (await server.refused(headers=bearer("weak"))).response
        assert refused.status_code == 403
        assert "insufficient_scope" in refused.headers["WWW-Authenticate"]


@pytest.mark.parametrize("way", ["header", "subprotocol"])
async def test_a_credential_is_taken_from_the_header_or_a_subprotocol(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Handlers know who calls; the token is neither echoed nor logged (SEC2)."""
    caplog.set_level(logging.INFO)
    token = "alice ~/with:odd?characters>>>"
    async with reachable() as server:
        server.verifier.add(token, "alice")
        options: dict[str, Any] = {"headers": bearer(token)}
        if way == "subprotocol":
            options = {"subprotocols": ("mcp", offered(token))}
        async with server.websocket(**options) as peer:
            response = peer.connection.response
            assert response is not None
            assert peer.connection.subprotocol == "mcp"
            assert offered(token) not in str(response.headers)
            await peer.initialize()
            assert await peer.text("whoami") == f"alice {token}"
    written = caplog.text
    assert token not in written
    assert offered(token) not in written


async def test_a_bearer_subprotocol_alone_is_not_selected() -> None:
    """Only ``mcp`` is ever selected; never the credential."""
    async with reachable() as server:
        async with server.websocket(subprotocols=(offered("bob"),)) as peer:
            assert peer.connection.subprotocol is None
            await peer.initialize()
            assert await peer.text("whoami") == "bob bob"


@pytest.mark.parametrize(
    "options",
    [
        {"subprotocols": ("mcp", offered("alice")), "headers": bearer("bob")},
        {"subprotocols": ("mcp", offered("alice"), offered("bob"))},
        {"subprotocols": ("mcp", "mcp.bearer.")},
        {"subprotocols": ("mcp", "mcp.bearer.a")},
        {"subprotocols": ("mcp", "mcp.bearer.____!")},
    ],
)
async def test_two_credentials_or_half_a_credential_are_refused_400(
    options: dict[str, Any],
) -> None:
    """Both at once: 400."""
    async with reachable() as server:
        assert (await server.refused(**options)).response.status_code == 400
        assert server.verifier.asked == 0


async def test_an_expired_credential_closes_1008_before_another_event() -> None:
    """SEC4. Its session waits, and is kept by a refreshed token (SES8)."""
    async with reachable(credential_check=0.02) as server:
        server.verifier.add("short", "alice", expires_at=server.clock() + 600)
        async with server.websocket(headers=bearer("short")) as peer:
            await peer.initialize()
            started = await peer.start()
            server.clock.advance(601)
            assert (await peer.closed())[0] == 1008
        await server.layer.notify_tools_changed()
        assert peer.events == []
        async with server.websocket(headers=bearer("alice")) as again:
            await again.initialize()
            answer = await again.resume(started["sessionId"], started["sessionEventId"])
            assert (answer["catchup"], answer["replayed"]) == (True, 1)


@pytest.mark.parametrize("what", ["event", "request"])
async def test_nothing_passes_an_expired_credential_until_the_next_check(what: str) -> None:
    """SEC4: neither an event nor a request, however seldom the credential is checked."""
    async with reachable() as server:
        server.verifier.add("short", "alice", expires_at=server.clock() + 600)
        async with server.websocket(headers=bearer("short")) as peer:
            await peer.initialize()
            await peer.start()
            server.clock.advance(601)
            if what == "event":
                await server.layer.notify_tools_changed()
            else:
                await peer.connection.send('{"jsonrpc":"2.0","id":77,"method":"ping"}')
            assert (await peer.closed())[0] == 1008
        assert peer.events == []


async def test_a_credential_that_is_not_accepted_any_more_closes_1008() -> None:
    """SEC4: periodic re-check."""
    async with reachable(credential_check=0.02) as server:
        async with server.websocket(subprotocols=("mcp", offered("bob"))) as peer:
            await peer.initialize()
            asked = server.verifier.asked
            del server.verifier.tokens["bob"]
            assert (await peer.closed())[0] == 1008
            assert server.verifier.asked > asked


async def test_one_principal_may_open_so_many_and_another_is_not_affected() -> None:
    """ERR6: per-principal connection cap; who leaves makes room."""
    async with reachable(max_connections_per_principal=2) as server:
        async with (
            server.websocket(headers=bearer("alice")) as first,
            server.websocket(headers=bearer("alice")) as second,
            server.websocket(headers=bearer("bob")) as other,
        ):
            for peer in (first, second, other):
                await peer.initialize()
            full = await server.refused(headers=bearer("alice"))
            assert full.response.status_code == 429
            await second.connection.close()
            async with server.websocket(headers=bearer("alice")) as third:
                await third.initialize()
                assert await third.text("whoami") == "alice alice"


async def test_nobody_resumes_the_session_of_another() -> None:
    """SES8: the owner's connection is not touched."""
    async with reachable() as server:
        async with (
            server.websocket(headers=bearer("alice")) as alice,
            server.websocket(headers=bearer("bob")) as bob,
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
            assert await alice.text("whoami") == "alice alice"
