"""The page in Chromium: a session drops, comes back elsewhere, and is ended by the operator.

Two replicas share a Redis with 10,000 other sessions. ``SESSIONS_PICTURES=DIRECTORY`` makes this
test write the pictures of the documentation there.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from mcp.server import MCPServer
from playwright.async_api import Browser, Page, Response, async_playwright, expect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions import SessionLayer, SessionPolicy
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import SessionId, digest
from mcp_sessions.principal import Principal
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Peer
from tests.support.browser import chromium_program
from tests.support.duplex import websocket
from tests.support.persistent_clients import CAPABILITIES
from tests.support.raw import RawClient, SocketCarrier
from tests.support.redis_server import two_redis_stores
from tests.support.servers import RunningServer, serve

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.full, pytest.mark.redis, pytest.mark.timeout(300)]

OTHERS = 10_000
AXE = Path(__file__).with_name("axe.min.js").read_text("utf-8")
ROOMY = SessionPolicy(max_sessions=20_000, max_sessions_per_principal=20_000)
CLIENTS = ("claude-code 2.1.0", "vscode 1.99", "cursor 1.2", "inspector 0.17")
PICTURES = ("now-light", "now-dark", "session-light", "sessions-phone-dark")
"""Pictures of the documentation."""

URI = "note://one"
WITHIN = 30_000
"""Milliseconds in which a page shows a change."""


def server() -> MCPServer:
    mcp = MCPServer("notes")

    @mcp.resource(URI)
    def note() -> str:
        return "a note"

    return mcp


async def filled(store: SessionStore) -> list[SessionId]:
    ids: list[SessionId] = []
    for start in range(0, OTHERS, 100):
        made = await asyncio.gather(
            *(
                store.create(
                    Mode.PROTOCOL,
                    Principal(subject=f"user-{number % 40}"),
                    peer=_peer(CLIENTS[number % len(CLIENTS)]),
                    now=time.time() - number % 1_500,
                )
                for number in range(start, start + 100)
            )
        )
        ids += [each.session_id for each in made]
    return ids


def _peer(client: str) -> Peer:
    name, version = client.split()
    return Peer("2025-11-25", {"clientInfo": {"name": name, "version": version}})


@dataclass
class Seen:
    """What a browser said and got."""

    page: Page
    wrong: list[str] = field(default_factory=list[str])
    answers: list[Response] = field(default_factory=list[Response])
    contents: list[str] = field(default_factory=list[str])
    """The page, each time it was looked at."""

    async def shown(self, text: str) -> None:
        """Wait until the page has a text. Nobody loads it again."""
        await expect(self.page.locator("#part")).to_contain_text(text, timeout=WITHIN)
        self.contents.append(await self.page.content())

    async def check(self, name: str) -> None:
        """No serious finding of axe, in both schemes and on a phone."""
        self.contents.append(await self.page.content())
        for scheme in ("light", "dark"):
            for width in (1_200, 390):
                await self.page.emulate_media(color_scheme=scheme)
                await self.page.set_viewport_size({"width": width, "height": 860})
                await self.page.evaluate(AXE)
                found = await self.page.evaluate("axe.run()")
                serious = [
                    (each["id"], each["nodes"][0]["target"])
                    for each in found["violations"]
                    if each["impact"] in ("serious", "critical")
                ]
                assert serious == [], (name, scheme, width)
                wide = await self.page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, (name, width)
                await self.picture(
                    f"{name}-{scheme}" if width > 1_000 else f"{name}-phone-{scheme}"
                )
        await self.page.emulate_media(color_scheme="light")
        await self.page.set_viewport_size({"width": 1_200, "height": 860})

    async def picture(self, name: str) -> None:
        folder = os.environ.get("SESSIONS_PICTURES")
        if folder and name in PICTURES:
            await self.page.screenshot(path=Path(folder) / f"{name}.png")


@asynccontextmanager
async def browsing() -> AsyncGenerator[Browser]:
    async with async_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = await playwright.chromium.launch(executable_path=chromium_program(), args=options)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def looking(browser: Browser, *, scripts: bool = True) -> AsyncGenerator[Seen]:
    context = await browser.new_context(java_script_enabled=scripts)
    seen = Seen(await context.new_page())
    seen.page.on("console", lambda said: seen.wrong.append(said.text))
    seen.page.on("pageerror", lambda failed: seen.wrong.append(str(failed)))
    seen.page.on("response", lambda answer: seen.answers.append(answer))
    yield seen
    await context.close()


async def test_an_operator_sees_a_session_drop_come_back_elsewhere_and_ends_it() -> None:
    one, two = (SessionLayer(server(), store=each, policy=ROOMY) for each in two_redis_stores())
    with (
        serve(one.asgi_app()) as first,
        serve(two.asgi_app(dashboard="/sessions", dashboard_actions=True)) as second,
    ):
        ids = await first.call(filled, one.store, within=200)
        async with browsing() as browser, looking(browser) as seen:
            await _watched(seen, one, first, second, ids)
            async with looking(browser, scripts=False) as plain:
                await plain.page.goto(second.url("/sessions/sessions"))
                await plain.shown("Page 1 of")
                assert "as of" in await plain.page.inner_text("#sign")
                assert plain.wrong == []


def buffering(app: ASGIApp) -> ASGIApp:
    """A proxy that holds an answer back until all of it is there."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                for each in held:
                    await send(each)

        await app(scope, receive, hold if scope["type"] == "http" else send)

    return proxy


