from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NotFound:
    """An application that answers 404, and refuses a WebSocket.

    A client that ends a path with a slash, or leaves one out, is redirected to the route. It stays
    at the scheme and the host that it used: a proxy that ends TLS does not always pass them on.

    Args:
        paths: The paths of the endpoints, without the path under which their application is
            mounted.
        routes: Those of the router whose default this is. It redirects nothing itself.
    """

    _paths: Sequence[str]
    _routes: Sequence[BaseRoute]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        root = scope.get("root_path", "")
        paths = ", ".join(f"{root}{path}" for path in self._paths)
        text = f"Not Found. This server speaks MCP at {paths}\n"
        answer: Response = PlainTextResponse(text, status_code=404)
        other = other_end(scope["path"])
        there = {**scope, "path": other}
        # What begins with two slashes is the address of another host.
        if other.strip("/") and not other.startswith("//"):
            if any(route.matches(there)[0] is not Match.NONE for route in self._routes):
                query = scope.get("query_string", b"").decode("latin-1")
                answer = RedirectResponse(f"{other}?{query}" if query else other)
        await answer(scope, receive, send)


def other_end(path: str) -> str:
    """Return a path with a slash at its end, or without one."""
    return path.rstrip("/") if path.endswith("/") else f"{path}/"
