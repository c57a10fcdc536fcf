"""The page of a layer that runs: its own calls, those of other replicas, and who may see it."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from mcp.server import MCPServer
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from mcp_sessions import SessionLayer
from mcp_sessions.authentication.credential import OPERATOR
from mcp_sessions.cli import serve_options
from mcp_sessions.cli.dashboard import latest_method
from mcp_sessions.cli.main import main
from mcp_sessions.core.recent import RecentCounts
from mcp_sessions.dashboard.access_control import HEADERS
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId, digest, replica_name
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import KEYS_VARIABLE
from mcp_sessions.server.dispatch.admin import ended_outside
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.operator import SharedStore
from mcp_sessions.testing import MakeTwoStores
from tests.stores.every_store import KEYS, every_encrypted_exchange, every_exchange
from tests.support.duplex import duplex_world
from tests.support.modern import ModernClient
from tests.support.raw import call_params
from tests.support.servers import serve
from tests.support.serving import INITIALIZE

ACCEPT = {"accept": "application/json, text/event-stream"}


class Waiting:
    """A server with a tool that waits until the test lets it end."""

    def __init__(self) -> None:
        self.begun, self.may_end = anyio.Event(), anyio.Event()
        self.server = MCPServer("notes")

        @self.server.tool()
        async def wait() -> str:
            self.begun.set()
            with anyio.fail_after(20):
                await self.may_end.wait()
            return "done"

    async def end(self) -> None:
        """Let the calls end. For a server in another thread: in its event loop."""
        self.may_end.set()


@asynccontextmanager
async def browser(app: ASGIApp, address: str = "127.0.0.1") -> AsyncGenerator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app, client=(address, 4711))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


async def begun(client: httpx2.AsyncClient) -> str:
    """The id of a new session."""
    answer = await client.post("/mcp", json=INITIALIZE, headers=ACCEPT)
    assert answer.status_code == 200, answer.text
    return answer.headers["mcp-session-id"]


async def listed(client: httpx2.AsyncClient, session_id: str) -> None:
    """Ask for the tools in the session."""
    headers = ACCEPT | {"mcp-session-id": session_id}
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    assert (await client.post("/mcp", json=listing, headers=headers)).status_code == 200


def call(number: int) -> dict[str, Any]:
    params: dict[str, Any] = {"name": "wait", "arguments": {}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


async def seen(client: httpx2.AsyncClient, path: str, pattern: str) -> str:
    """The page, as soon as it has what the pattern says. A snapshot is good for a second. Ends
    are read every ten.
    """
    with anyio.fail_after(40):
        while True:
            text = (await client.get(path)).text
            if re.search(pattern, text):
                return text
            await anyio.sleep(0.1)


async def test_a_running_call_is_on_the_page_of_its_session() -> None:
    waiting = Waiting()
    layer = SessionLayer(waiting.server)
    app = layer.asgi_app(dashboard="/sessions")
    async with layer.lifespan(), browser(app) as client, anyio.create_task_group() as tasks:
        session_id = await begun(client)
        headers = ACCEPT | {"mcp-session-id": session_id}
        tasks.start_soon(lambda: client.post("/mcp", json=call(2), headers=headers))
        with anyio.fail_after(20):
            await waiting.begun.wait()
        await seen(client, f"/sessions/session/{digest(session_id)}", "tools/call at ")
        overview = await seen(client, "/sessions/", r">1</div><div class=\"label\">running calls")
        assert session_id not in overview
        waiting.may_end.set()


async def test_a_client_that_names_a_session_that_is_gone_is_counted() -> None:
    """It is refused with 404 for ever, and no session's story has it."""
    layer = SessionLayer(MCPServer("notes"))
    async with layer.lifespan(), browser(layer.asgi_app(dashboard="/sessions")) as client:
        dead = "d" * 43
        for _ in range(3):
            headers = ACCEPT | {"mcp-session-id": dead}
            assert (await client.post("/mcp", json=call(2), headers=headers)).status_code == 404

        overview = await seen(client, "/sessions/", f"{digest(dead)}</a><b>3<")
        said = await client.get(f"/sessions/session/{digest(dead)}")

        assert "A client still asks for it: 3 requests" in said.text and dead not in overview


