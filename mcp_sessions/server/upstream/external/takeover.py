"""Which child a session has when it begins: one that its client had before, or a new one.

Rules, owned by ``tests/server/upstream/external/test_takeover.py``:

1. A session takes over a child that was asked only what there is, and runs nothing. It is as one
   that was just started.
2. The child of the connection on which the session begins is its client's for certain.
3. A client of the modern era has no connection. It asks outside of sessions, where others may ask
   as well. Its session takes over the child that was told what a new one would be told, if nobody
   else asked there. A child that may still say something because of a request is not taken over,
   nor one that asked something: it would not ask its session.
4. A server of both eras is spoken to in the modern one there, and in the other one in a session. So
   a child that is spoken to in the modern era is not taken over.
5. The child moves, and not its place. A request that was about to be asked there has another one.
6. For a few seconds nobody knows whether a log message is about a request of before. It is
   dropped then (rule 6 of ``cause.py``).
7. Who describes itself alike, of the same principal, is taken for the same client. If it is another
   one, it has lost nothing: the child kept nothing of it.
8. Otherwise the session has a new child. One that nobody else asked outside of sessions ends then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.place import Place


def hand_over(children: Children, key: Hashable, new: Hashable) -> None:
    """A session begins with the child of its connection, if that was used for nothing yet."""
    place = children.known(key)
    if place is not None and place.is_unused and not children.server.names_sessions:
        children.rename(key, new)


def spare(children: Children, key: Hashable) -> None:
    """The child of a connection is not needed any more, if it was used for nothing."""
    place = children.known(key)
    if place is not None and place.is_unused:
        children.over(key)


def take_over(children: Children, outside: Place, new: Place, description: bytes) -> None:
    """A session begins, whose client asked outside of sessions before.

    Args:
        outside: The place where it asked.
        description: See :attr:`Place.asked_by`.
    """
    if not outside.is_nobodys or outside.asked_by != {description}:
        return
    if not children.server.names_sessions and _is_as_new(outside, new):
        children.move(outside, new)
    else:
        children.forget(outside)


def _is_as_new(outside: Place, new: Place) -> bool:
    """Whether the child there is as one that would be started for the new place."""
    child = outside.living
    if child is None or not outside.is_unused or child.is_modern:
        return False
    is_told_more = child.level is not None or bool(child.subscribed)
    is_owed_more = new.level is not None or bool(new.subscribers) or new.was_served
    return (
        not (is_told_more or is_owed_more)
        and child.unanswered.is_settled(is_late=not child.is_in_order)
        and _described(outside.client) == _described(new.client)
    )


def _described(client: Mapping[str, Any]) -> dict[str, Any]:
    """What a child is told of its client, whichever era it is spoken to in."""
    return {name: it for name, it in client.items() if name != "protocolVersion"}
