"""One sending of a request, from its arrival until it is answered.

It holds values and where its answer goes. It knows no runner, no store and no table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp_sessions.core.load import load_of
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import NotNamed
from mcp_sessions.server.connection import Inbound


class Work(Protocol):
    """Runs a call, or waits for the process that does."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that does it; None: it ended."""
        ...

    def is_awaited_by(self, call: Call) -> bool:
        """Whether the answer is still to come, and the sender of a call listens for it."""
        ...

    async def abort(self, error: dict[str, Any]) -> None:
        """End it, with that error for each of its senders."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One sending of a request: where its answer is heard.

    Until it runs it can be cancelled. With it ends the newest call of the same id that still runs
    and that nobody listens to: as a rule that is the same request, which was sent again.
    """

    request: Message
    inbound: Inbound
    load: Hashable = None
    """The key under which the call counts; see :func:`~mcp_sessions.core.load.load_of`."""

    work: Work | None = field(init=False, default=None)
    """None: it does not run yet. Its session is looked up, say."""

    error: dict[str, Any] | None = field(init=False, default=None)
    """It was cancelled before it ran: as soon as it runs it ends."""

    is_over: bool = field(init=False, default=False)
    """It is answered, or was refused."""

    _before: Call | None = field(init=False, default=None)

    @property
    def named(self) -> bool:
        """It names its session by rule 1, so its result carries the session's ``_meta``."""
        return not isinstance(self.request.session, NotNamed)

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that runs it."""
        if self.work is not None:
            return self.work.task
        return self._before.task if self._before is not None else None

    @property
    def is_awaited(self) -> bool:
        """Whether its sender still listens for its answer."""
        return self.work is None or self.work.is_awaited_by(self)

    def begins(self, work: Work | None) -> None:
        """It runs, or joins what runs; None: it waits once more to begin."""
        self.work = work

    def ends(self) -> None:
        """It is over. It forgets its work, which knows its calls: both would wait for the
        collector.
        """
        self.is_over = True
        self.work = self._before = None

    def follows(self, before: Call) -> None:
        """A call with its id still runs, and nobody listens to it."""
        self._before = before

    async def abort(self, error: dict[str, Any]) -> None:
        """End it. A call that is refused, or answered at once, never runs."""
        if self.work is not None:
            await self.work.abort(error)
            return
        self.error = error
        if self._before is not None:
            await self._before.abort(error)


def arriving(request: Message, inbound: Inbound, *, is_ours: bool = False) -> Call:
    """A request comes in.

    Args:
        is_ours: The layer answers it at once: it is nobody's load.
    """
    if is_ours:
        return Call(request, inbound)
    if inbound.connection is not None:
        return Call(request, inbound, inbound.connection.id)
    named = request.session
    session_id = named if not isinstance(named, NotNamed) else None
    return Call(request, inbound, load_of(None, session_id, inbound.principal))
