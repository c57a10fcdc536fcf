"""A URL of this machine is asked past the proxies that the environment names.

The loopback of a proxy is that of another machine. Here the proxy is a port that nobody serves.
"""

import anyio
import pytest
from mcp import Client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mcp_sessions import HTTPServer, SessionLayer
from mcp_sessions.authentication.fetching import FetchFailed, fetch_json
from mcp_sessions.client_transport import resumable
from mcp_sessions.core.nearness import past_proxies
from tests.support import apps
from tests.support.duplex import listening
from tests.support.servers import serve
from tests.support.url_server import UrlServer
from tests.support.urls import url_of
from tests.support.world import Toolbox, connected_world

pytestmark = pytest.mark.filterwarnings(apps.DEPRECATED)


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets."""
    return "asyncio"


@pytest.fixture(autouse=True)
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "socks_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "http://127.0.0.1:1")
    for each in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)


@pytest.mark.parametrize(
    ("url", "mounts"),
    [
        ("http://127.0.0.1:8000/mcp", {"all://127.0.0.1": None}),
        ("https://127.3.4.5/mcp", {"all://127.3.4.5": None}),
        ("http://LOCALHOST:1/", {"all://localhost": None}),
        ("ws://[::1]:8000/", {"all://[::1]": None}),
        ("http://localhost.example/", {}),
        ("http://10.0.0.1/", {}),
    ],
)
def test_only_this_machine_is_asked_past_them(url: str, mounts: dict[str, None]) -> None:
    assert past_proxies(url) == mounts


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_wrapped_url(host: str) -> None:
    async with url_of(UrlServer()) as url:
        wrapped = HTTPServer(url.replace("127.0.0.1", host))
        async with connected_world(server=wrapped) as (_, client):
            assert await client.text("count") == "1"


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_client_that_resumes(scheme: str) -> None:
    box = Toolbox()
    with serve(SessionLayer(box.server).asgi_app()) as server, anyio.fail_after(30):
        url = server.url().replace("http", scheme, 1)
        async with Client(resumable(url), mode="legacy") as client:
            await client.call_tool("echo", {"text": "here"})
    assert box.calls == ["echo"]


async def test_an_issuer() -> None:
    async def says(request: Request) -> JSONResponse:
        return JSONResponse({"here": True})

    async with listening(Starlette(routes=[Route("/", says)])) as port:
        assert await fetch_json(f"http://127.0.0.1:{port}/") == {"here": True}
    with pytest.raises(FetchFailed):
        await fetch_json("http://issuer.example/")
