"""Which child serves a request outside of sessions.

All clients of one principal that can be asked the same are served by the same few children. Which
of them it is makes no difference: nothing lasts there from one request to the next.

1. A request whose client can be asked, or wants to hear log messages, has a child for itself: one
   that is idle, else one that is started for it within the limits. So what the child says has one
   cause (``cause.py``), and a client that was asked and is away keeps nobody else from being asked.
2. Other requests share a child, and none with a request of rule 1.
3. If there is no room for one more, a request shares the child that has the fewest. Their
   questions are refused then. It prefers a child of its own kind, then one whose clients can be
   asked less.
4. An idle child that may still work on what was given up is replaced: of what it asks then, nobody
   would know whose it is.
5. A child that says of everything which request caused it may be shared by all.
6. Requests of one principal keep half of the room busy at most, and three quarters where a kind of
   client has no child yet. The rest is for others. Of two or three children they may have two: one
   whose client is away, and one for whoever asks next.
7. Before a request has to share, the oldest call of its principal whose client was asked and is
   away for long is given up (``rounds.py``).
8. A client's session takes over the child that it asked what there is (``takeover.py``), if that
   was told its name. One client at a time has such a child, of those that can be asked the same.
   The others are served by children that are told the layer's name.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from mcp_sessions.errors import LIMIT_REACHED
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.asks import Asks, kind_of
from mcp_sessions.server.upstream.external.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.external.child import Child, NotStarted, Sender
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.place import Place
from mcp_sessions.server.upstream.external.rounds import Rounds
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

    of: bytes | None = None
    """How the only client describes itself that asks here, and whose name the child is told; None:
    any may ask, and it is told the layer's.
    """

    number: int = 0
    """Of several: the first one is there as long as anybody listens for changes."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Chooses among the children of one layer."""

    _children: Children
    _rounds: Rounds

    def key(self, principal: Principal, asks: Asks, description: bytes) -> Sessionless:
        """Whose child serves a client: one that is told its name (rule 8), or everybody's.

        Args:
            description: The same for clients that describe themselves alike.
        """
        anybodys = Sessionless(principal, kind_of(asks))
        own = replace(anybodys, of=description)
        if self._children.known(own) is not None:
            return own
        if self._children.places(lambda it: _is_anothers(it, own)):
            return anybodys
        # Who can be served as it is takes no room for that.
        is_known = self._children.known(anybodys) is not None
        return anybodys if is_known and not self._children.has_room(principal) else own

    def of_one(self, principal: Principal, asks: Asks, description: bytes) -> Place | None:
        """Where a client asked, if it may be the only one there; None: nowhere."""
        anybodys = Sessionless(principal, kind_of(asks))
        return self._children.known(replace(anybodys, of=description)) or self._children.known(
            anybodys
        )

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
        # It may have ended since, or be a session's now.
        first = self._children.place(key, lambda: first)
        place = self._own(first, key, call, sender)
        if place is None and await self._rounds.give_up_oldest(key.principal):
            first = self._children.place(key, lambda: first)
            place = self._own(first, key, call, sender)
        place = place or self._shared(key) or first
        child = place.living
        if (
            _is_told(call, sender)
            and not place.calls
            and child is not None
            and child.unanswered.has_given_up
        ):
            self._children.renew(place)
        try:
            return await place.request(call, sender, method, params)
        except NotStarted as failed:
            # It did not run. Who had its room was quicker; or the machine has none.
            is_full = failed.error.get("code") == LIMIT_REACHED
            other = self._shared(key) if is_full else _least_busy(self._places(key), key)
            if other is None:
                raise
            return await other.request(call, sender, method, params)

    def child(self, key: Sessionless) -> Child | None:
        """One that answered a handshake, if any: all say the same of the server."""
        places = (*self._places(key), *self._all(key.principal))
        living = (place.living for place in places)
        return next((child for child in living if child is not None), None)

    def _own(
        self, first: Place, key: Sessionless, call: Call, sender: Sender | None
    ) -> Place | None:
        """A place where the request meets none that it must not; None: it has to share."""
        places = [first, *(each for each in self._places(key) if each is not first)]
        for place in places:
            if _fits(place, call, sender) and (
                _runs(place) or self._may_start(key, place is first)
            ):
                return place
        if not self._may_start(key, False):
            return None
        taken = {place.key for place in places}
        keys = (replace(key, number=number) for number in range(1, len(places) + 1))
        free = next(each for each in keys if each not in taken)
        return self._children.place(free, lambda: first.another(free))

    def _may_start(self, key: Sessionless, is_first: bool) -> bool:
        """Whether one more child may be for that principal outside of sessions."""
        room = self._children.server.room_of_one
        most = max(min(2, room), room // 2) + (room // 4 if is_first else 0)
        if sum(1 for place in self._all(key.principal) if place.calls) >= most:
            return False
        # The first one may end what was idle for long.
        return is_first or self._children.has_room(key.principal, by_ending=True)

    def _shared(self, key: Sessionless) -> Place | None:
        return _least_busy(self._all(key.principal), key)

    def _all(self, principal: Principal) -> list[Place]:
        return self._children.places(
            lambda it: isinstance(it, Sessionless) and it.principal == principal
        )

    def _places(self, key: Sessionless) -> list[Place]:
        return self._children.places(
            lambda it: isinstance(it, Sessionless) and replace(it, number=0) == key
        )


def _is_anothers(key: Hashable, own: Sessionless) -> bool:
    """Whether that is the child of another client alone, who can be asked the same."""
    return (
        isinstance(key, Sessionless)
        and key.of not in (None, own.of)
        and (key.principal, key.kind) == (own.principal, own.kind)
    )


def _fits(place: Place, call: Call, sender: Sender | None) -> bool:
    if not place.calls or (place.living is not None and place.living.always_says_cause):
        return True
    return not any(_is_told(*each) for each in ((call, sender), *place.calls.items()))


def _is_told(call: Call, sender: Sender | None) -> bool:
    """Whether its client may be asked, or hear log messages."""
    wants_logs = sender is not None and sender.level is not None
    return isinstance(call, CallInRounds) or wants_logs


def _runs(place: Place) -> bool:
    return place.living is not None or place.starting is not None


def _least_busy(places: list[Place], key: Sessionless) -> Place | None:
    """Of those that run the best one to share; None: none runs."""

    def rank(place: Place) -> tuple[bool, bool, int]:
        kind = place.key.kind if isinstance(place.key, Sessionless) else key.kind
        return kind != key.kind, not kind <= key.kind, len(place.calls)

    return min((place for place in places if _runs(place)), key=rank, default=None)
