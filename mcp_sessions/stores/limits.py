"""Bound the bytes that a session holds of its client's and its handlers' values.

Every store asks here before it stores, or does the same in the step that stores.
"""

from __future__ import annotations

from collections.abc import Collection

from mcp_sessions.core.client_description import size_of
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import LimitReached
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.records import Peer


def check_peer(peer: Peer | None, policy: SessionPolicy) -> None:
    if peer is not None and size_of(peer.initialize_params) > policy.max_client_bytes:
        raise LimitReached("max_client_bytes", policy.max_client_bytes)


_SHARE = 10
"""``max_sessions`` by this is what one principal can fill with names of his own."""


def most_of_one(mode: Mode, policy: SessionPolicy) -> int | None:
    """How many sessions a principal may have for one of a mode to be made; None: any number."""
    if mode in (Mode.TASK, Mode.KEYS) or (
        policy.max_sessions_per_principal is None and mode is Mode.CONVERSATION
    ):
        # It costs who makes up a name nothing, not even a connection. All tasks, and all keys
        # outside of sessions, are of one owner.
        return max(1, policy.max_sessions // _SHARE)
    return policy.max_sessions_per_principal


def check_sessions(
    count: int, owned: int, policy: SessionPolicy, mode: Mode = Mode.PROTOCOL
) -> None:
    """Whether there may be one session more.

    Args:
        count: How many there are.
        owned: Of these, those of its principal.
        mode: Its.

    Raises:
        LimitReached: They are ``max_sessions``, or ``max_sessions_per_principal``.
    """
    if count >= policy.max_sessions:
        raise LimitReached("max_sessions", policy.max_sessions)
    most = most_of_one(mode, policy)
    if most is not None and owned >= most:
        raise LimitReached("max_sessions_per_principal", most)


def text_size(text: str) -> int:
    """Bytes of a text, as it is stored: JSON may hold a lone surrogate."""
    return len(text.encode("utf-8", "surrogatepass"))


def check_subscriptions(uris: Collection[str], policy: SessionPolicy) -> None:
    """Whether a session, or a connection, may be subscribed to these resources.

    Raises:
        LimitReached: They are more than ``max_subscriptions``, one has more than
            ``max_uri_bytes``, or all together have more than ``max_subscription_bytes``.
    """
    sizes = [text_size(uri) for uri in uris]
    check_sizes(len(sizes), max(sizes, default=0), sum(sizes), policy)


def check_sizes(count: int, largest: int, total: int, policy: SessionPolicy) -> None:
    if largest > policy.max_uri_bytes:
        raise LimitReached("max_uri_bytes", policy.max_uri_bytes)
    if count > policy.max_subscriptions:
        raise LimitReached("max_subscriptions", policy.max_subscriptions)
    if total > policy.max_subscription_bytes:
        raise LimitReached("max_subscription_bytes", policy.max_subscription_bytes)


def check_data(size: int, policy: SessionPolicy) -> None:
    if size > policy.max_data_bytes:
        raise LimitReached("max_data_bytes", policy.max_data_bytes)


def check_state(size: int, policy: SessionPolicy) -> None:
    if size > policy.max_state_bytes:
        raise LimitReached("max_state_bytes", policy.max_state_bytes)
