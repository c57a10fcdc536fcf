"""A line for each request and each WebSocket, when it is over.

The path is logged without its query, which may hold a code of OAuth; no header is logged. A
stream is over when its response is: its line says how long it was open.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("mcp_sessions.access")

_PATH = 200
"""Bytes of a path that are logged: who asks chooses it."""


class AccessLog:
    """An application, and the log of what it was asked.

    Args:
        app: Serves.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or connection, and log it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            # The server that runs us answers so.
            status = status or 500
            raise
        finally:
            _log(scope, status, time.monotonic() - begun)


def _log(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client") or ("-", 0)
    kind = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
    # As it was sent: what is not printable in a path is encoded there.
    path = (scope.get("raw_path") or b"").partition(b"?")[0][:_PATH].decode("latin-1")
    logger.info(
        "%s %s %s %s %.0f ms",
        client[0],
        kind,
        path,
        status or "-",
        seconds * 1000,
        extra={
            "client": client[0],
            "method": kind,
            "path": path,
            "status": status or None,
            "milliseconds": round(seconds * 1000, 1),
        },
    )
