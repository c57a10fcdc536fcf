"""Make the SDK's ``Connection`` of the modern era, which is one request.

All data about the client comes with each request. It is the same for each request of one client, so
the SDK's objects for it are made once. The clean-up after each request runs only if a handler has
registered something.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AsyncExitStack
from typing import Final

from mcp.server.connection import Connection
from mcp.shared.inbound import InboundModernRoute

_KEPT: Final = 256
"""Clients whose envelopes are kept, at most."""

_LARGEST: Final = 4_096
"""Characters of an envelope that is kept, at most."""


class RequestConnection(Connection):
    is_stack_used = False

    @property
    def exit_stack(self) -> AsyncExitStack:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the stack, and note the use: a caller wants to register something."""
        self.is_stack_used = True
        return self._stack

    @exit_stack.setter
    def exit_stack(self, stack: AsyncExitStack) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._stack = stack


class Envelopes:
    def __init__(self) -> None:
        # The most recent one is at the end.
        self._known: OrderedDict[str, Connection] = OrderedDict()

    def connection(self, route: InboundModernRoute) -> RequestConnection:
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
        # Two different JSON values never have the same text here. In JSON itself NaN and null may.
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
