"""Choose the child that serves a request outside of sessions, and the first child of a session.

Outside of sessions:

1. A client that can be asked, or wants log messages, has a child of its own (``child.py``). It
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
   modern era (:class:`HandlerEras`), and every handler is if the layer speaks only that one. The
   question is the result of its own request there, so these requests share the child of rule 3.

The first child of a session is one that its client had before, or a new one. Rules, owned by
``tests/server/upstream/external/test_first_child.py``:

1. A session takes over a child that got only list requests, and runs nothing. Such a child is like
   one that was just started.
2. The child of the connection on which the session begins certainly served the same client.
3. A client of the modern era asks outside of sessions, where others may ask as well. Its session
   takes over a child if no other client ever asked there (rule 2 above), and if the
   child got the same data as a new one would get. A child with an open request is not taken over.
   Nor is a child that asked something: it would not ask its session again.
4. Outside of sessions a server of both eras is spoken to in the modern era, in a session in the
   handshake era. So a child that is spoken to in the modern era is not taken over.
5. The child moves, and not its slot. A request that was about to use it there gets another one.
6. Otherwise the session has a new child. A child that only this client used outside of sessions
   ends then.

The handlers of a server of both eras ask in the middle of a call, or by a result. Nothing shows
that before a call, and no call is sent again. So it is learned from calls, for each handler by
itself (its method and its name). Rules, for clients that can be asked:

1. A handler that asked in the middle of a call stays in the handshake era.
2. A call in the handshake era may end in the server's error -32603. Servers of the SDK answer so to
   a result that asks. The handler's next call goes in the modern era, unless rule 1 holds for it.
3. A handler that asks by a result there stays in the modern era. After any other outcome its next
   call goes in the handshake era again.
4. A request with answers continues what a result asked, so it goes in the modern era.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, Final, Literal, cast

from mcp_sessions.core.named import NAMED, name_in
from mcp_sessions.core.recent import Recent
from mcp_sessions.errors import INTERNAL_ERROR
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.server.upstream.accepted_questions import INPUT_REQUIRED, Askable, kind_of
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import ChildRefused, RequestSender
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.slot import Sessionless, Slot
from mcp_sessions.server.upstream.port import UpstreamCall
from mcp_sessions.server.upstream.rounds import Rounds


class HandlerEras:
    def __init__(self) -> None:
        self._ask: Recent[bytes, Literal["in calls", "by results"]] = Recent(_MOST)
        """How handlers were seen to ask."""

        self.doubtful: Recent[bytes, None] = Recent(_MOST)
        """Other handlers, whose last call failed in the handshake era."""

    def is_modern(self, method: str, params: Mapping[str, Any] | None) -> bool:
        """Whether a request goes in the modern era."""
        if params is None or method not in NAMED:
            return False
        if "inputResponses" in params or "requestState" in params:
            return True
        if not (self._ask or self.doubtful):
            return False
        handler = _handler(method, params)
        return handler is not None and (
            handler in self.doubtful or self._ask.get(handler) == "by results"
        )

    def ended(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        *,
        is_modern: bool,
        has_asked: bool,
        code: object,
        kind: object,
    ) -> None:
        """Learn from the end of a call.

        Args:
            is_modern: Whether it went in the modern era.
            has_asked: Whether it asked before its end.
            code: The code of the server's own error. None: there was none.
            kind: The result's ``resultType``.
        """
        handler = _handler(method, params)
        if handler is None:
            return
        self.doubtful.pop(handler, None)
        if is_modern:
            if kind == INPUT_REQUIRED:
                self._ask.keep(handler, "by results")
        elif has_asked:
            self._ask.keep(handler, "in calls")
        elif code == INTERNAL_ERROR and handler not in self._ask:
            self.doubtful.keep(handler, None)


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

    def key(self, call: UpstreamCall, asks: Askable, *, hears: bool) -> Sessionless:
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
        await self._rounds.give_up_oldest(call.share, call.principal)
        slot = self._free(find()) or self._busy(find())
        if slot is None:
            raise self._children.no_room()
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
        make = partial(Slot, first.services, free, first.client, first.clients)
        return self._children.slot(free, make)

    def _has_room(self, key: Sessionless) -> bool:
        """Whether a client may have one more busy child for itself."""
        slots = self._children.slots(lambda it: isinstance(it, Sessionless))
        keys = (cast("Sessionless", slot.key) for slot in slots if slot.calls)
        busy = Counter(each.share for each in keys if each.client is not None)
        most = _half(self._children.server.max_children)
        return busy[key.share] < most - busy.total()

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


_MOST: Final = 1_000
"""Handlers of each table, at most. Each takes the same few bytes."""


def _handler(method: str, params: Mapping[str, Any] | None) -> bytes | None:
    """Return a key of the same size for each handler. None: its results do not ask."""
    name = name_in(method, params)
    if name is None:
        return None
    return sha256(f"{method} {name}".encode("utf-8", "surrogatepass")).digest()
