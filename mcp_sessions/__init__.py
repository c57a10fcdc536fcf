"""Resumable sessions for the Model Context Protocol: the public names.

::

    from mcp_sessions import SessionLayer

    layer = SessionLayer(mcp)                     # MCPServer, lowlevel Server or FastMCP
    app = layer.asgi_app()                        # or: layer.run("http", port=8000)

    from mcp_sessions import resumable

    async with mcp.Client(resumable("https://host/mcp", "wss://host/mcp")) as client: ...

Versions count the names that this module exports (see CHANGELOG.md). All other names may move.
Inside the project nobody imports from here, but from the module that defines the name.

Each name is loaded when first asked for: the MCP SDK takes over a second to import,
and ``mcp-sessions --help``, or a program that needs an error class only, should not
wait for it.
"""

from __future__ import annotations

from importlib import import_module

# To import `typing` takes longer than all else here, and Ctrl+C may come meanwhile.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from mcp_sessions.client.jar import FileJar, OpenCall, OpenTask
    from mcp_sessions.client.reconnect_policy import ReconnectPolicy
    from mcp_sessions.client.reports import ConnectionLost, KnownSession, ResumeOutcome
    from mcp_sessions.client.sdk import ResumableTransport, is_outcome_unknown
    from mcp_sessions.client_transport import resumable
    from mcp_sessions.conversations import Conversations
    from mcp_sessions.errors import (
        ConfigurationError,
        DataConflict,
        LimitReached,
        SessionNotFound,
        SessionRequired,
        SessionsError,
        StateTooLarge,
        StoreUnavailable,
    )
    from mcp_sessions.external_server import HTTPServer, StdioServer
    from mcp_sessions.layer import SessionLayer
    from mcp_sessions.policy import SessionPolicy, TaskPolicy
    from mcp_sessions.principal import Principal
    from mcp_sessions.security import SessionSecurity
    from mcp_sessions.server.dispatch.admin import SessionInfo
    from mcp_sessions.server.requests.handle import SessionHandle, current_session
    from mcp_sessions.stores.postgres.postgres_store import PostgresStore
    from mcp_sessions.stores.redis.redis_store import RedisStore
    from mcp_sessions.stores.sqlite.sqlite_store import SQLiteStore

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "ConnectionLost",
    "Conversations",
    "DataConflict",
    "FileJar",
    "HTTPServer",
    "KnownSession",
    "LimitReached",
    "OpenCall",
    "OpenTask",
    "PostgresStore",
    "Principal",
    "ReconnectPolicy",
    "RedisStore",
    "ResumableTransport",
    "ResumeOutcome",
    "SQLiteStore",
    "SessionHandle",
    "SessionInfo",
    "SessionLayer",
    "SessionNotFound",
    "SessionPolicy",
    "SessionRequired",
    "SessionSecurity",
    "SessionsError",
    "StateTooLarge",
    "StdioServer",
    "StoreUnavailable",
    "TaskPolicy",
    "current_session",
    "is_outcome_unknown",
    "resumable",
]

# The same list as under TYPE_CHECKING, for run time; tests/house compares all three.
_DEFINED_IN = {
    "ConfigurationError": "mcp_sessions.errors",
    "Conversations": "mcp_sessions.conversations",
    "DataConflict": "mcp_sessions.errors",
    "FileJar": "mcp_sessions.client.jar",
    "HTTPServer": "mcp_sessions.external_server",
    "KnownSession": "mcp_sessions.client.reports",
    "LimitReached": "mcp_sessions.errors",
    "OpenCall": "mcp_sessions.client.jar",
    "OpenTask": "mcp_sessions.client.jar",
    "PostgresStore": "mcp_sessions.stores.postgres.postgres_store",
    "Principal": "mcp_sessions.principal",
    "ReconnectPolicy": "mcp_sessions.client.reconnect_policy",
    "RedisStore": "mcp_sessions.stores.redis.redis_store",
    "ResumableTransport": "mcp_sessions.client.sdk",
    "ConnectionLost": "mcp_sessions.client.reports",
    "ResumeOutcome": "mcp_sessions.client.reports",
    "SQLiteStore": "mcp_sessions.stores.sqlite.sqlite_store",
    "SessionHandle": "mcp_sessions.server.requests.handle",
    "SessionInfo": "mcp_sessions.server.dispatch.admin",
    "SessionLayer": "mcp_sessions.layer",
    "SessionNotFound": "mcp_sessions.errors",
    "SessionPolicy": "mcp_sessions.policy",
    "TaskPolicy": "mcp_sessions.policy",
    "SessionRequired": "mcp_sessions.errors",
    "SessionSecurity": "mcp_sessions.security",
    "SessionsError": "mcp_sessions.errors",
    "StateTooLarge": "mcp_sessions.errors",
    "StdioServer": "mcp_sessions.external_server",
    "StoreUnavailable": "mcp_sessions.errors",
    "current_session": "mcp_sessions.server.requests.handle",
    "is_outcome_unknown": "mcp_sessions.client.sdk",
    "resumable": "mcp_sessions.client_transport",
}


def __getattr__(name: str) -> object:
    module = _DEFINED_IN.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    # Kept, so that the next access is an ordinary one.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
