"""How processes that share a store reach each other: messages, events as they are stored, who is
alive, and which of them has what a session keeps in one process. A store of one process has none.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from mcp_sessions.background import Background
from mcp_sessions.core.log import LoggedEvent
from mcp_sessions.ids import SessionId, StreamName
from mcp_sessions.stores.records import Attachment

logger = logging.getLogger(__name__)

LIVENESS = 9.0
"""Seconds after which a process that gave no sign of life is taken for dead. Whoever waits for it
learns that within 10 s."""

BEAT = LIVENESS / 4
"""Seconds between two signs of life."""


class ExchangeListener(Protocol):
    """Receives the messages of the other processes that share the store.

    Its methods are called in the event loop. They must not block.
    """

    def on_message(self, message: bytes) -> None:
        """Take a message of another process."""
        ...

    def on_event(
        self,
        session_id: SessionId,
        stream: StreamName,
        event: LoggedEvent,
        attachment: Attachment | None,
    ) -> None:
        """An event was appended to a watched stream, by whichever process, this one too.

        Args:
            attachment: The attachment in the same step (:class:`Appended`). A connection that was
                displaced meanwhile does not send the event.
        """
        ...

    def on_gap(self) -> None:
        """Read again whatever is watched: messages may have been lost."""
        ...


class Exchange(Protocol):
    """How the processes that share a store reach each other.

    Every message arrives at most once, and may be lost: whoever reads a stream notices by
    its position and reads the store. Every method may raise
    :class:`~mcp_sessions.errors.StoreUnavailable`.
    """

    async def join(self, process: str, listener: ExchangeListener) -> None:
        """Begin to receive, and to be alive for the others. Called once, after ``open``."""
        ...

    async def leave(self) -> None:
        """Be alive no more; the others see it at once."""
        ...

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        """Send to one process, or to all others (None).

        Returns:
            Whether a process may have received it. False: no process listens, so the message has no
            effect. This shows that a process died, before :meth:`is_alive` does.
        """
        ...

    async def watch(self, session_id: SessionId, stream: StreamName) -> None:
        """Receive the events that are appended to a stream from now on.

        Every event that is appended after this returns arrives. Watching it twice is watching it
        once.
        """
        ...

    async def unwatch(self, session_id: SessionId, stream: StreamName) -> None:
        """Hear of a stream no more."""
        ...

    async def claim(
        self, session_id: SessionId, holder: str | None, *, instead_of: str | None = None
    ) -> str | None:
        """Claim a session's state that only one process keeps. One atomic step.

        The first claim wins, until another one replaces it or the session ends.

        Args:
            holder: The claimant's name, never used before; a holder of that name still has it.
                None: no claim, just look.
            instead_of: A former holder, which loses it if it still has it.

        Returns:
            The holder now; None: there is none, or the session does not exist.
        """
        ...

    async def is_alive(self, process: str) -> bool:
        """Whether that process joined and neither left nor died; a process that died is
        noticed within ``LIVENESS`` seconds.
        """
        ...


@dataclass(eq=False, repr=False)
class JoinedProcess(ABC):
    """The part that is the same in every :class:`Exchange`: signs of life, and what the listener
    gets to know of failures.
    """

    _process: str = field(init=False, default="")
    _listener: ExchangeListener | None = field(init=False, default=None)
    _background: Background = field(init=False, default_factory=Background)
    _unsettled_at: float = field(init=False, default=-math.inf)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            await asyncio.sleep(BEAT)
            stood_still = loop.time() - begun - BEAT
            if stood_still > LIVENESS - BEAT:
                logger.warning(
                    "this process was blocked for %.0f s: other replicas may have taken over its "
                    "sessions", stood_still,
                )  # fmt: skip
            await self._sign()

    @abstractmethod
    async def _sign(self) -> None:
        """Give a sign of life, and look whether the connection has its other end."""

    def _unsettle(self) -> None:
        self._unsettled_at = asyncio.get_running_loop().time()

    def _may_live(self) -> bool:
        """Whether a process may live that gave no sign: while the server was away nobody could, and
        signs may have been lost with it.
        """
        return asyncio.get_running_loop().time() - self._unsettled_at < LIVENESS

    def _report_gap(self) -> None:
        if self._listener is None:
            return
        # The connection must survive what a listener does wrong.
        try:
            self._listener.on_gap()
        except Exception:
            logger.exception("a gap could not be handled")
