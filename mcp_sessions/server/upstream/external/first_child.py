"""Choose the first child of a session: one that its client had before, or a new one.

Rules, owned by ``tests/server/upstream/external/test_first_child.py``:

1. A session takes over a child that got only list requests, and runs nothing. Such a child is like
   one that was just started.
2. The child of the connection on which the session begins certainly served the same client.
3. A client of the modern era asks outside of sessions, where others may ask as well. Its session
   takes over a child if no other client ever asked there (rule 2 of ``sharing.py``), and if the
   child got the same data as a new one would get. A child with an open request is not taken over.
   Nor is a child that asked something: it would not ask its session again.
4. Outside of sessions a server of both eras is spoken to in the modern era, in a session in the
   handshake era. So a child that is spoken to in the modern era is not taken over.
5. The child moves, and not its slot. A request that was about to use it there gets another one.
6. Otherwise the session has a new child. A child that only this client used outside of sessions
   ends then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import Slot


def hand_over(children: Children, key: Hashable, new: Hashable) -> None:
    slot = children.known(key)
    if slot is not None and slot.is_unused and not children.server.names_sessions:
        children.rename(key, new)


def spare(children: Children, key: Hashable) -> None:
    slot = children.known(key)
    if slot is not None and slot.is_unused:
        children.remove(key)


def take_over(children: Children, outside: Slot, new: Slot, client: Hashable) -> None:
    """Give a new session its client's earlier child, or end that child.

    Args:
        outside: The slot that it used.
        client: See :attr:`Slot.asked_by`.
    """
    if not outside.is_replaceable or outside.asked_by != {client}:
        return
    if not children.server.names_sessions and _is_as_new(outside, new):
        children.move(outside, new)
    elif outside.is_unused:
        children.forget(outside)


def _is_as_new(outside: Slot, new: Slot) -> bool:
    child = outside.living
    if child is None or not outside.is_unused or child.is_modern:
        return False
    knows_more = child.level is not None or bool(child.subscribed)
    needs_more = new.level is not None or bool(new.subscribers) or new.was_served
    return (
        not (knows_more or needs_more)
        and child.is_idle
        and not child.has_asked
        and _described(outside.client) == _described(new.client)
    )


def _described(client: Mapping[str, Any]) -> dict[str, Any]:
    return {name: it for name, it in client.items() if name != "protocolVersion"}
