"""Keys of anonymous callers count by no door that a proxy may stand before (CNV5)."""

from typing import Any

import pytest

from mcp_sessions import Conversations, current_session
from mcp_sessions.server.upstream.sdk.http_application import allowing
from tests.support.duplex import duplex_world, listening, websocket
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient, in_process
from tests.support.world import Ctx

META: Json = {"openai/session": "one"}
SIGNS = ("X-Forwarded-Host", "CF-Connecting-IP", "X-Envoy-External-Address", "Fly-Client-IP")
PLATFORMS_ID = "the-id-of-a-platform-with-33-characters"


async def source(ctx: Ctx, arguments: Json) -> str:
    session = current_session(default=None)
    return session.source if session is not None else "none"


@pytest.mark.parametrize("header", SIGNS)
@pytest.mark.parametrize("anonymous", [None, True])
async def test_a_request_through_a_proxy_has_no_conversation(
    header: str, anonymous: bool | None
) -> None:
    """Unless the operator says that keys are secret enough."""
    proxied, expected = {header: "192.0.2.1"}, "conversation" if anonymous else None
    on = Conversations(anonymous=anonymous, platform_ids=True)
    async with duplex_world(conversations=on) as w:
        w.inner.box.tools["source"] = source
        modern = ModernClient(w.inner.carrier)
        said = await modern.call("source", {}, meta=META, headers=proxied).result()
        assert said["content"][0]["text"] == (expected or "none")
        plain = RawClient(w.inner.carrier)
        await plain.initialize()
        sent = plain.send("tools/call", {"name": "source", "_meta": META}, headers=proxied)
        assert (await sent.result())["content"][0]["text"] == (expected or "connection")
        socket = await w.websocket(headers=proxied)
        await socket.initialize()
        assert await socket.text("source", meta=META) == (expected or "connection")
        # An id of a platform is such a key, also where it asks for a stream.
        for method in ("GET", "DELETE", "POST"):
            reply = w.inner.carrier.send(
                method,
                "/mcp",
                [
                    ("Host", "127.0.0.1:8000"),
                    ("Mcp-Session-Id", PLATFORMS_ID),
                    ("Accept", "application/json, text/event-stream"),
                    ("Content-Type", "application/json"),
                    *proxied.items(),
                ],
                b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}' if method == "POST" else b"",
            )
            await reply.until(lambda reply=reply: reply.status is not None)
            assert anonymous or reply.status == 404


async def test_an_endpoint_that_other_names_reach_takes_no_keys_until_it_is_said() -> None:
    """With ``--allowed-host`` a proxy is expected, and may call the server by any name."""
    for anonymous, expected in ((None, {"none", "connection"}), (True, {"conversation"})):
        on = Conversations(anonymous=anonymous)
        async with duplex_world(conversations=on) as w:
            w.inner.box.tools["source"] = source
            app = w.layer.asgi_app(security=allowing(["mcp.example"], []))
            said: set[Any] = set()
            async with in_process(app) as carrier, listening(app) as port:
                said.add(await ModernClient(carrier).text("source", {}, meta=META))
                plain = RawClient(carrier)
                await plain.initialize()
                sent = plain.send("tools/call", {"name": "source", "_meta": META})
                said.add((await sent.result())["content"][0]["text"])
                async with websocket(f"ws://127.0.0.1:{port}/mcp") as socket:
                    await socket.initialize()
                    said.add(await socket.text("source", meta=META))
            assert said == expected
