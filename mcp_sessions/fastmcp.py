"""``resumable(…)`` for FastMCP's ``Client``; ``session_state()`` and ``elicit()`` for its server.

::

    from fastmcp import Client, FastMCP
    from mcp_sessions.fastmcp import resumable, session_state

    async with Client(resumable("https://host/mcp")) as client: ...

    mcp = FastMCP("notes", session_state_store=session_state())  # to be wrapped

The one module that needs FastMCP: ``pip install mcp-sessions[fastmcp]``. (`SessionLayer`
takes a FastMCP server as it is.)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ParamSpec, SupportsFloat, Unpack

from fastmcp.client.transports.base import ClientTransport, SessionKwargs, TransportOptions
from fastmcp.server.context import Context
from fastmcp.server.dependencies import get_context
from fastmcp.server.elicitation import (
    AcceptedElicitation,
    CancelledElicitation,
    DeclinedElicitation,
    handle_elicit_accept,
    parse_elicit_response_type,
)
from key_value.aio.protocols import AsyncKeyValue
from key_value.aio.stores.memory import MemoryStore
from mcp import ClientSession
from mcp.shared.exceptions import NoBackChannelError

from mcp_sessions import client_transport
from mcp_sessions.client.jar import OpenCall
from mcp_sessions.client.reports import KnownSession, ResumeOutcome
from mcp_sessions.client.sdk import ResumableTransport
from mcp_sessions.errors import DataConflict
from mcp_sessions.server.requests.handle import SessionHandle, current_session

_Options = ParamSpec("_Options")


class ResumableClientTransport(ClientTransport):
    """A FastMCP transport; `resumable` makes it."""

    def __init__(self, transport: ResumableTransport) -> None:
        self._transport = transport

    @asynccontextmanager
    async def connect_session(
        self,
        *,
        transport_options: TransportOptions | None = None,
        **session_kwargs: Unpack[SessionKwargs],
    ) -> AsyncGenerator[ClientSession]:
        options = transport_options or TransportOptions()
        async with (
            self._transport as (read, write),
            options.session_class(read, write, **session_kwargs) as session,
        ):
            yield session

    @property
    def session(self) -> KnownSession | None:
        """Return the session that this transport knows, like `ResumableTransport.session`."""
        return self._transport.session

    @property
    def open_calls(self) -> tuple[OpenCall, ...]:
        """Return the calls that wait for answers, like `ResumableTransport.open_calls`."""
        return self._transport.open_calls

    async def move_to(self, url: str) -> ResumeOutcome:
        """Move to another URL, like `ResumableTransport.move_to`."""
        return await self._transport.move_to(url)


def _for_fastmcp(
    make: Callable[_Options, ResumableTransport],
) -> Callable[_Options, ResumableClientTransport]:
    @wraps(make)
    def made(*args: _Options.args, **options: _Options.kwargs) -> ResumableClientTransport:
        return ResumableClientTransport(make(*args, **options))

    return made


resumable = _for_fastmcp(client_transport.resumable)
"""As `mcp_sessions.resumable`, for FastMCP's ``Client``."""


def session_state(fallback: AsyncKeyValue | None = None) -> AsyncKeyValue:
    """Make the store for ``FastMCP(session_state_store=…)``.

    The layer's session then keeps the values of ``ctx.set_state``, and the session's view of the
    components. They are in the session's ``data``, as long as it lives, on every replica, also in
    the 2026 era.

    Args:
        fallback: Keeps the values that belong to no session of the layer's: those of a request
            without a session, and those that FastMCP keeps for a user or under its own id. None:
            this process keeps them.
    """
    return _SessionState(fallback if fallback is not None else MemoryStore())


