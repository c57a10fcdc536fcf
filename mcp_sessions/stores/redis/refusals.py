"""Explain a refusal of Redis in an operator's words, with the next step.

A server may quote the command that it got, and that may have an id. So only the kind of an error is
repeated.
"""

from __future__ import annotations

import socket
import ssl

from redis.exceptions import RedisError, ResponseError

from mcp_sessions.errors import StoreRefused, StoreUnavailable

_REFUSALS = {
    "OOM": "is full (maxmemory): it refuses writes. Raise maxmemory, or end sessions",
    "READONLY": "is a read-only replica: it refuses writes. Let --store name the primary",
    "MISCONF": "cannot save to its disk: it refuses writes. Look at that disk and at its log",
    "NOREPLICAS": (
        "has too few replicas (min-replicas-to-write): it refuses writes. Start the replicas"
    ),
    "NOPERM": "does not allow a command (ACL). Allow this user all commands and keys of sessions",
    "WRONGPASS": "refused the user name or the password. Look at both in the URL",
    "NOAUTH": "wants a password. Write one into the URL",
    "LOADING": "is loading its data. Wait until it is done",
    "BUSY": "is busy with a script. Wait, or end it with SCRIPT KILL",
    "MASTERDOWN": "is a replica without its primary. Start the primary",
    "CLUSTERDOWN": "is a cluster with a part that is down. Start its nodes",
    "WRONGTYPE": "holds a foreign value under a session's key. Delete the key",
    "ERR": "refused a command. A key may hold a foreign value: then delete the key",
}
"""The meaning of each error code. Each is read after "Redis at HOST:PORT"."""

_OF_A_VALUE = frozenset({"WRONGTYPE", "ERR"})
"""Refusals that may be about what is stored."""

_KINDS_FOR_CLIENTS = {
    "OOM": "full",
    "READONLY": "read-only",
    "NOPERM": "credentials",
    "WRONGPASS": "credentials",
    "NOAUTH": "credentials",
}
"""The words for clients."""

_BY_CLASS = {
    "AuthenticationError": "WRONGPASS",
    "AuthorizationError": "NOAUTH",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "ResponseError": "ERR",
}
"""redis-py leaves the server's word out of some errors, and has a class for each of them."""


def kind_of(refused: RedisError) -> str | None:
    word: object = getattr(refused, "status_code", None) or str(refused).partition(" ")[0]
    if isinstance(word, str) and word in _REFUSALS and word != "ERR":
        return word
    if "can't run this command" in str(refused) or "ACL failure" in str(refused):
        # So it says that a script may not do something.
        return "NOPERM"
    if str(refused).startswith("Authentication required"):
        # Some releases of redis-py have one class for this and for a wrong password.
        return "NOAUTH"
    named = _BY_CLASS.get(type(refused).__name__)
    if named is not None or not isinstance(refused, ResponseError):
        return named
    return word if isinstance(word, str) and word.isupper() and word.isalpha() else "ERR"


def url_of(connection: object) -> str:
    """The URL that a connection of redis-py was made from, without its secret and its options."""
    path: object = getattr(connection, "path", None)
    user: object = getattr(connection, "username", None)
    password: object = getattr(connection, "password", None)
    name = user if isinstance(user, str) else ""
    credentials = f"{name}:***@" if password else f"{name}@" if name else ""
    database: object = getattr(connection, "db", None) or 0
    if isinstance(path, str):
        return f"unix://{credentials}{path}" + (f"?db={database}" if database else "")
    scheme = "rediss" if "SSL" in type(connection).__name__ else "redis"
    host: object = getattr(connection, "host", "")
    return f"{scheme}://{credentials}{host}:{getattr(connection, 'port', '')}/{database}"


def unavailable(
    failed: BaseException,
    connection: object = None,
    *,
    connecting: bool = False,
    key: str | None = None,
) -> StoreUnavailable:
    """``failed`` as the store's error, which says where the server is and what to do.

    Args:
        connection: A connection of redis-py to that server.
        connecting: Nothing was sent but what makes a connection.
        key: The key that the command was about. It has a digest, and no id.
    """
    at = f" at {url_of(connection)}" if connection is not None else ""
    kind = kind_of(failed) if isinstance(failed, RedisError) else None
    if kind is not None:
        if connecting and kind == "ERR":
            said = "refused the connection. Look at the database and the options in the URL"
        else:
            said = _REFUSALS.get(kind, "refused a command")
        about = f" {key}" if key is not None and kind in _OF_A_VALUE else ""
        return StoreRefused(f"Redis{at} {said} [{kind}{about}]", _KINDS_FOR_CLIENTS.get(kind))
    reason = type(failed).__name__
    cause: BaseException | None = failed
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            # Its text names no id: it is about certificates and versions.
            why: object = getattr(cause, "verify_message", None) or cause.reason or "it failed"
            return StoreRefused(
                f"Redis{at} refused TLS: {why}. Look at the scheme (redis:// or rediss://) and at "
                "the certificates"
            )
        # redis-py makes an error of its own of what the system said.
        if isinstance(cause, OSError) and cause.strerror:
            # If there are several addresses, asyncio names all, each with its error.
            reason = f"{type(cause).__name__}: {cause.strerror}"
            if isinstance(cause, ConnectionRefusedError):
                reason += ". Nothing listens there: start it, or correct the URL"
            elif isinstance(cause, socket.gaierror):
                reason += ". Correct the host in the URL"
            break
        cause = cause.__cause__ or cause.__context__
    else:
        if connecting and "closed" in str(failed).lower():
            reason = (
                "it closed a new connection. It may want TLS: then the URL begins with rediss://"
            )
        elif connecting and "SSL" in type(connection).__name__:
            reason += ". It may speak no TLS: then the URL begins with redis://"
    return StoreUnavailable(f"Redis{_address_of(connection)} is away: {reason}")


def _address_of(connection: object) -> str:
    if connection is None:
        return ""
    path: object = getattr(connection, "path", None)
    if isinstance(path, str):
        return f" at {path}"
    return f" at {getattr(connection, 'host', '')}:{getattr(connection, 'port', '')}"
