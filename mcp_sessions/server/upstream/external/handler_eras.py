"""Learn how the handlers of a server of both eras ask: in the middle of a call, or by a result.

Nothing shows that before a call, and no call is sent again. So it is learned from calls, for each
handler by itself (its method and its name). Rules, for clients that can be asked:

1. A handler that asked in the middle of a call stays in the handshake era.
2. A call in the handshake era may end in the server's error -32603. Servers of the SDK answer so to
   a result that asks. The handler's next call goes in the modern era, unless rule 1 holds for it.
3. A handler that asks by a result there stays in the modern era. After any other outcome its next
   call goes in the handshake era again.
4. A request with answers continues what a result asked, so it goes in the modern era.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, Literal

from mcp_sessions.core.named import NAMED, name_in
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.server.upstream.accepted_questions import INPUT_REQUIRED

_MOST: Final = 1_000
"""Handlers of each table, at most. Each takes the same few bytes."""


class HandlerEras:
    def __init__(self) -> None:
        self._ask: Recent[bytes, Literal["in calls", "by results"]] = Recent(_MOST)
        """How handlers were seen to ask."""

        self.doubtful: Recent[bytes, None] = Recent(_MOST)
        """Other handlers, whose last call failed in the handshake era."""

    def is_modern(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Whether a request goes in the modern era."""
        if params is None or method not in NAMED:
            return False
        if "inputResponses" in params or "requestState" in params:
            return True
        if not (self._ask or self.doubtful):
            return False
        handler = _handler(method, params)
        return handler is not None and (
            handler in self.doubtful or self._ask.get(handler) == "by results"
        )

    def ended(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        is_modern: bool,
        has_asked: bool,
        code: object,
        kind: object,
    ) -> None:
        """Learn from the end of a call.

        Args:
            is_modern: Whether it went in the modern era.
            has_asked: Whether it asked before its end.
            code: The code of the server's own error. None: there was none.
            kind: The result's ``resultType``.
        """
        handler = _handler(method, params)
        if handler is None:
            return
        self.doubtful.pop(handler, None)
        if is_modern:
            if kind == INPUT_REQUIRED:
                self._ask.keep(handler, "by results")
        elif has_asked:
            self._ask.keep(handler, "in calls")
        elif code == INTERNAL_ERROR and handler not in self._ask:
            self.doubtful.keep(handler, None)


def _handler(method: str, params: Mapping[str, Any] | None) -> bytes | None:
    """Return a key of the same size for each handler. None: its results do not ask."""
    name = name_in(method, params)
    if name is None:
        return None
    return sha256(f"{method} {name}".encode("utf-8", "surrogatepass")).digest()
