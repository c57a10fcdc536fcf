"""Which children outside of sessions end first if there is no room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.place import Place


def spare(places: Iterable[Place], living: Mapping[Child, Principal]) -> set[Place]:
    """Outside of sessions nothing lasts from one request to the next. A principal whose clients
    can be asked different things has several children there, and keeps the one used last.

    Args:
        living: For whom each child was started.
    """
    last: dict[Principal, Place] = {}
    found: set[Place] = set()
    for place in places:
        whose = living.get(place.child) if place.child is not None else None
        if whose is not None and place.is_sessionless:
            other = last.get(whose, place)
            last[whose], older = sorted((other, place), key=lambda it: -it.used_at)
            if older is not last[whose] and not older.outbounds and older.starting is None:
                found.add(older)
    return found
