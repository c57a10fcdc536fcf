"""What a test of this folder is written with."""

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

import pytest

from tests.interop.clients import ClientKind, How, StockClient
from tests.support.apps import App, Kind
from tests.support.servers import RunningServer

IS_BARE = os.environ.get("MCP_SESSIONS_INTEROP_BARE") == "1"
BINDS = os.environ.get("MCP_SESSIONS_INTEROP_CONVERSATIONS") == "1"
"""Whether the layer binds conversations, of which these clients know nothing."""

IN_DRIVERS: tuple[ClientKind, ...] = ("python-1", "typescript-1", "typescript-2")
ALL: tuple[ClientKind, ...] = ("python-2", "fastmcp-4", *IN_DRIVERS)
OVER_WEBSOCKET: tuple[ClientKind, ...] = ("python-1-websocket", "typescript-1-websocket")
RECONNECTS_BY_DEFAULT: tuple[Kind, ClientKind] = ("mcpserver", "python-2")
"""The pair of server and client with which tests marked ``reconnects`` run by default."""


@dataclass
class UnderTest:
    """A wrapped server that runs, and the handles to what it is made of."""

    app: App
    server: RunningServer
    layer: Any
    """The `SessionLayer`; ``None`` when bare."""

    @property
    def kind(self) -> Kind:
        return self.app.kind

    async def listens(self, client: StockClient) -> None:
        """Return once the client has opened its notification stream, if it has another one."""
        if client.kind not in OVER_WEBSOCKET:
            await self.server.wire.saw(method="GET", session_id=client.session_id)

    async def publish(self, uri: str) -> None:
        """Change a resource from outside any request, and tell it."""
        self.app.change(uri)
        publish = self.app.publish if self.layer is None else self.layer.notify_resource_updated
        await self.server.call(publish, uri)


class Connect(Protocol):
    """`connect` with the kind and the processes filled in; to the server under test by default.

    Raises:
        TimeoutError: The client is still connected after ``within`` seconds.
    """

    def __call__(
        self, url: str | None = None, *, within: float = 20, **how: Unpack[How]
    ) -> AbstractAsyncContextManager[StockClient]: ...


def clients(*kinds: ClientKind) -> pytest.MarkDecorator:
    """Run the test once per client kind; those in processes only in the full run."""
    in_process = [pytest.mark.full, pytest.mark.timeout(300)]
    # The SDK alone serves no WebSocket.
    marks = {
        **dict.fromkeys(IN_DRIVERS, in_process),
        **dict.fromkeys(OVER_WEBSOCKET, [*in_process, pytest.mark.layer_only]),
    }
    params = [pytest.param(kind, marks=marks.get(kind, [])) for kind in kinds]
    return pytest.mark.parametrize("kind", params, indirect=True)