def test_few_names_are_counted() -> None:
    strangers = RecentCounts()
    for number in range(150):
        strangers.add(f"session {number}")
    strangers.add("session 149")

    counts = strangers.read()
    assert len(counts) == 100 and counts["session 149"] == 2
    assert "session 0" not in counts


@pytest.mark.parametrize("make_two", every_exchange())
async def test_a_page_shows_every_replica(make_two: MakeTwoStores) -> None:
    first, second = (SessionLayer(MCPServer("notes"), store=each) for each in make_two())
    app = first.asgi_app(dashboard="/sessions")
    async with first.lifespan(), second.lifespan(), browser(app) as client:
        names = [replica_name(each._assembly.bus.process) for each in (first, second)]  # pyright: ignore[reportPrivateUsage]
        text = await seen(client, "/sessions/replicas", f"{names[1]}</a>")

        assert all(f"{each}</a>" in text for each in names)
        assert text.count("alive</span>") == 2


async def test_a_layer_that_does_not_run_says_so() -> None:
    async with browser(SessionLayer(MCPServer("notes")).dashboard()) as client:
        assert (await client.get("/")).status_code == 503


async def test_the_application_may_decide_who_sees_it() -> None:
    async def allows(request: Any) -> bool:
        return request.headers.get("x-user") == "operator"

    layer = SessionLayer(MCPServer("notes"))
    pages = (layer.dashboard(auth=allows), layer.dashboard(auth=lambda request: False))
    async with layer.lifespan():
        async with browser(pages[0], "203.0.113.9") as client:
            assert (await client.get("/", headers={"x-user": "operator"})).status_code == 200
            assert (await client.get("/")).status_code == 403
        async with browser(pages[1]) as client:
            assert (await client.get("/")).status_code == 403


async def test_without_authentication_only_this_machine_sees_it() -> None:
    layer = SessionLayer(MCPServer("notes"))
    async with layer.lifespan(), browser(layer.dashboard(), "203.0.113.9") as client:
        assert (await client.get("/")).status_code == 403


def test_a_page_that_others_can_reach_needs_authentication() -> None:
    with pytest.raises(ConfigurationError, match="others can reach this page on 0.0.0.0"):
        SessionLayer(MCPServer("notes")).asgi_app(host="0.0.0.0", dashboard="/sessions")


OTHERS_PATHS = ["", "/", "sessions", "//evil.example", "/mcp", "/mcp/", "/healthz", "/a/readyz/"]


@pytest.mark.parametrize("path", [*OTHERS_PATHS, "/.well-known", "/.well-known/page"])
def test_a_page_has_a_path_of_its_own(path: str) -> None:
    """``//evil.example`` was a redirect to that host. At ``/healthz`` was the health check, and the
    page at ``/healthz/``. Under ``/.well-known`` clients look for metadata.
    """
    with pytest.raises(ConfigurationError, match="choose a path of its own"):
        SessionLayer(MCPServer("notes")).asgi_app(dashboard=path)


@pytest.mark.parametrize(("under", "path"), [("", "/sessions"), ("/app", "/a/sessions")])
async def test_the_address_without_a_slash_leads_to_the_page(under: str, path: str) -> None:
    """It had none of the strict headers. In an application that is mounted it led elsewhere."""
    layer = SessionLayer(MCPServer("notes"))
    app = Starlette(routes=[Mount(under, layer.asgi_app(health="/a", dashboard=path))])
    async with layer.lifespan(), browser(app) as client:
        answer = await client.get(f"{under}{path}")
        assert answer.is_redirect
        assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
        page = await client.send(answer.next_request or pytest.fail("it leads nowhere"))
        assert page.status_code == 200 and page.url.path == f"{under}{path}/"


async def test_what_is_under_the_path_of_the_page_is_served_if_it_is_not_the_pages() -> None:
    layer = SessionLayer(MCPServer("notes"))
    app = layer.asgi_app("/sessions/mcp", health="/sessions", dashboard="/sessions")
    async with layer.lifespan(), browser(app) as client:
        assert (await client.get("/sessions/healthz")).text == "alive\n"
        answer = await client.post("/sessions/mcp", json=INITIALIZE, headers=ACCEPT)
        assert answer.headers["mcp-session-id"]
        assert "<h1>Now</h1>" in (await client.get("/sessions/")).text