async def elicit(
    context: Context,
    message: str,
    response_type: Any,
    *,
    response_title: str | None = None,
    response_description: str | None = None,
) -> AcceptedElicitation[Any] | DeclinedElicitation | CancelledElicitation:
    """Ask the client's user, like ``ctx.elicit``, for clients of both eras.

    FastMCP refuses ``ctx.elicit`` for a client of 2026-07-28 by its protocol version. This function
    asks through ``ctx.session``, if the layer can ask the client. Otherwise it is ``ctx.elicit``.

    Args:
        context: The tool's context.
        message: The question.
        response_type: See ``ctx.elicit``.
        response_title: See ``ctx.elicit``.
        response_description: See ``ctx.elicit``.

    Raises:
        ToolError: The client cannot be asked.
    """
    labels = {"response_title": response_title, "response_description": response_description}
    session = context.session
    if context.is_background_task or not session.can_send_request:
        return await context.elicit(message, response_type, **labels)
    config = parse_elicit_response_type(response_type, **labels)
    request_id = context.request_id
    try:
        result = await session.elicit_form(message, config.schema, related_request_id=request_id)
    except NoBackChannelError:
        # Its client declared another capability only. FastMCP has the error for that.
        return await context.elicit(message, response_type, **labels)
    match result.action:
        case "accept":
            return handle_elicit_accept(config, result.content)
        case "decline":
            return DeclinedElicitation()
        case "cancel":
            return CancelledElicitation()


_MEMBER = "fastmcp"
"""The key in a session's ``data``."""

_ATTEMPTS = 20
"""Attempts to change a session's data while other replicas change it, too."""


class _SessionState(AsyncKeyValue):
    def __init__(self, fallback: AsyncKeyValue) -> None:
        self._fallback = fallback

    async def get(self, key: str, *, collection: str | None = None) -> dict[str, Any] | None:
        session_key = _session_key(key)
        if session_key is None:
            return await self._fallback.get(key, collection=collection)
        session, name = session_key
        return (await session.data.read()).get(_MEMBER, {}).get(name)

    async def ttl(
        self, key: str, *, collection: str | None = None
    ) -> tuple[dict[str, Any] | None, float | None]:
        if _session_key(key) is None:
            return await self._fallback.ttl(key, collection=collection)
        # It goes with its session.
        return await self.get(key), None

    async def put(
        self,
        key: str,
        value: Mapping[str, Any],
        *,
        collection: str | None = None,
        ttl: SupportsFloat | None = None,
    ) -> None:
        session_key = _session_key(key)
        if session_key is None:
            await self._fallback.put(key, value, collection=collection, ttl=ttl)
        else:
            await _change(*session_key, dict(value))

    async def delete(self, key: str, *, collection: str | None = None) -> bool:
        session_key = _session_key(key)
        if session_key is None:
            return await self._fallback.delete(key, collection=collection)
        return await _change(*session_key, None)

    async def get_many(
        self, keys: Sequence[str], *, collection: str | None = None
    ) -> list[dict[str, Any] | None]:
        return [await self.get(key, collection=collection) for key in keys]

    async def ttl_many(
        self, keys: Sequence[str], *, collection: str | None = None
    ) -> list[tuple[dict[str, Any] | None, float | None]]:
        return [await self.ttl(key, collection=collection) for key in keys]

    async def put_many(
        self,
        keys: Sequence[str],
        values: Sequence[Mapping[str, Any]],
        *,
        collection: str | None = None,
        ttl: SupportsFloat | None = None,
    ) -> None:
        for key, value in zip(keys, values, strict=True):
            await self.put(key, value, collection=collection, ttl=ttl)

    async def delete_many(self, keys: Sequence[str], *, collection: str | None = None) -> int:
        return sum([await self.delete(key, collection=collection) for key in keys])


def _session_key(key: str) -> tuple[SessionHandle, str] | None:
    """The session that a key of FastMCP's is of, and its name there; None: of none of the layer's.

    FastMCP prefixes a key with what it takes for the session's id: for a request in the 2026 era
    one of its own, which is another for each.
    """
    session = current_session(default=None)
    try:
        prefix = f"{get_context().session_id}:"
    except RuntimeError:
        # A task of FastMCP's, outside of any request.
        return None
    if session is None or not key.startswith(prefix):
        return None
    return session, key.removeprefix(prefix)


async def _change(session: SessionHandle, name: str, value: dict[str, Any] | None) -> bool:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            async with session.data.edit() as data:
                kept: dict[str, Any] = data.setdefault(_MEMBER, {})
                was_there = kept.pop(name, None) is not None
                if value is not None:
                    kept[name] = value
                return was_there
        except DataConflict:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")
