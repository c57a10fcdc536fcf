"""Log a line for each request and each WebSocket, at its end.

The path is logged without its query, which may hold a code of OAuth. A part of the path that may be
an id or a token is logged as its digest. No header is logged. The HTTP method and the MCP method
are logged if their protocol has them: a client chooses any other text. A session is its digest. A
stream ends with its response: its line says how long it was open.
"""

from __future__ import annotations

import logging
import re
import time
from http import HTTPMethod
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sessions.core.addresses import text_of_address
from mcp_sessions.core.message import read
from mcp_sessions.core.messages import Notification, decode, members_of
from mcp_sessions.ids import digest
from mcp_sessions.server.reporting.loggable import loggable_method

logger = logging.getLogger("mcp_sessions.access")

_PATH = 200
"""Bytes of a path that are logged: who asks chooses it."""

_MAY_BE_SECRET = re.compile(r"(?=[^/]*[^/a-z._-])[^/]{16,}")
"""A part of a path that is long and is not words: an id or a token. A client may send either to a
path that nothing serves, and a server may have a path that is a secret."""

_METHODS = frozenset(HTTPMethod)

_READ = 262_144
"""Bytes of a body in which a method is looked for. The method of a longer one is not logged."""

_ANSWER = "an answer"
"""In place of a method, if a client answers what it was asked."""

_SESSION_HEADER = b"mcp-session-id"


class AccessLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        seen = _Seen(scope)
        if scope["type"] == "http" and scope["method"] == "POST":
            receive = seen.receiving(receive)
        try:
            await self._app(scope, receive, seen.sending(send))
        except Exception:
            # The server that runs us answers so.
            seen.failed()
            raise
        finally:
            seen.log()


class _Seen:
    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._begun = time.monotonic()
        self._body: list[bytes] = []
        self._size = 0
        self._opened: str | None = None
        """The transport-mode session that the answer names."""

        self._status = 0

    def receiving(self, receive: Receive) -> Receive:
        async def received() -> Message:
            message = await receive()
            body: bytes = message.get("body", b"")
            self._size += len(body)
            if self._size <= _READ:
                self._body.append(body)
            else:
                self._body.clear()
            return message

        return received

    def sending(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                self._status = message["status"]
                self._opened = _header(message.get("headers", ()), _SESSION_HEADER)
            elif message["type"] == "websocket.accept":
                self._status = 101
            await send(message)

        return sending

    def failed(self) -> None:
        self._status = self._status or 500

    def log(self) -> None:
        scope = self._scope
        milliseconds = (time.monotonic() - self._begun) * 1000
        client = text_of_address(scope) or "-"
        kind = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
        if scope["type"] == "http" and kind not in _METHODS:
            kind = "-"
        # As it was sent: what is not printable in a path is encoded there.
        sent = (scope.get("raw_path") or b"").partition(b"?")[0].decode("latin-1")
        path = _MAY_BE_SECRET.sub(lambda part: digest(part[0]), sent)[:_PATH]
        method, named = self._said()
        named = named or _header(scope["headers"], _SESSION_HEADER) or self._opened
        session = digest(named) if named is not None else None
        logger.info(
            "%s %s %s %s %s session %s %.0f ms",
            client,
            kind,
            path,
            self._status or "-",
            method or "-",
            session or "-",
            milliseconds,
            extra={
                "client": client,
                "method": kind,
                "path": path,
                "status": self._status or None,
                "mcp.method.name": method,
                "mcp_sessions.session": session,
                "milliseconds": round(milliseconds, 1),
            },
        )

    def _said(self) -> tuple[str | None, str | None]:
        try:
            value = decode(b"".join(self._body))
        except ValueError:
            return None, None
        members = members_of(value)
        method, params = members.get("method"), members.get("params")
        if not isinstance(method, str):
            return (_ANSWER if "result" in members or "error" in members else None), None
        # It may be refused as malformed, and is logged all the same.
        about = read(Notification(method, members_of(params))).about
        return loggable_method(method), about


def _header(headers: Any, name: bytes) -> str | None:
    return next((value.decode("latin-1") for each, value in headers if each.lower() == name), None)
