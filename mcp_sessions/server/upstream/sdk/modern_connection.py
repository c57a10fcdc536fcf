"""The SDK's ``Connection`` of the modern era, which is one request.

Everything about the client comes with each request. Of one client it is the same each time, so
what the SDK makes of it is made once; and what is torn down after each request is torn down
where a handler has put something there.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AsyncExitStack
from typing import Final

from mcp.server.connection import Connection
from mcp.server.runner import aclose_shielded
from mcp.shared.inbound import InboundModernRoute

_KEPT: Final = 256
"""Different clients whose envelopes are known."""

_LARGEST: Final = 4_096
"""Characters of an envelope that is worth being known."""


class RequestConnection(Connection):
    """A connection that lasts for one request."""

    is_stack_used = False

    @property
    def exit_stack(self) -> AsyncExitStack:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See :class:`Connection`. Whoever asks for it means to put something there."""
        self.is_stack_used = True
        return self._stack

    @exit_stack.setter
    def exit_stack(self, stack: AsyncExitStack) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._stack = stack

    async def close(self) -> None:
        """Tear down what handlers have put on the exit stack; no error escapes."""
        if self.is_stack_used:
            await aclose_shielded(self)


class Envelopes:
    """What the SDK makes of the envelopes that clients send."""

    def __init__(self) -> None:
        # The one that came last is at the end.
        self._known: OrderedDict[str, Connection] = OrderedDict()

    def connection(self, route: InboundModernRoute) -> RequestConnection:
        """A connection for one request, as ``Connection.from_envelope`` makes it."""
        said = self._read(route)
        connection = RequestConnection(
            said.outbound,
            protocol_version=said.protocol_version,
            client_params=said.client_params,
        )
        connection.client_capabilities = said.client_capabilities
        connection.initialized.set()
        return connection

    def _read(self, route: InboundModernRoute) -> Connection:
        # No two JSON values have one spelling here; in JSON itself NaN and null may.
        spelled = repr((route.protocol_version, route.client_info, route.client_capabilities))
        known = self._known.get(spelled)
        if known is not None:
            self._known.move_to_end(spelled)
            return known
        said = Connection.from_envelope(
            route.protocol_version, route.client_info, route.client_capabilities
        )
        if len(spelled) <= _LARGEST:
            self._known[spelled] = said
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return said