async def test_the_page_says_the_last_method_while_the_session_is_attached() -> None:
    """The story has it when the session is detached."""
    async with duplex_world() as world:
        client = await world.websocket()
        await client.initialize()
        attached = (await client.start())["sessionId"]
        await client.result("tools/call", call_params("echo", {"text": "1"}))
        modern = ModernClient(world.inner.carrier)
        of_requests = (await modern.create())["sessionId"]
        await modern.send("resources/list", {}, session=of_requests).result()

        for session_id, method in ((attached, "tools/call"), (of_requests, "resources/list")):
            async with browser(world.layer.dashboard()) as page:
                said = (await page.get(f"/session/{digest(session_id)}")).text
            assert f"<dt>Last method</dt><dd>{method}</dd>" in said


@pytest.mark.parametrize("make_two", every_exchange())
async def test_another_replica_knows_the_last_method(make_two: MakeTwoStores) -> None:
    first, second = (SessionLayer(MCPServer("notes"), store=each) for each in make_two())
    app, other = first.asgi_app(dashboard="/sessions"), second.asgi_app()
    async with first.lifespan(), second.lifespan(), browser(app) as page, browser(other) as client:
        session_id = await begun(client)
        await listed(client, session_id)

        said = "<dt>Last method</dt><dd>tools/list</dd>"
        await seen(page, f"/sessions/session/{digest(session_id)}", said)


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("make_two", every_encrypted_exchange())
async def test_a_command_beside_encrypted_replicas_asks_them_if_it_has_their_keys(
    make_two: MakeTwoStores,
    has_keys: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What they answered was sealed, and so it was called malformed, with each question."""
    if has_keys:
        monkeypatch.setenv(KEYS_VARIABLE, KEYS[0])
    first, second = make_two()
    plain: SessionStore = getattr(second, "inner", second)
    layer = SessionLayer(MCPServer("notes"), store=first)
    async with layer.lifespan(), browser(layer.asgi_app()) as client:
        session_id = SessionId(await begun(client))
        await listed(client, session_id)
        await plain.open(SessionPolicy())
        try:
            beside = SharedStore(plain, ended_outside)
            latest = await latest_method(session_id, beside)
        finally:
            await plain.close()

    assert latest == ("tools/list" if has_keys else None)
    assert "malformed" not in caplog.text


def test_a_layer_without_a_store_has_no_page() -> None:
    with pytest.raises(ConfigurationError, match="the page needs a store"):
        SessionLayer(MCPServer("notes"), store=None).dashboard()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "mcp.json", "--dashboard", "/sessions"], "--dashboard shows one server"),
        (["server.py", "--dashboard", "/mcp"], "choose a path of its own"),
        (["server.py", "--dashboard", "/"], "choose a path of its own"),
        (["server.py", "--dashboard", "/healthz"], "choose a path of its own"),
        (["server.py", "--stdio", "--dashboard", "/sessions"], "--stdio serves no HTTP"),
    ],
)
def test_options_that_do_not_fit_are_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        serve_options.parsed(arguments, {})


def test_with_api_keys_the_page_of_a_layer_asks_for_an_operators(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"

    def added(*arguments: str) -> str:
        assert main(["keys", "add", *arguments, "--file", str(path)]) == 0
        return capsys.readouterr().out.split()[-1]

    key, other = added("ops", "--scope", OPERATOR), added("user")
    layer = SessionLayer(MCPServer("notes"), api_keys=path)
    with serve(layer.asgi_app(dashboard="/sessions", dashboard_actions=True)) as server:
        url = server.url("/sessions/")
        assert httpx2.get(url, timeout=20).status_code == 401
        assert httpx2.get(url, auth=("anybody", other), timeout=20).status_code == 403
        ending = httpx2.post(f"{url}session/abcdef012345/end", auth=("user", other), timeout=20)
        assert ending.status_code == 403 and OPERATOR in ending.text
        answer = httpx2.get(url, auth=("anybody", key), timeout=20)
        assert answer.status_code == 200 and key not in answer.text
