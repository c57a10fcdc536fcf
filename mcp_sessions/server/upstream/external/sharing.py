"""Which child serves a request outside of sessions.

All clients of one principal that can be asked the same are served by the same few children. Which
of them it is makes no difference: nothing lasts there from one request to the next.

1. A request whose client can be asked has a child for itself: one that is idle, else one that is
   started for it within the limits. So its question has one cause (``cause.py``), and a client
   that was asked and is away keeps nobody else from being asked.
2. Other requests share a child, and none with a request of rule 1.
3. If there is no room for one more, a request shares the child that has the fewest. Their
   questions are refused then.
4. An idle child that may still work on what was given up is replaced: of what it asks then, nobody
   would know whose it is.
5. A child that says of everything which request caused it may be shared by all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child, NotStarted, Sender
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.place import Place
from mcp_sessions.server.upstream.external.rounds import CallInRounds
from mcp_sessions.server.upstream.port import Call


@dataclass(frozen=True, slots=True)
class Sessionless:
    """Whose a child is that serves the modern-era requests of one principal outside of sessions:
    those whose clients can be asked the same, which is what it is told of them. It is spoken to as
    its client would.
    """

    principal: Principal
    kind: frozenset[str]
    """See :func:`~mcp_sessions.server.upstream.external.asks.kind_of`."""

    number: int = 0
    """Of several: the first one is there as long as anybody listens for changes."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Chooses among the children of one layer."""

    _children: Children

    async def request(
        self,
        first: Place,
        key: Sessionless,
        call: Call,
        sender: Sender | None,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Ask a child; see :meth:`Place.request`.

        Args:
            first: The place of that key.

        Raises:
            UpstreamError: See there.
        """
        place = self._chosen(first, key, call, sender)
        try:
            return await place.request(call, sender, method, params)
        except NotStarted:
            # It did not run. Who had its room was quicker; or the machine has none.
            others = [each for each in self._places(key) if each.living is not None]
            if not others:
                raise
            return await _least_busy(others).request(call, sender, method, params)

    def child(self, key: Sessionless) -> Child | None:
        """One that answered a handshake, if any: all say the same of the server."""
        living = (place.living for place in self._places(key))
        return next((child for child in living if child is not None), None)

    def _chosen(self, first: Place, key: Sessionless, call: Call, sender: Sender | None) -> Place:
        # It may have ended since.
        first = self._children.place(key, lambda: first)
        if _fits(first, call):
            place = first
        else:
            places = self._places(key)
            place = next((each for each in places if _fits(each, call)), None) or self._another(
                first, key, places
            )
        is_told = isinstance(call, CallInRounds) or (
            sender is not None and sender.level is not None
        )
        child = place.living
        if is_told and not place.calls and child is not None and child.unanswered.has_given_up:
            self._children.renew(place)
        return place

    def _another(self, first: Place, key: Sessionless, places: list[Place]) -> Place:
        if not self._children.has_room(key.principal, by_ending=True):
            return _least_busy(places)
        taken = {place.key for place in places}
        keys = (replace(key, number=number) for number in range(1, len(places) + 1))
        free = next(each for each in keys if each not in taken)
        return self._children.place(free, lambda: first.another(free))

    def _places(self, key: Sessionless) -> list[Place]:
        return self._children.places(
            lambda it: isinstance(it, Sessionless) and replace(it, number=0) == key
        )


def _fits(place: Place, call: Call) -> bool:
    if not place.calls or (place.living is not None and place.living.always_says_cause):
        return True
    return not any(isinstance(each, CallInRounds) for each in (call, *place.calls))


def _least_busy(places: list[Place]) -> Place:
    return min(places, key=lambda place: len(place.calls))
