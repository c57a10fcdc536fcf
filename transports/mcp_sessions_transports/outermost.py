"""Find the application that the HTTP server called for a connection: the outermost one.

A WebSocket must pass the layers before the endpoint for HTTP (WSS18), and most middleware does not
check WebSockets. A page may come in if CORS before the endpoint allows it. Only the outermost
application has all these layers.

There is no better way than the call stack: whoever wraps an application gives it a scope, and
neither the server nor the wrapper writes into it who was called. ``scope["app"]`` is the innermost
Starlette. A mark in the scope names the first application of ours, and the guard is around that.
So this module searches the applications that are being called now, for this very request.
``application=`` of ``asgi_app()`` and ``routes()`` replaces the search.

Some applications cannot be called a second time that way (a nested function). This module does not
guess: an application that is not the outermost one admits no WebSocket.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from starlette.types import ASGIApp, Scope

_ALLOW_ALL = (
    "daphne",
    "granian",
    "hypercorn",
    "mcp_sessions",
    "mcp_sessions_transports",
    "starlette.testclient",
    "uvicorn",
)
"""Servers, and this project. Wrappers that these add to an application refuse no request."""


OF_THE_SERVER = (
    "asgi",
    "http_version",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)
"""Keys that a server adds to a scope.

Every other key comes from the way of a request, and is set again on the way of one that follows it.
"""


@dataclass(frozen=True, slots=True)
class Outermost:
    app: ASGIApp | None
    """None: it cannot be called from here."""

    scope: Scope
    """The scope that it was called with."""

    described: str
    """For the log."""


def outermost() -> Outermost | None:
    """The outermost application that is serving the WebSocket connection of the caller; None:
    there is none but ours.
    """
    return next(reversed([*around("websocket")]), None)


def around(kind: str) -> Iterator[Outermost]:
    """The applications that are serving the request of the caller, inside out, without ours.

    Args:
        kind: Of its scope.
    """
    for frame, scope in _serving(kind):
        module = str(frame.f_globals.get("__name__"))
        if not f"{module}.".startswith(tuple(f"{name}." for name in _ALLOW_ALL)):
            yield Outermost(_called(frame), scope, f"{module}.{frame.f_code.co_qualname}")


def _serving(kind: str) -> Iterator[tuple[FrameType, Scope]]:
    """The calls that were given this request's scope, inside out. An ``await`` is a call as any.
    A server makes the scope, and gets none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        given = inspect.getargvalues(frame)
        values = [given.locals.get(name) for name in given.args]
        if given.varargs is not None:
            values.extend(given.locals.get(given.varargs, ()))
        scope = next(filter(None, (_scope(value, kind) for value in values)), None)
        if scope is not None:
            yield frame, scope
        frame = frame.f_back


def _scope(value: object, kind: str) -> Scope | None:
    if not isinstance(value, dict):
        return None
    members = cast("Scope", value)
    return members if members.get("type") == kind and "path" in members else None


def _called(frame: FrameType) -> ASGIApp | None:
    """Return the called application if it can be found again: an object, a method, a function."""
    code = frame.f_code
    candidates: list[Callable[..., Any] | None] = [frame.f_globals.get(code.co_name)]
    if code.co_argcount:
        owner: Any = frame.f_locals.get(code.co_varnames[0])
        if getattr(type(owner).__call__, "__code__", None) is code:
            return _application(owner)
        candidates.append(getattr(owner, code.co_name, None))
    for candidate in candidates:
        if getattr(candidate, "__code__", None) is code:
            return _application(candidate)
    return None


def _application(called: Any) -> ASGIApp | None:
    """Return what takes the arguments of an application. A part of a server takes others."""
    try:
        inspect.signature(called).bind(None, None, None)
    except (TypeError, ValueError):
        return None
    return cast("ASGIApp", called)