async def test_behind_a_proxy_that_buffers_the_page_says_so() -> None:
    app = SessionLayer(server()).asgi_app(dashboard="/sessions")
    with serve(buffering(app)) as running:
        async with browsing() as browser, looking(browser) as seen:
            await seen.page.goto(running.url("/sessions/"))
            said = "not live: no change arrives. Does a proxy buffer?"
            await expect(seen.page.locator("#sign")).to_have_text(said, timeout=WITHIN)
            assert await seen.page.inner_text(".number") == "0" and seen.wrong == []


async def _watched(
    seen: Seen,
    one: SessionLayer,
    first: RunningServer,
    second: RunningServer,
    ids: list[SessionId],
) -> None:
    page = seen.page
    async with websocket(first.url(scheme="ws"), capabilities=CAPABILITIES) as away:
        await away.initialize()
        started = await away.result("session/start", {})
        session = SessionId(started["sessionId"])
        await away.result("resources/subscribe", {"uri": URI})

        began = time.monotonic()
        await page.goto(second.url("/sessions/"))
        await page.wait_for_selector(".number")
        logger.info("the first view took %.2f s", time.monotonic() - began)
        await expect(page.locator("#sign")).to_have_text("live", timeout=WITHIN)
        await seen.shown("10,00")
        # The whole snapshot is there.
        await seen.shown("running calls")
        await seen.check("now")
        await page.get_by_role("link", name="Sessions", exact=True).click()
        await seen.shown("Page 1 of")
        await seen.check("sessions")
        await page.get_by_label("Client", exact=True).fill("raw")
        await page.get_by_role("button", name="Filter").click()
        await page.get_by_role("link", name=digest(session)).click()
        await seen.shown("attached by websocket")
    await seen.shown("detached at replica")
    await seen.shown("It lives, and no connection has it")
    for _ in range(3):
        await first.call(one.notify_resource_updated, URI)
    carrier = SocketCarrier(second.host, second.port)
    back = RawClient(carrier, capabilities=CAPABILITIES)
    await back.initialize()
    stream = await back.get().started()
    resumed = {"sessionId": session, "lastSessionEventId": started["sessionEventId"]}
    await back.result("session/resume", resumed)
    await stream.has(1)
    await seen.shown("resumed by http")
    await seen.shown("1 replayed, 2 coalesced")
    await seen.check("session")
    await page.get_by_role("button", name="End this session").click()
    await seen.shown("an operator ended it")
    assert (await back.error("session/resume", resumed))["code"] == -32043
    await carrier.aclose()
    for view in ("ended", "replicas", "servers", "tasks"):
        await page.goto(second.url(f"/sessions/{view}"))
        await page.wait_for_selector("h1")
        await seen.check(view)

    assert seen.wrong == []
    for answer in seen.answers:
        assert "content-security-policy" in answer.headers, answer.url
        seen.contents.append(str(answer.headers))
    async with httpx2.AsyncClient(timeout=60) as plain:
        # A body is lost to the browser's tools with the next page.
        for url in {each.url for each in seen.answers if each.request.method == "GET"}:
            if "/live/" not in url:
                seen.contents.append((await plain.get(url)).text)
    everything = "\n".join(seen.contents)
    assert digest(session) in everything
    assert [each for each in (session, back.session_id, *ids) if each and each in everything] == []
