"""What the interop tests share: the servers, the clients and the processes they live in.

``MCP_SESSIONS_INTEROP_BARE=1`` runs the same clients against the SDK's own Streamable HTTP
instead of the layer, and leaves out the tests of what only the layer does. What fails there
too is the fault of a client script, not of the layer. ``MCP_SESSIONS_INTEROP_CONVERSATIONS=1``
runs them against the layer with conversations bound, of which they know nothing.
"""

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Unpack

import anyio
import pytest

from tests.interop import environments
from tests.interop.clients import ClientKind, How, StockClient, connect
from tests.interop.driver import Driver
from tests.interop.harness import (
    BINDS,
    IN_DRIVERS,
    IS_BARE,
    OVER_WEBSOCKET,
    RECONNECTS_BY_DEFAULT,
    Connect,
    UnderTest,
)
from tests.support.apps import KINDS, make_app
from tests.support.proxy import TcpProxy
from tests.support.servers import serve
from tests.support.unwrapped import unwrapped_asgi_app


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "layer_only: of what the SDK alone does not do")
    config.addinivalue_line(
        "markers",
        "reconnects(*also): takes the second after which clients come back; run by default "
        "with one pair of server and client, and those in `also`",
    )
    config.addinivalue_line(
        "markers",
        "by_command(*names): a command is started anew for each client, and imports the SDK each "
        "time; run by default with these clients",
    )


# First, so that what is marked here as full is left out where that is asked for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("reconnects")
        if marker is not None and isinstance(item, pytest.Function):
            pair = (item.callspec.params["under_test"], item.callspec.params["kind"])
            if pair not in (RECONNECTS_BY_DEFAULT, *marker.args):
                item.add_marker(pytest.mark.full)
        marker = item.get_closest_marker("by_command")
        if marker is not None and isinstance(item, pytest.Function):
            params = item.callspec.params
            if params["address"] == "command" and params.get("name") not in marker.args:
                item.add_marker(pytest.mark.full)
    if IS_BARE:
        left_out = [item for item in items if item.get_closest_marker("layer_only")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("layer_only")]


@pytest.fixture(scope="module", params=KINDS)
def under_test(request: pytest.FixtureRequest) -> Generator[UnderTest]:
    """One server of each class, wrapped and running, for the module."""
    app = make_app(request.param)
    if IS_BARE:
        with serve(unwrapped_asgi_app(app)) as server:
            yield UnderTest(app, server, None)
        return
    from mcp_sessions import Conversations, SessionLayer

    layer = SessionLayer(app.server, conversations=Conversations() if BINDS else None)
    app.publish = layer.notify_resource_updated
    with serve(layer.asgi_app(path="/mcp")) as server:
        yield UnderTest(app, server, layer)


@pytest.fixture(scope="session")
def driver_of() -> Generator[Callable[[ClientKind], Driver]]:
    """Starts the process of a client kind when it is first asked for."""
    drivers: dict[str, Driver] = {}

    def driver(kind: ClientKind) -> Driver:
        name = kind.removesuffix("-websocket")
        if name not in drivers or not drivers[name].is_running:
            match kind:
                case "python-1" | "python-1-websocket":
                    command = environments.python1_command()
                case "typescript-2":
                    command = environments.typescript_command("typescript2")
                case _:
                    command = environments.typescript_command()
            drivers[name] = Driver(command)
        return drivers[name]

    yield driver
    for process in drivers.values():
        process.stop()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> ClientKind:
    return request.param


@pytest.fixture
def connected(
    kind: ClientKind, driver_of: Callable[[ClientKind], Driver], request: pytest.FixtureRequest
) -> Connect:
    if kind in (*IN_DRIVERS, *OVER_WEBSOCKET):
        # Now, since it may have to be installed: within a test the time is short.
        driver_of(kind)

    @asynccontextmanager
    async def of_this_kind(
        url: str | None = None, *, within: float = 20, **how: Unpack[How]
    ) -> AsyncGenerator[StockClient]:
        if url is None:
            scheme = "ws" if kind in OVER_WEBSOCKET else "http"
            url = str(request.getfixturevalue("under_test").server.url(scheme=scheme))
        with anyio.fail_after(within):
            async with connect(kind, driver_of, url, **how) as client:
                yield client

    return of_this_kind


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> str:
    """A word of this test's own, for the tools' ``gate``."""
    return f"gate of {request.node.name}"


@pytest.fixture
def note(request: pytest.FixtureRequest) -> str:
    """A resource of this test's own."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"note://{name}"


@pytest.fixture
def proxy(under_test: UnderTest) -> TcpProxy:
    """A proxy to the server, to be entered by the test."""
    return TcpProxy(under_test.server.host, under_test.server.port)
