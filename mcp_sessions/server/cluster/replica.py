"""Reach the other processes that serve the same sessions.

A process always has a bus. The bus of a process with a shared store is in
:mod:`mcp_sessions.server.cluster.shared_bus`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from mcp_sessions.background import Background
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.core.recent import RecentCounts
from mcp_sessions.ids import Position, SessionId, StreamName, digest
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.cluster.replica_messages import ReplicaMessage
from mcp_sessions.server.reporting.stories import Stories
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Attachment


class Watcher(Protocol):
    def appended(
        self, session_id: SessionId, event: LoggedEvent, attachment: Attachment | None
    ) -> None:
        """Take an event that was stored, by any process."""
        ...

    def check_position(self, session_id: SessionId, head: Position | None) -> None:
        """Check whether an event was missed, up to ``head``; None: read again."""
        ...


class Handlers(Protocol):
    def handle(self, sender: str, message: ReplicaMessage) -> Coroutine[Any, Any, None] | None:
        """Handle a message. Return the work that has to wait, which runs as a task."""
        ...

    def missed(self) -> Coroutine[Any, Any, None] | None:
        """Messages may be lost. Return the work that has to wait, as :meth:`handle` does."""
        ...

    async def session_ended(self, session_id: SessionId) -> None: ...

    def round(
        self, carrying: Collection[SessionId]
    ) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        """The steps of one round: each finds in the store what no message brought.

        Args:
            carrying: Connections that carry sessions, of those that are watched here.
        """
        ...


class ClusterBus:
    """The processes that serve the same sessions. This one has its store alone: nobody is notified,
    and a stored event is delivered here.
    """

    is_shared = False
    """Whether there may be others."""

    def __init__(self, process: str) -> None:
        self.process = process
        self._background = Background()

    def is_remote(self, process: str | None) -> TypeGuard[str]:
        """Whether a name is that of another process, alive or not. None is no process."""
        return False

    async def try_send(self, message: ReplicaMessage, *, to: str | None = None) -> None:
        """Send a message to one process, or to all others. A failure is logged."""

    async def send(self, message: ReplicaMessage, *, to: str | None = None) -> bool:
        """Send as :meth:`try_send`, for a caller that has to know whether it was sent.

        Returns:
            See :meth:`~mcp_sessions.stores.exchange.Exchange.send`.

        Raises:
            StoreUnavailable: Unknown whether it was sent.
        """
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that a message asks for. A failure is logged."""
        return self._background.run("a message of another replica", work)

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of its maker when this process leaves."""
        self._background.hold(task)

    async def watch(self, session_id: SessionId, stream: StreamName, watcher: Watcher) -> None:
        """Receive what others append to a stream from now on.

        Raises:
            StoreUnavailable: It is not watched.
        """

    async def unwatch(
        self, session_id: SessionId, stream: StreamName, watcher: Watcher
    ) -> None: ...

    async def is_alive(self, process: str) -> bool:
        """Whether a process lives; the answer may be a second old. Another one that had this
        store before is gone.

        Raises:
            StoreUnavailable: Unknown.
        """
        return process == self.process

    async def join(self, handlers: Handlers) -> None:
        """Join the processes, and handle their messages.

        Raises:
            StoreUnavailable: It is not.
        """

    async def leave(self) -> None:
        """Leave the processes: they take over at once what they would wait for."""

    async def close(self) -> None:
        await self.leave()
        await self._background.close()

    async def run(self) -> None:
        """Repair for ever what lost messages did not bring."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Replica:
    """One of several processes that share a store, or the only one.

    Args:
        clock: Seconds since 1970.
    """

    store: SessionStore
    bus: ClusterBus
    policy: SessionPolicy
    clock: Callable[[], float]
    stories: Stories
    strangers: RecentCounts = field(default_factory=lambda: RecentCounts(digest))
    """Digests of sessions that are not there, and that requests name."""

    refused: RecentCounts = field(default_factory=RecentCounts)
    """Callers whose requests a limit refused."""

    @property
    def process(self) -> str:
        return self.bus.process
