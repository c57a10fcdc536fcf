"""Check the size of a modern request's members; each transport asks before it serves one.

A handshake is bounded when its connection is stored, a listen in a session when its filter is.
"""

from __future__ import annotations

from mcp_sessions import method_names
from mcp_sessions.core.client_description import ENVELOPE, size_of
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import members_of, texts_of
from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.limits import check_subscriptions


def check_modern(request: Message, size: int, policy: SessionPolicy) -> None:
    """Whether a request of the modern era may say that much of its client, and listen to that many
    resources. Each request describes its client anew, and what serves the client keeps the
    description longer than the request. A listen outside of a session is in no store.

    Args:
        size: Bytes of the message. Its parts are no larger, so only a large message has to be
            looked at.

    Raises:
        LimitReached: The envelope is more than ``max_client_bytes``; or see
            :func:`~mcp_sessions.stores.limits.check_subscriptions`.
    """
    if size > policy.max_client_bytes:
        meta = request.meta
        said = {name: meta[name] for name in ENVELOPE if name in meta}
        if size_of(said) > policy.max_client_bytes:
            raise LimitReached("max_client_bytes", policy.max_client_bytes)
    if request.method == method_names.LISTEN:
        wanted = members_of((request.params or {}).get("notifications"))
        check_subscriptions(set(texts_of(wanted.get("resourceSubscriptions"))), policy)
