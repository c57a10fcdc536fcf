"""How a request of an application that manages its sessions goes out.

It goes out as it is, so that the server judges it as on any connection, but for two things. It
gets a request key if its session is followed, so that it survives the connection. And it names
the session that the application's connection gives it, where the connection to the server may
have another one: nothing (ASC4) where there is none, and its session when it is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from mcp_sessions import method_names
from mcp_sessions.client import rpc, stamping
from mcp_sessions.client.dialer import Failure, Json
from mcp_sessions.client.hosted import Standing
from mcp_sessions.client.known_server import KnownServer
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.core.messages import REQUEST_KEY_META, SESSION_META, members_of, meta_of
from mcp_sessions.core.resume import SessionView
from mcp_sessions.errors import KEY_BYTES, LIMIT_REACHED

_UNNAMED = method_names.OPENING | method_names.OF_SESSIONS | {method_names.PING}


def refused(pending: PendingRequest, peer: KnownServer) -> Standing | None:
    """Return why a request cannot be served: its session left this connection (TKO5) or is gone
    (ASC18). None: it can be served.
    """
    hosted = peer.hosted
    if pending.is_hosts:
        # It was admitted before; whoever takes a session cannot take an answer (TKO2).
        return None
    pending.is_hosts = True
    if stamping.names_own_session(pending.message):
        pending.hosted, _ = hosted.session_of(pending.message)
        if pending.hosted is None:
            hosted.cleared()
        return None
    pending.hosted, standing = hosted.session_of(pending.message)
    return standing if standing is not Standing.HERE else None


def prepared(
    pending: PendingRequest, peer: KnownServer, mint_key: Callable[[], str]
) -> tuple[Json, Mapping[str, str]]:
    """Return a request as it is sent, without its id, and the HTTP headers that it needs."""
    message, method = pending.message, pending.method
    envelope = stamping.envelope_of(message)
    headers: dict[str, str] = {}
    if envelope is not None:
        headers = stamping.modern_headers(message, envelope)
    elif peer.protocol_version is not None and peer.initialize is not None:
        # Other requests on that link may be of the other era.
        headers = {"mcp-protocol-version": peer.protocol_version}
    meta = meta_of(cast("Json | None", message.get("params")))
    is_modern = envelope is not None
    added: Json = {}
    if method in _UNNAMED or stamping.names_own_session(message):
        pass
    elif pending.hosted is None:
        if not is_modern and peer.abilities.has_sessions:
            added[SESSION_META] = None
    elif pending.first_sent is not None or peer.pushed is not None:
        # The current session may be another one by now.
        added[SESSION_META] = {"sessionId": pending.hosted}
        pending.is_named_here = True
    if is_modern and stamping.names_own_session(message) and pending.hosted is not None:
        headers.update(stamping.session_headers(SessionView(pending.hosted)))
    if pending.hosted is not None and method not in (
        method_names.LISTEN,
        method_names.DELETE_SESSION,
    ):
        key = meta.get(REQUEST_KEY_META)
        if isinstance(key, str):
            pending.key = key
        elif (
            REQUEST_KEY_META not in meta
            and pending.may_be_keyed
            and peer.has_keys
            and peer.hosted.find(pending.hosted) is not None
        ):
            pending.key = added[REQUEST_KEY_META] = pending.key or mint_key()
        pending.key_lifetime = min(pending.key_lifetime, peer.abilities.key_lifetime)
    peer.hosted.asking(pending)
    return (stamping.marked(message, added) if added else message), headers


def may_go_again(pending: PendingRequest, peer: KnownServer) -> bool | None:
    """Whether a request may be sent again; None: as its key says.

    A request that takes a session may be repeated. Any other request needs a key (KEY17).
    """
    if pending.method in (method_names.LISTEN, method_names.RESUME_SESSION):
        return True
    if pending.hosted is None or peer.hosted.find(pending.hosted) is None:
        return pending.first_sent is None
    return None


def is_answer(failure: Failure) -> bool:
    """Whether an HTTP status came with the server's own answer to a request."""
    has_answer = failure.is_answer and failure.error is not None
    return has_answer and not rpc.says_not_begun(failure.error or {})


def is_without_room(pending: PendingRequest, error: Json) -> bool:
    """Whether a request was refused for a key that this client gave it, and may go without
    (KEY13). The keys that there is room for are the application's.
    """
    said = members_of(error.get("data"))
    limit = said.get("limit")
    if said.get("started") is True:
        return False
    meta = meta_of(cast("Json | None", pending.message.get("params")))
    if error.get("code") != LIMIT_REACHED or limit != KEY_BYTES:
        return False
    if not pending.may_be_keyed or pending.key is None or REQUEST_KEY_META in meta:
        return False
    pending.may_be_keyed = False
    return True
