"""What an operator may do on the page, and who may not."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import anyio
import httpx2
import pytest
from mcp.server import MCPServer

from mcp_sessions import Conversations, SessionLayer
from mcp_sessions.dashboard.actions import Actions
from mcp_sessions.ids import digest
from mcp_sessions.testing import MakeTwoStores
from tests.dashboard.test_layer_dashboard import ACCEPT, begun, browser, call, seen
from tests.stores.every_store import every_exchange
from tests.support.modern import ModernClient
from tests.support.serving import INITIALIZE
from tests.support.world import world

OWN = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}


@dataclass
class Acting:
    layer: SessionLayer
    client: httpx2.AsyncClient
    session: str

    @property
    def page(self) -> str:
        return f"/sessions/session/{digest(self.session)}"

    async def token(self) -> str:
        """The token of the forms, as the browser with these cookies gets it."""
        text = (await self.client.get(self.page)).text
        found = re.search(r'name="token" value="([0-9a-f]{64})"', text)
        assert found is not None
        return found[1]

    async def end(self, token: str, **headers: str) -> int:
        answer = await self.client.post(f"{self.page}/end", data={"token": token}, headers=headers)
        return answer.status_code

    async def lives(self) -> bool:
        return [each.id for each in await self.layer.sessions.list()] == [self.session]


@asynccontextmanager
async def acting() -> AsyncGenerator[Acting]:
    layer = SessionLayer(MCPServer("notes"))
    app = layer.asgi_app(dashboard="/sessions", dashboard_actions=True)
    async with layer.lifespan(), browser(app) as client:
        yield Acting(layer, client, await begun(client))


async def test_a_session_ends_and_its_page_says_who_ended_it() -> None:
    async with acting() as page:
        assert await page.end(await page.token(), **OWN) == 303
        assert not await page.lives()
        await seen(page.client, page.page, "an operator ended it")
        answer = await page.client.post(
            "/mcp", json=call(2), headers=ACCEPT | {"mcp-session-id": page.session}
        )
        assert answer.status_code == 404


OTHER = "http://attacker.example"
FOREIGN: list[dict[str, str]] = [
    {},
    {"sec-fetch-site": "cross-site", "origin": OTHER},
    {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:9999"},
    {"sec-fetch-site": "none"},
    {"origin": OTHER},
    {"origin": "null"},
    {"sec-fetch-site": "same-origin", "origin": OTHER},
]
"""What a browser says of a form of another page."""


async def test_every_action_refuses_a_form_of_another_page() -> None:
    async with acting() as page:
        token = await page.token()
        replicas = (await page.client.get("/sessions/replicas")).text
        (process,) = re.findall(r"/sessions/replicas/([^/]+)/drain", replicas)
        paths = {
            "/session/{name}/end": f"{page.page}/end",
            "/replicas/{process}/drain": f"/sessions/replicas/{process}/drain",
            "/servers/{process}/{pid:int}/stop": f"/sessions/servers/{process}/1/stop",
        }
        assert {each.path for each in Actions(cast("Any", None)).routes()} == {*paths}
        for path in paths.values():
            for headers in FOREIGN:
                form = {"token": token}
                answer = await page.client.post(path, data=form, headers=headers)
                assert answer.status_code == 403, (path, headers)
            answer = await page.client.post(path, data={"token": "0" * 64}, headers=OWN)
            assert answer.status_code == 403, path
        assert await page.lives()
        assert (await page.client.get("/sessions/replicas")).text.count("alive</span>") == 1


async def test_two_tabs_share_the_token_of_their_forms() -> None:
    async with acting() as page:
        first, second = await page.token(), await page.token()
        assert first == second and await page.end(first, **OWN) == 303
        # The second tab is late.
        assert await page.end(second, **OWN) in (303, 404) and not await page.lives()
        await seen(page.client, page.page, "an operator ended it")


async def test_the_session_of_a_conversation_is_ended_and_the_next_call_starts_one() -> None:
    async with world(conversations=Conversations()) as w:
        client = ModernClient(w.carrier)
        meta = {"openai/session": "a-conversation"}
        await client.text("session_id", meta=meta)
        (before,) = [each.id for each in await w.layer.sessions.list()]
        async with browser(w.layer.dashboard(actions=True)) as operator:
            path = f"/session/{digest(before)}"
            text = (await operator.get(path)).text
            assert "<dt>Mode</dt><dd>conversation</dd>" in text and "a-conversation" not in text
            (token,) = re.findall(r'name="token" value="([0-9a-f]{64})"', text)
            form = {"token": token}
            assert (await operator.post(f"{path}/end", data=form, headers=OWN)).status_code == 303
            assert "an operator ended it" in (await operator.get(path)).text
        assert await w.layer.sessions.list() == []
        await client.text("session_id", meta=meta)
        assert len(await w.layer.sessions.list()) == 1


async def test_a_form_of_another_page_does_nothing() -> None:
    async with acting() as page:
        token = await page.token()
        for headers in FOREIGN:
            assert await page.end(token, **headers) == 403, headers
        assert await page.end("0" * 64, **OWN) == 403
        assert await page.end("", **OWN) == 403
        page.client.cookies.clear()
        assert await page.end(token, **OWN) == 403
        assert await page.lives()


async def test_the_cookie_is_sent_by_our_pages_alone() -> None:
    async with acting() as page:
        cookie = (await page.client.get(page.page)).headers["set-cookie"].lower()
        assert "samesite=strict" in cookie and "httponly" in cookie and "path=/sessions" in cookie


async def test_a_link_does_nothing() -> None:
    async with acting() as page:
        assert (await page.client.get(f"{page.page}/end")).status_code in (404, 405)
        assert await page.lives()


async def test_without_the_option_nothing_can_be_done() -> None:
    layer = SessionLayer(MCPServer("notes"))
    async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
        page = Acting(layer, client, await begun(client))
        text = (await client.get(page.page)).text
        assert "<button" in text and "End this session" not in text
        assert await page.end("0" * 64, **OWN) in (404, 405)
        assert await page.lives()


@pytest.mark.parametrize("make_two", every_exchange())
async def test_a_replica_is_drained_from_the_page_of_another_one(make_two: MakeTwoStores) -> None:
    first, second = (SessionLayer(MCPServer("notes"), store=each) for each in make_two())
    app = first.asgi_app(dashboard="/sessions", dashboard_actions=True)
    other = second.asgi_app()
    process = second._assembly.bus.process  # pyright: ignore[reportPrivateUsage]
    async with (
        first.lifespan(),
        second.lifespan(),
        browser(app) as client,
        browser(other) as clients_of_other,
    ):
        text = await seen(client, "/sessions/replicas", f"replicas/{process}/drain")
        token = re.findall(r'name="token" value="([0-9a-f]{64})"', text)[0]
        path = f"/sessions/replicas/{process}/drain"
        assert (await client.post(path, data={"token": token}, headers=OWN)).status_code == 303
        with anyio.fail_after(20):
            while True:
                answer = await clients_of_other.post("/mcp", json=INITIALIZE, headers=ACCEPT)
                if answer.status_code == 503:
                    break
                await anyio.sleep(0.1)
        unknown = "/sessions/replicas/process-v1-nobody/drain"
        assert (await client.post(unknown, data={"token": token}, headers=OWN)).status_code == 404


async def test_a_process_of_the_wrapped_server_is_stopped() -> None:
    from tests.support.children import child

    layer = SessionLayer(child())
    app = layer.asgi_app(dashboard="/sessions", dashboard_actions=True)
    async with layer.lifespan(), browser(app) as client:
        await begun(client)
        text = await seen(client, "/sessions/servers", r"/stop\"")
        token = re.findall(r'name="token" value="([0-9a-f]{64})"', text)[0]
        (path,) = re.findall(r'action="(/sessions/servers/[^"]+/stop)"', text)
        pid = path.split("/")[-2]
        assert f"Stop {pid}" in text and "MiB" in text
        assert (await client.post(path, data={"token": token}, headers=OWN)).status_code == 303
        await seen(client, "/sessions/servers", "No process runs")
