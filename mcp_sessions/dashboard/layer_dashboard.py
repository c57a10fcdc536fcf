"""The page of a layer: its store, its own process, and the replicas that it can ask."""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_sessions.assembly import Assembly
from mcp_sessions.core.availability import Availability
from mcp_sessions.dashboard.access_control import (
    Allows,
    application_guard,
    guarded,
    loopback_guard,
    operator_guard,
)
from mcp_sessions.dashboard.application import Dashboard
from mcp_sessions.dashboard.snapshots import Snapshots
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.ids import SessionId
from mcp_sessions.server.dispatch.admin import Sessions, ended_outside
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.operator import SharedStore


def dashboard_of(parts: Assembly, allows: Allows | None, *, actions: bool) -> ASGIApp:
    """Return the page of a layer, behind its guard.

    Raises:
        ConfigurationError: See :meth:`~mcp_sessions.layer.SessionLayer.dashboard`.
    """
    if not parts.remembers:
        raise ConfigurationError("the page needs a store: make the layer with one")
    snapshots = Snapshots(
        StoreOfLayer(parts.store, parts.sessions),
        parts.fleet,
        policy=parts.policy,
        clock=parts.clock,
        is_leaving=lambda: parts.availability.is_leaving,
    )
    title = f"{parts.shell.name}, {getattr(parts.store, 'inner', parts.store).name} store"
    app = Running(Dashboard(snapshots, title=title, actions=actions).app(), parts.availability)
    if allows is not None:
        return guarded(app, application_guard(allows))
    if parts.authentication is None and parts.shell.authenticates:
        raise ConfigurationError(
            "the server has authentication of its own, so the page needs auth="
        )
    if parts.authentication is None:
        return guarded(app, loopback_guard)
    return guarded(app, operator_guard(parts.authentication, parts.denied))


class StoreOfLayer(SharedStore):
    """Ends sessions as the layer does, so that what runs for one ends as well."""

    def __init__(self, store: SessionStore, sessions: Sessions) -> None:
        # What is sealed stays so: the page shows sizes.
        super().__init__(getattr(store, "inner", store), ended_outside)
        self._sessions = sessions

    async def end(self, session_id: SessionId) -> bool:
        return await self._sessions.end(session_id)


class Running:
    """Serve while the layer runs."""

    def __init__(self, app: ASGIApp, availability: Availability) -> None:
        self._app, self._availability = app, availability

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._availability.is_running:
            answer = PlainTextResponse("The layer does not run.\n", 503)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)
