"""Choose the child that serves a request outside of sessions.

The same few children serve all clients of one principal that accept the same requests. The choice
among them makes no difference: nothing lasts there from one request to the next.

1. A request whose client can be asked, or wants log messages, has a child for itself: one that is
   idle, else one that is started for it within the limits. So each message of the child has one
   cause (``cause.py``), and a client that was asked and is away does not block the questions to
   others.
2. Other requests share a child, but not with a request of rule 1.
3. If there is no room for one more, a request shares the child with the fewest requests. Their
   questions are refused then. It prefers a child of its own kind, then one whose clients accept
   fewer requests.
4. An idle child that may still work on a request that was given up is replaced. Otherwise the cause
   of its next question would be unknown.
5. A child that names the request behind each message may be shared by all.
6. Requests of one principal keep half of the room busy at most, and three quarters if a kind of
   client has no child yet. The rest is for others. They may have two of two or three children: one
   whose client is away, and one for the next request.
7. Before a request has to share, the oldest call of its principal whose client was asked and has
   long been away is given up (``rounds.py``).
8. A child of clients that can be asked has a handshake, if the server speaks both eras. There a
   handler can ask in the middle of a call. If a handler is written for several rounds, its server
   refuses the result there. Then such children have the modern era from then on.
9. A child gets the name of the client for which it was started. If no other client used it, the
   client's session takes it over (``takeover.py``). The others share it: one child is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from mcp_sessions.errors import INTERNAL_ERROR, LIMIT_REACHED
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.asks import Asks, kind_of
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import NotStarted, RequestSender
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.port import UpstreamCall, UpstreamError
from mcp_sessions.server.upstream.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Sessionless:
    """Key of a child for the modern-era requests of one principal outside of sessions. Its clients
    accept the same requests, and the child gets a list of these. It is spoken to as its clients
    would speak.
    """

    principal: Principal
    kind: frozenset[str]
    """Requests that its clients accept, as
    :func:`~mcp_sessions.server.upstream.asks.kind_of` names them.
    """

    is_modern: bool
    """Whether the child has the modern era, if the server speaks both."""

    of: bytes
    """Description of the client for which the child was started. The child gets its name."""

    number: int = 0
    """Number among several. The first one stays as long as a client listens for changes."""


_NO_RESULT: Final = (INTERNAL_ERROR, "Handler returned an invalid result")
"""Error of the SDK's servers: a handler of the handshake era returned ``InputRequiredResult``."""


