from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NotFound:
    """An application that answers 404, and refuses a WebSocket.

    Args:
        paths: The paths of the endpoints, without the path under which their application is
            mounted.
    """

    _paths: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        root = scope.get("root_path", "")
        paths = ", ".join(f"{root}{path}" for path in self._paths)
        text = f"Not Found. This server speaks MCP at {paths}\n"
        await PlainTextResponse(text, status_code=404)(scope, receive, send)
