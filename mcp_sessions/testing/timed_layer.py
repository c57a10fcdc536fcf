from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcp_sessions.layer import SessionLayer


class ClockedLayer(SessionLayer):
    """A :class:`~mcp_sessions.layer.SessionLayer` that reads a test's clock.

    Never let it use a store that others use: whose clock is ahead ends everybody's sessions.
    """

    def __init__(self, server: Any, *, clock: Callable[[], float], **options: Any) -> None:
        """Wrap a server.

        Args:
            clock: Seconds since 1970.
            options: Those of a ``SessionLayer``.
        """
        self._clock = clock
        super().__init__(server, **options)
