"""Change the server of a layer that runs: its next children are started in another way.

Rules:

1. A session keeps its child. So does a connection with a handshake.
2. Any other child gets no more requests. It ends when it has answered those that it has. The next
   request starts another one, which gets the log level and the subscriptions.
3. A start that has begun completes, with the server of before.
4. Failures of the server of before do not count any more.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from mcp_sessions.external_server import ExternalServer
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.failures import Failures
from mcp_sessions.server.upstream.external.room import LOOKS
from mcp_sessions.server.upstream.external.slot import Slot


def can_follow(before: ExternalServer, after: ExternalServer) -> bool:
    """Whether a layer of one server can start the children of the other. It asks each client for
    the scopes that it began with, speaks the same eras, turns the same calls into tasks, and finds
    request keys in the same places.
    """
    if before.tasks != after.tasks or before.eras != after.eras:
        return False
    if before.request_keys != after.request_keys:
        return False
    if before.scopes != after.scopes or before.tool_scopes != after.tool_scopes:
        return False
    return type(before) is type(after) and before.per == after.per


class ChangingChildren(Children):
    def use(self, server: ExternalServer) -> None:
        """Start the next children of this server.

        Args:
            server: See :func:`can_follow`.
        """
        self.server = server
        self.starter.use(server)
        self._failures = Failures(self.ours)
        self.is_of_the_era_before = self.is_of_the_modern_era = self.names_requests = False
        for slot in self.slots(lambda _: True):
            if slot.clients.is_sessionless or not slot.clients.is_one_client:
                self._background.run("the change of a child", self._change(slot))

    async def _change(self, slot: Slot) -> None:
        if slot.starting is not None:
            await asyncio.wait({slot.starting})
        calls, child = set(slot.calls), slot.vacate()
        if child not in self._living:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.server.child_idle):
                while True:
                    if not calls & slot.calls.keys():
                        break
                    await asyncio.sleep(LOOKS)
        await self._stop(child)
