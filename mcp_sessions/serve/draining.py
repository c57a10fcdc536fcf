"""Stop a layer: ask its clients to reconnect, let running requests finish, release everything."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

from mcp_sessions.background import stopped
from mcp_sessions.core.availability import Availability
from mcp_sessions.core.story import Why
from mcp_sessions.errors import Detached, StoreRefused, StoreUnavailable
from mcp_sessions.serve.endpoint import Endpoint
from mcp_sessions.server.cluster.child_host import ChildHost
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.upstream.port import Upstream
from mcp_sessions_transports.duplex_transport import DuplexTransport
from mcp_sessions_transports.http.channel import http_transport
from mcp_sessions_transports.http.endpoint import Arrivals

logger = logging.getLogger(__name__)

_ARRIVING = 5.0
"""Seconds in which a request that came before is authenticated, read and looked up. A client that
never ends its body delays nothing longer.
"""

_AT_ONCE = 64
"""Clients that are asked to reconnect at once. Each takes answers of the store."""

_LAST_WORDS = 2.0
"""Seconds that WebSockets and pipes have, at the end, to take what waits for them, and other
replicas to take what was withdrawn."""


class Draining:
    def __init__(
        self,
        replica: Replica,
        delivery: Delivery,
        runner: RequestRunner,
        *,
        endpoints: Sequence[Endpoint],
        availability: Availability,
        arrivals: Arrivals,
        upstream: Upstream,
        child_host: ChildHost | None,
    ) -> None:
        self._store, self._bus, self._policy = (
            replica.store,
            replica.bus,
            replica.policy,
        )
        self._delivery, self._connections = delivery, delivery.connections
        self._runner = runner
        self._endpoints = endpoints
        self.availability = availability
        self.arrivals = arrivals
        self._upstream = upstream
        self._child_host = child_host
        self._all_arrived = asyncio.Event()

    def announce(self) -> None:
        """Announce that the process is about to stop. It still serves everything."""
        self.availability.is_leaving = True

    def needs_listener(self) -> bool:
        """Whether a running call may wait for an answer of its client, which comes on a
        connection of its own and which no other process can take.
        """
        if self._bus.is_shared or not self._store.remembers:
            return False
        if self.arrivals.inside:
            return True
        inbounds = (waiter.inbound for running in self._runner.active for waiter in running.waiters)
        return any(isinstance(inbound.connection, StoredConnection) for inbound in inbounds)

    async def drain(self, grace: float) -> None:
        self.announce()
        is_first = self.availability.retry_after is None
        self.availability.retry_after = self._policy.reconnect_spread
        self.arrivals.close(self._all_arrived.set)
        if is_first:
            await self._notify_everyone()
        host = self._child_host
        until = asyncio.get_running_loop().time() + grace
        arriving = asyncio.create_task(self._arriving(min(grace, _ARRIVING)))
        running = asyncio.create_task(self._runner.drain(grace, arriving))
        tasks: list[asyncio.Task[Any]] = [running]
        if host is not None:
            tasks.append(asyncio.create_task(host.drain(grace, running)))
        try:
            # As long as something runs it may need a child that is not there yet.
            await asyncio.wait(tasks, timeout=grace)
            await self._upstream.leave(max(0, until - asyncio.get_running_loop().time()))
            await asyncio.gather(*tasks)
        finally:
            await stopped(arriving, *tasks)
        left = running.result()
        if host is not None:
            await host.hand_over()
        await self._delivery.remote_questions.settle(_LAST_WORDS)
        # Not before: until then it answers what others wait for.
        await self._bus.leave()
        if left:
            logger.warning("%d requests were cancelled at shutdown", left)
        closing: list[asyncio.Task[Any]] = []
        for connection in self._connections.all():
            connection.transport.close()
            if isinstance(connection.transport, DuplexTransport):
                closing.append(asyncio.create_task(connection.transport.closed.wait()))
        if closing:
            # The server that runs us closes every WebSocket next, whatever waits there.
            await asyncio.wait(closing, timeout=_LAST_WORDS)
            for task in closing:
                task.cancel()

    async def _arriving(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._all_arrived.wait()
        except TimeoutError:
            self.arrivals.give_up()

    async def _notify_everyone(self) -> None:
        """Ask clients to reconnect. A store that is away delays neither that nor running calls."""
        is_away, connections = False, self._connections.all()
        for start in range(0, len(connections), _AT_ONCE):
            some = connections[start : start + _AT_ONCE]
            notified = (self._notify(connection, is_away=is_away) for connection in some)
            was_away, is_away = is_away, any(await asyncio.gather(*notified))
            if is_away and not was_away:
                logger.warning("the store is away: some clients were not asked to reconnect")

    async def _notify(self, connection: ClientConnection, *, is_away: bool) -> bool:
        transport = connection.transport
        if isinstance(transport, DuplexTransport) and not connection.knows_extension:
            # It is sent nothing, and knows no refusal of this kind (ERR15).
            transport.close_when_quiet()
            return is_away
        return await self._notify_draining(connection, is_away=is_away)

    async def _notify_draining(self, connection: ClientConnection, *, is_away: bool) -> bool:
        """Notify one client. Return whether the store is away.

        Args:
            is_away: It was, and is not asked: only what is known here is sent.
        """
        spread = self._policy.reconnect_spread
        sessions = list(connection.attached)
        if isinstance(connection, StoredConnection):
            if self._bus.is_shared and not connection.is_streaming:
                # Other replicas serve it on, and nothing here is in its way.
                return is_away
            # Stock clients, too, come back one by one. Alone, this process needs a moment to
            # be there again, and some of them give up for ever when they find nobody twice.
            least = 0.1 if self._bus.is_shared else 0.5
            http_transport(connection).come_back_after(random.uniform(least, 1) * spread)
            if not is_away:
                try:
                    record = await self._store.load(connection.session_id, now=0)
                    sessions.extend(record.client.carried if record is not None else ())
                except StoreUnavailable as failed:
                    # One that cannot be read, perhaps, is no store that is away.
                    is_away = not isinstance(failed, StoreRefused)
        for session_id in sessions:
            await connection.notify_detached(session_id, Detached.DRAINING, retry_after=spread)
        return is_away

    async def stop(self) -> None:
        """Drain without grace, and close every connection. The sessions stay in the store."""
        try:
            await self.drain(grace=0)
            for endpoint in self._endpoints:
                await endpoint.handshake.close()
            for connection in self._connections.all():
                if isinstance(connection, StoredConnection):
                    # It is in the store, and goes on there with what is attached to it.
                    await self._connections.release(connection)
                else:
                    await self._delivery.attachments.remove(connection, why=Why.DRAINING)
        except StoreUnavailable:
            # Others find out that the stored connections of this process are dead.
            logger.warning("the store is away while the server stops")
        finally:
            await self._delivery.questions.close()
            await self._delivery.pending_writes.close()
            await self._bus.close()