@dataclass(slots=True)
class Sharing:
    _children: Children
    _rounds: Rounds
    _is_written_for_rounds: bool = field(init=False, default=False)
    """Whether a handler of the server asks by its results."""

    def key(self, principal: Principal, asks: Asks, description: bytes) -> Sessionless:
        """Return the key of a client's child: another client's that is in use, or one of its own.

        A slot of another client that is not in use is forgotten. So names that clients make up
        leave no slots behind, also if no child starts.

        Args:
            description: A key that is equal for clients with equal descriptions.
        """
        own = self._key(principal, asks, description)
        if self._children.known(own) is not None:
            return own
        for slot in self._children.slots(lambda it: _is_anothers(it, own)):
            if _runs(slot) or slot.calls or slot.outbounds:
                return replace(cast("Sessionless", slot.key), number=0)
            self._children.forget(slot)
        return own

    def of_one(self, principal: Principal, asks: Asks, description: bytes) -> Slot | None:
        return self._children.known(self._key(principal, asks, description))

    def _key(self, principal: Principal, asks: Asks, description: bytes) -> Sessionless:
        is_modern = not asks or self._is_written_for_rounds
        return Sessionless(principal, kind_of(asks), is_modern, description)

    async def request(
        self,
        find: Callable[[], Slot],
        call: UpstreamCall,
        sender: RequestSender | None,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        first = find()
        try:
            return await self._request(first, call, sender, method, params)
        except UpstreamError as refused:
            error = refused.error
            is_modern = isinstance(first.key, Sessionless) and first.key.is_modern
            if is_modern or (error.get("code"), error.get("message")) != _NO_RESULT:
                raise
        # A handler that is written for rounds begins anew in each of them.
        self._is_written_for_rounds = True
        return await self._request(find(), call, sender, method, params)

    async def _request(
        self,
        first: Slot,
        call: UpstreamCall,
        sender: RequestSender | None,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        key = cast("Sessionless", first.key)
        # It may have ended since, or belong to a session now.
        first = self._children.slot(key, lambda: first)
        slot = self._own(first, key, sender)
        if slot is None and await self._rounds.give_up_oldest(key.principal, call.share):
            first = self._children.slot(key, lambda: first)
            slot = self._own(first, key, sender)
        slot = slot or self._shared(key) or first
        child = slot.living
        if (
            _is_notified(sender)
            and not slot.calls
            and child is not None
            and child.unanswered.has_given_up
        ):
            self._children.renew(slot)
        try:
            return await slot.request(call, sender, method, params)
        except NotStarted as failed:
            # The request did not run. Another one took the room, or the machine has none.
            is_full = failed.error.get("code") == LIMIT_REACHED
            other = self._shared(key) if is_full else _least_busy(self._slots(key), key)
            if other is None:
                raise
            return await other.request(call, sender, method, params)

    def child(self, key: Sessionless) -> Child | None:
        """Return a child that answered a handshake, if any: all describe the server in one way."""
        slots = (*self._slots(key), *self._all(key.principal))
        living = (slot.living for slot in slots)
        return next((child for child in living if child is not None), None)

    def _own(self, first: Slot, key: Sessionless, sender: RequestSender | None) -> Slot | None:
        """Return a slot without requests that must not share with this one. None: it has to
        share.
        """
        slots = [first, *(each for each in self._slots(key) if each is not first)]
        for slot in slots:
            if _fits(slot, sender) and (_runs(slot) or self._may_start(key, slot is first)):
                return slot
        if not self._may_start(key, False):
            return None
        taken = {slot.key for slot in slots}
        keys = (replace(key, number=number) for number in range(1, len(slots) + 1))
        free = next(each for each in keys if each not in taken)
        return self._children.slot(free, lambda: first.another(free))

    def _may_start(self, key: Sessionless, is_first: bool) -> bool:
        room = self._children.server.room_of_one
        most = max(min(2, room), room // 2) + (room // 4 if is_first else 0)
        if sum(1 for slot in self._all(key.principal) if slot.calls) >= most:
            return False
        # The first one may end a child that was idle for long.
        return is_first or self._children.room.has(key.principal, by_ending=True)

    def _shared(self, key: Sessionless) -> Slot | None:
        return _least_busy(self._all(key.principal), key)

    def _all(self, principal: Principal) -> list[Slot]:
        return self._children.slots(
            lambda it: isinstance(it, Sessionless) and it.principal == principal
        )

    def _slots(self, key: Sessionless) -> list[Slot]:
        return self._children.slots(
            lambda it: isinstance(it, Sessionless) and replace(it, number=0) == key
        )


def _is_anothers(key: Hashable, own: Sessionless) -> bool:
    return (
        isinstance(key, Sessionless)
        and key.of != own.of
        and replace(key, of=own.of, number=0) == own
    )


def _fits(slot: Slot, sender: RequestSender | None) -> bool:
    if not slot.calls or (slot.living is not None and slot.living.always_says_cause):
        return True
    return not any(_is_notified(each) for each in (sender, *slot.calls.values()))


def _is_notified(sender: RequestSender | None) -> bool:
    return sender is not None and (sender.is_asked or sender.level is not None)


def _runs(slot: Slot) -> bool:
    return slot.living is not None or slot.starting is not None


def _least_busy(slots: list[Slot], key: Sessionless) -> Slot | None:
    def rank(slot: Slot) -> tuple[bool, bool, int]:
        kind = slot.key.kind if isinstance(slot.key, Sessionless) else key.kind
        return kind != key.kind, not kind <= key.kind, len(slot.calls)

    return min((slot for slot in slots if _runs(slot)), key=rank, default=None)
