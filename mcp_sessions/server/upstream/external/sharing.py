"""Choose the child that serves a request outside of sessions.

1. A client that can be asked, or wants log messages, has a child of its own (``cause.py``). It
   keeps that child from request to request. It gets another one for a request next to others: some
   servers run one request after the other. Without room for that, its requests share its child.
2. One connection is one client. The client at standard input and output has one child for all its
   requests, as with a handshake. If requests of several clients may come on a connection, an
   authenticated principal is one client, and each other request is a client of its own.
3. All other clients of a principal share one child. They get no messages of the server by itself.
   The child gets the description of the client for which it was started.
4. If a server names the request behind each message, all clients of a principal share a child. A
   URL does so that speaks only the modern era. The layer knows that from its answer to a handshake.
5. A client's child ends when its connection has ended. It ends for a request that needs its room,
   too, if it runs no request.
6. Children of one client each run requests in half of the room at most: the rest is for sessions.
   Each user, or each address of clients that nobody authenticated, may have one more busy child
   only if more are free than it has already. So one client leaves room for the others.
7. Before a request is refused for this, the oldest call whose client was asked and has long been
   away is given up (``rounds.py``).
8. A child of clients that can be asked has a handshake, if the server speaks both eras. There a
   handler can ask in the middle of a call. A handler that asks by its result is served in the
   modern era (``handler_eras.py``), and every handler is if the layer speaks only that one. The
   question is the result of its own request there, so these requests share the child of rule 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.upstream.accepted_questions import Asks, kind_of
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import ChildRefused, RequestSender
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.handler_eras import HandlerEras
from mcp_sessions.server.upstream.external.room import MOST
from mcp_sessions.server.upstream.external.sessionless import Sessionless
from mcp_sessions.server.upstream.external.slot import Slot
from mcp_sessions.server.upstream.port import UpstreamCall
from mcp_sessions.server.upstream.rounds import Rounds


@dataclass(slots=True)
class Sharing:
    _children: Children
    _rounds: Rounds
    _eras: HandlerEras = field(init=False, default_factory=HandlerEras)

    def asks_by_result(self, method: str | None, params: Mapping[str, Any] | None) -> bool:
        """Whether a request of a client that can be asked goes in the modern era, if the server
        speaks it.
        """
        children = self._children
        if children.is_of_the_era_before or children.is_of_the_modern_era or method is None:
            return False
        return children.prefers_modern or self._eras.is_modern(method, params)

    def key(self, call: UpstreamCall, asks: Asks, *, hears: bool) -> Sessionless:
        """Return the key of the child for a request.

        Args:
            asks: Requests that its client accepts, if its child may ask in the middle of a call.
            hears: Whether the request wants log messages.
        """
        if not (asks or hears) or self._children.names_requests:
            return Sessionless(call.principal)
        return Sessionless(call.principal, kind_of(asks), client_of(call), share=call.share)

    async def request(
        self,
        find: Callable[[], Slot],
        call: UpstreamCall,
        sender: RequestSender | None,
        method: str,
        params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        slot = self._free(find()) or await self._room(find, call)
        return await self.sent(slot, call, sender, method, params)

    async def sent(
        self,
        slot: Slot,
        call: UpstreamCall,
        sender: RequestSender | None,
        method: str,
        params: dict[str, Any] | None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> dict[str, Any]:
        """Send a request as :meth:`Slot.request` does, and learn how its handler asks."""
        if sender is None or not sender.is_asked:
            return await slot.request(call, sender, method, params, check)
        code, kind = None, None
        try:
            result = await slot.request(call, sender, method, params, check)
            if "resultType" in result:
                kind = result["resultType"]
            return result
        except ChildRefused as refused:
            code = refused.error.get("code")
            raise
        finally:
            if code is not None or kind is not None or slot.asking or self._eras.doubtful:
                is_modern = isinstance(slot.key, Sessionless) and slot.key.is_modern
                has_asked = call in slot.asking
                slot.asking.discard(call)
                self._eras.ended(
                    method, params, is_modern=is_modern, has_asked=has_asked, code=code, kind=kind
                )

    async def _room(self, find: Callable[[], Slot], call: UpstreamCall) -> Slot:
        """Return a slot for a request that found no room.

        Raises:
            UpstreamError: There is none.
        """
        await self._rounds.give_up_oldest(call.principal, call.share)
        slot = self._free(find()) or self._busy(find())
        if slot is None:
            raise self._children.no_room(MOST)
        return slot

    def _busy(self, first: Slot) -> Slot | None:
        """Return the slot of a client with the fewest requests. None: none has any."""
        busy = [slot for slot in self._own(first) if slot.calls]
        return min(busy, key=lambda it: len(it.calls), default=None)

    def _own(self, first: Slot) -> list[Slot]:
        key = cast("Sessionless", first.key)
        return [first, *self._children.slots(lambda it: _is_next_to(it, key))]

    def _free(self, first: Slot) -> Slot | None:
        """Return a slot for one more request. None: there are enough busy children.

        Args:
            first: The first one of its client, or the one that several clients share.
        """
        key = cast("Sessionless", first.key)
        if key.client is None:
            return first
        if not self._has_room(key):
            return None
        own = self._own(first)
        idle = sorted((slot for slot in own if not slot.calls), key=lambda it: it.living is None)
        if idle:
            return idle[0]
        taken = {slot.key for slot in own}
        keys = (replace(key, number=number) for number in range(len(own) + 1))
        free = next(each for each in keys if each not in taken)
        return self._children.slot(free, lambda: first.another(free))

    def _has_room(self, key: Sessionless) -> bool:
        """Whether a client may have one more busy child for itself."""
        slots = self._children.slots(lambda it: isinstance(it, Sessionless))
        keys = (cast("Sessionless", slot.key) for slot in slots if slot.calls)
        busy = Counter(each.share for each in keys if each.client is not None)
        server = self._children.server
        free = _half(server.max_children) - busy.total()
        return busy[key.share] < min(free, _half(server.room_of_one))

    def child(self, principal: Principal) -> Child | None:
        """Return a child that answered a handshake, if any: all describe the server in one way."""
        slots = self._children.slots(
            lambda it: isinstance(it, Sessionless) and it.principal == principal
        )
        living = (slot.living for slot in slots)
        return next((child for child in living if child is not None), None)


def client_of(call: UpstreamCall) -> Hashable:
    """Return a key of the client of a request outside of sessions."""
    client = call.client
    if client is not None:
        return client
    return call.principal if call.principal != ANONYMOUS else call


def _is_next_to(key: Hashable, first: Sessionless) -> bool:
    return isinstance(key, Sessionless) and key.number > 0 and replace(key, number=0) == first


def _half(room: int) -> int:
    return max(min(2, room), room // 2)
