"""The children of sessions that other replicas have: what ``external/`` asks of them.

A session's child is in one process. Who has it is written down where all of them look, and is
looked at before each request; what takes longer than a lease lasts is looked at again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from mcp_sessions.ids import SessionId
from mcp_sessions.server.upstream.external.asks import Asks
from mcp_sessions.server.upstream.external.child import Sender
from mcp_sessions.server.upstream.port import Call, Wanted

Served = tuple[dict[str, Any], Mapping[str, Any]]
"""A result, and what the child that gave it answered to ``initialize``."""


class Moved(Exception):
    """The child is another process's by now. It was asked nothing."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Who has a session's child."""

    session_id: SessionId
    holder: str
    is_here: bool
    until: float
    """Seconds of the event loop's clock until which nobody else can have it."""

    inherited: Wanted | None
    """Another process had it, which is dead: what the session wants. None: none had."""


class Asked(NamedTuple):
    """What a child is asked, but for the call that it is."""

    client: Mapping[str, Any]
    """The params of ``initialize`` of one that is started for it."""

    method: str | None
    """None: it is started, if there is none, and asked nothing."""

    params: dict[str, Any] | None
    level: str | None
    """The least of a log message that goes there; None: none does."""

    asks: Asks | None = None
    """What a client of the modern era can be asked in results; None: it is of the era before."""

    @property
    def sender(self) -> Sender | None:
        """Who asks, of the modern era; None: the client, of the era before."""
        return Sender(self.client, self.level) if self.asks is not None else None


class Elsewhere(Protocol):
    """The processes that share a store."""

    @property
    def process(self) -> str:
        """This one."""
        ...

    async def lease(self, session_id: SessionId) -> Lease:
        """Who has that session's child: this process, if nobody who lives has it.

        Raises:
            UpstreamError: The session is over.
            StoreUnavailable: Unknown.
        """
        ...

    async def check(self, lease: Lease) -> None:
        """This process has it still.

        Raises:
            Moved: It has not.
            StoreUnavailable: Unknown.
        """
        ...

    async def ask(self, lease: Lease, call: Call, asked: Asked) -> Served:
        """Ask a child that another process has.

        Raises:
            Moved: See there.
            UpstreamError: The child's error; or -31012: nobody knows what became of it.
        """
        ...

    async def go_on(self, waiting: str, call: Call, asked: Asked) -> Served | None:
        """Go on with a call outside of sessions that waits for answers in another process; None:
        it waits in none.

        Args:
            waiting: Names it.

        Raises:
            UpstreamError: See :meth:`ask`.
        """
        ...

    async def notify(
        self, session_id: SessionId, method: str, params: dict[str, Any] | None
    ) -> bool:
        """Notify a child that another process has; False: none has it.

        Raises:
            StoreUnavailable: Unknown whether it was told.
        """
        ...

    def over(self, session_id: SessionId) -> None:
        """The session is over: its child is nobody's."""
        ...
