from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import anyio

from mcp_sessions.client.dialer import Dialer, Event, Failed, Failure, Link
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.state import Runtime
from mcp_sessions.core.resume import FailureCause


@dataclass(slots=True, eq=False)
class Connector:
    _runtime: Runtime
    _peer: KnownServer
    _on_event: Callable[[Link, Event], Awaitable[None]]
    _dialers: WeakKeyDictionary[Link, Dialer] = field(
        default_factory=WeakKeyDictionary[Link, Dialer]
    )

    async def connect(self, dialer: Dialer) -> Link:
        link = dialer.link()
        link.configure(self._peer.first_settings())
        timeout = self._runtime.policy.connect_timeout
        try:
            with anyio.fail_after(timeout):
                await self._runtime.tasks.start(link.run, self._on_event)
        except TimeoutError:
            text = f"{link.name}: no connection within {timeout:g} s"
            raise Failed(Failure(FailureCause.SILENT, text)) from None
        self._dialers[link] = dialer
        return link

    def dialer_of(self, link: Link) -> Dialer:
        return self._dialers[link]
