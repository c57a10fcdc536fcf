"""Give each session, connection or principal a slot for its children, which follow each other
there.

Rules:

1. The request that needs a child starts it, once, even if others wait for it or leave.
2. Requests that were open when a child ended are not sent again. The next child gets the log level
   and the subscriptions. Its clients are asked to read again.
3. A child without requests ends after a while. A child that runs a request never makes room.
4. Text that a client can write never names a child. Its session, its connection or its principal
   names it.
5. If the machine lacks a resource (files, processes, memory), that is no failure of the server, be
   it a command or a URL. The next request tries again at once.
6. A start without room waits for it, if room gets free by itself within :data:`WAITS` seconds. A
   child will have been idle for long by then, or a client that was asked is away.

A server is started once before a client needs it, which shows whether it works. Rules, owned by
``tests/server/upstream/external/test_trial.py``:

1. No client notices it: it takes none of the room, and a failure refuses no client.
2. A process gets no message, and waits for the client that needs one first. It is clean, and starts
   once.
3. A URL has no process. A process that all clients share, or that names its session or principal,
   is another one. So these begin with a handshake. The child is then stopped. If all clients share
   one child and there is none yet, it stays.

The server of a layer that runs can change: its next children are started in another way.

1. A session keeps its child. So does a connection with a handshake.
2. Any other child gets no more requests. It ends when it has answered those that it has. The next
   request starts another one, which gets the log level and the subscriptions.
3. A start that has begun completes, with the server of before.
4. Failures of the server of before do not count any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mcp_sessions import method_names, metrics
from mcp_sessions.background import Background, report, stopped
from mcp_sessions.core.messages import wire_error
from mcp_sessions.errors import LimitReached
from mcp_sessions.external_server import ExternalServer, HTTPServer
from mcp_sessions.ids import digest
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import ChildRefused
from mcp_sessions.server.upstream.external.server_messages import Notifier
from mcp_sessions.server.upstream.external.slot import (
    ONE_CLIENT,
    Announce,
    Services,
    Sessionless,
    Slot,
)
from mcp_sessions.server.upstream.external.starts import (
    EVICTABLE,
    LOOKS,
    WAITS,
    Ended,
    Failures,
    NoMeans,
    Room,
    Starter,
    begin,
    made,
    not_started,
    why_not,
)
from mcp_sessions.server.upstream.external.warm import warn_of
from mcp_sessions.server.upstream.port import UpstreamError

logger = logging.getLogger(__name__)

_SAID_AGAIN = 60.0
"""Seconds between two log lines about missing room."""

_CLOSING = 10.0
"""Seconds that background work for children has when the layer stops."""

_LEAVING = "the layer stops"
_ENDED = "its session or connection ended"


class _TrialSlot(Slot):
    def label(self) -> str:
        return f"{self.services.title}, first start"


@dataclass(frozen=True, slots=True)
class Tried:
    result: Mapping[str, Any]
    """Its answer to ``initialize``."""

    memory: int | None
    """See :meth:`ChildWire.memory`."""


@dataclass(eq=False)
class Children:
    """Manage all children of one layer.

    Args:
        versions: The protocol versions with a handshake.
        ours: The params of the layer's own ``initialize``.
        announce: See :attr:`Services.announce`.
        give_up: See :meth:`~mcp_sessions.server.upstream.rounds.Rounds.give_up_oldest`.
        gives_up_at: See :meth:`~mcp_sessions.server.upstream.rounds.Rounds.gives_up_at`.
    """

    server: ExternalServer
    starter: Starter
    versions: frozenset[str]
    ours: Mapping[str, Any]
    announce: Announce
    give_up: Callable[[Hashable], Awaitable[bool]]
    gives_up_at: Callable[[Hashable], float]
    prefers_modern: bool = False
    """Whether a server of both eras is spoken to in the modern era. False: see ``sharing.py``."""

    def __post_init__(self) -> None:
        self.capabilities: Mapping[str, Any] | None = None
        """Capabilities of the last child. None: there was none."""

        self.notifier = Notifier()
        self.services = self._services()
        self._slots: dict[Hashable, Slot] = {}
        self.room = Room(lambda: self.server, self._slots)
        self._living, self._ending = self.room.living, self.room.ending
        self._rounds = Background()
        self._background = Background()
        self._is_closed = False
        self._is_leaving = False
        self.is_of_the_era_before = False
        """Whether a client of the modern era came, and the server speaks only the handshake era."""

        self.is_of_the_modern_era = False
        """Whether a client of the handshake era came, and the server speaks only the modern one."""

        self.names_requests = False
        """Whether the server names the request behind each message, to every client."""

        self._failures = Failures()
        self._said_at = -math.inf

    def offered(self, client: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the params by which a server is begun: their version says the era."""
        return {**client, "protocolVersion": NEWEST_MODERN} if self.prefers_modern else client

    def run(self) -> None:
        self.starter.run(lambda: self.room.left)
        self._rounds.loop("the rounds over idle children", self._round)

    def _services(self) -> Services:
        return Services(self.start, self.announce, self.notifier, self.server.title)

    def slot(self, key: Hashable, make: Callable[[], Slot]) -> Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = make()
        return slot

    def known(self, key: Hashable) -> Slot | None:
        return self._slots.get(key)

    def slots(self, are: Callable[[Hashable], bool]) -> list[Slot]:
        return [slot for key, slot in self._slots.items() if are(key)]

    def rename(self, key: Hashable, new: Hashable) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._slots[new] = slot
            slot.key = new
        for each in [slot] if slot is not None else list(self._slots.values()):
            each.rename(key, new)

    def renew(self, slot: Slot) -> None:
        child = slot.vacate()
        if child in self._living and not self._is_closed:
            self._ending.add(child)
            self._background.run("the end of a child", self._stop(child))

    def move(self, slot: Slot, new: Slot) -> None:
        """Move a child from one slot to another. A request at the old slot starts a new child
        there, so that it cannot use the moved one.
        """
        child = slot.vacate()
        if child is None:
            raise AssertionError("it has a child")
        del self._slots[slot.key]
        child.belongs_to(new)
        new.occupy(child)
        new.serves()

    def forget(self, slot: Slot) -> None:
        """Remove a slot that no client needs. A request that is there already starts a new
        child.
        """
        del self._slots[slot.key]
        self.renew(slot)

    def alike(self, client: Mapping[str, Any], principal: Principal) -> Child | None:
        """Return a living child of that principal whose handshake had a client with the same
        description.
        """
        for slot in self._slots.values():
            child = slot.living
            # A server's handshake may hold text for its user alone.
            if child is not None and self._living.get(child) == principal:
                if slot.client == client:
                    return child
        return None

    def described(self) -> list[dict[str, Any]]:
        """Say what an operator may know of each child that runs, oldest first."""
        now = asyncio.get_running_loop().time()
        slots = {slot.living: slot for slot in self._slots.values() if slot.living is not None}
        said: list[dict[str, Any]] = []
        for child in self._living:
            slot = slots.get(child)
            said.append(
                {
                    "pid": child.pid,
                    "session": digest(slot.key)
                    if slot is not None and isinstance(slot.key, str)
                    else None,
                    "idle": max(0.0, now - slot.used_at) if slot is not None else 0.0,
                    "calls": len(slot.calls) if slot is not None else 0,
                }
            )
        return said

    async def stop_process(self, pid: int) -> None:
        """Stop the child with that process. Its slot starts another one when it is needed."""
        for slot in list(self._slots.values()):
            if slot.living is not None and slot.living.pid == pid:
                await self._vacate(slot)

    def remove(self, key: Hashable) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            slot.has_ended = True
            if slot.child in self._living:
                self._ending.add(slot.child)
            if not self._is_closed:
                self._background.run("the end of a child", self._end(slot))
            return
        for other in list(self._slots.values()):
            self.remove_listener(other, key)

    def remove_listener(self, slot: Slot, who: Hashable) -> None:
        """Send a client nothing more from a slot. The child is unsubscribed from resources that no
        other client there wants.
        """
        before = list(slot.subscribers)
        slot.leave(who)
        self.notifier.forget((slot.key, who))
        left = [uri for uri in before if uri not in slot.subscribers]
        principal = self._living.get(slot.child) if slot.child is not None else None
        if left and principal is not None and not self._is_closed:
            self._background.run("the end of a listen", slot.settle(left, principal))

    async def leave(self, grace: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while starting := self._starting():
                    await asyncio.wait(starting)
        self._is_leaving = True
        await stopped(*self._starting())

    def _starting(self) -> list[asyncio.Task[Child | UpstreamError]]:
        return [slot.starting for slot in self._slots.values() if slot.starting is not None]

    async def close(self) -> None:
        self._is_closed = self._is_leaving = True
        try:
            await stopped(*self._starting())
            await self._rounds.close()
            await self.notifier.close()
            if self._background.tasks:
                await asyncio.wait(self._background.tasks, timeout=_CLOSING)
            await self._background.close()
            ends = [self._stop(child) for child in list(self._living)]
            for failed in await asyncio.gather(*ends, return_exceptions=True):
                if isinstance(failed, Exception):
                    report("the end of a child", failed)
        finally:
            for child in self._living:
                child.kill()
            await self.starter.close()

    async def start(self, slot: Slot, principal: Principal) -> Child:
        loop = asyncio.get_running_loop()
        refusal = self._failures.refusal(principal, slot.client, loop.time())
        if refusal is not None:
            raise refusal
        if self._is_leaving:
            raise not_started(_LEAVING)
        if slot.has_ended:
            # No code would end that child: its slot is no longer known.
            raise not_started(_ENDED)
        await self._make_room(slot)
        try:
            child = await self._start_in_an_era(slot, principal)
        except asyncio.CancelledError:
            # The clients that wait for it were not cancelled, and get an answer.
            raise not_started(_LEAVING if self._is_leaving else _ENDED) from None
        except UpstreamError as failed:
            metrics.child_begun("failed")
            if isinstance(failed, NoMeans):
                self._say_now_and_then(failed.error["message"])
                raise
            if isinstance(failed, ChildRefused):
                # Its error is for its client: it may be long, or quote its input.
                code = failed.error.get("code")
                logger.warning("%s: it refuses initialize of a client (%s)", slot.label(), code)
            else:
                logger.warning("%s: %s", slot.label(), failed.error["message"])
            self._failures.failed(principal, slot.client, failed, loop.time())
            raise
        metrics.child_begun("started")
        self._failures.started(principal, slot.client)
        return child

    async def _start_in_an_era(self, slot: Slot, principal: Principal) -> Child:
        client = self.offered(slot.client)
        if client.get("protocolVersion") in self.versions:
            child = await self._start(slot, principal, client)
            self.is_of_the_modern_era = child.is_modern
            # In the modern era a URL sends each message about a request on its response.
            self.names_requests = child.is_modern and isinstance(self.server, HTTPServer)
            return child
        older = {**client, "protocolVersion": max(self.versions)}
        if self.is_of_the_era_before:
            return await self._start(slot, principal, older)
        try:
            child = await self._start(slot, principal, client)
        except Ended:
            # Some servers exit at a message before the handshake.
            child = await self._start(slot, principal, older)
        self.is_of_the_era_before = not child.is_modern
        return child

    async def _start(self, slot: Slot, principal: Principal, client: Mapping[str, Any]) -> Child:
        with self.room.of_start():
            await self._vacate(slot)
            child = await made(self.starter, slot, principal)
        self._living[child] = principal
        metrics.child_runs()
        try:
            await begin(self.server, child, slot, client, self.versions)
        except BaseException as failed:
            await self._stop(child)
            if isinstance(failed, Ended) and self.starter.retries():
                return await self._start(slot, principal, client)
            raise
        slot.occupy(child)
        self.capabilities = child.capabilities
        if slot.serves():
            self._background.run("asking clients to read again", self._notify_again(slot, child))
        return child

    # --- a start before a client needs it --------------------------------------------------------

    async def try_once(self, slot: Slot | None = None) -> Tried:
        """Start a child once, and stop it.

        Args:
            slot: The slot of all clients, which keeps the child if it has none. None: there is no
                such slot.

        Raises:
            UpstreamError: It cannot be started.
        """
        if slot is None:
            slot = _TrialSlot(self.services, object(), self.ours, ONE_CLIENT)
        child = await made(self.starter, slot, ANONYMOUS)
        is_kept = False
        try:
            await begin(self.server, child, slot, self.offered(self.ours), self.versions)
            is_kept = slot.clients.is_shared and self._keep(slot, child)
            return Tried(child.result, child.memory())
        except Ended:
            if not self.starter.retries():
                raise
        finally:
            if not is_kept:
                await child.stop()
        return await self.try_once(slot)

    async def warn_unless_it_starts(self, slot: Slot | None) -> None:
        """Start a child once; see :meth:`try_once`."""
        try:
            await self.try_once(slot)
        except UpstreamError as failed:
            server = self.server
            is_url = isinstance(server, HTTPServer)
            name = f"{server.title} at {server.name}" if is_url else server.title
            warn_of(name, why_not(failed))

    def _keep(self, slot: Slot, child: Child) -> bool:
        """Give a slot a child that began already, if it has none and there is room for it."""
        if slot.living or slot.starting or slot.has_ended or self._is_leaving:
            return False
        # A slot that was idle for long is no longer known.
        is_known = self.slot(slot.key, lambda: slot) is slot
        if not is_known or self.room.left < 1:
            return False
        self._living[child] = ANONYMOUS
        metrics.child_begun("started")
        metrics.child_runs()
        slot.occupy(child)
        slot.serves()
        self.capabilities = child.capabilities
        return True

    async def _notify_again(self, slot: Slot, child: Child) -> None:
        for name in method_names.LISTED:
            if name in child.capabilities:
                await slot.notified(method_names.CHANGED[name], None)
        for uri in list(slot.subscribers):
            await slot.notified(method_names.RESOURCE_UPDATED, {"uri": uri})

    # --- when they end -----------------------------------------------------------------------

    async def _end(self, slot: Slot) -> None:
        if slot.starting is not None:
            await stopped(slot.starting)
        await self._vacate(slot)

    async def _vacate(self, slot: Slot) -> None:
        child = slot.vacate()
        if child is not None:
            await self._stop(child)

    async def _stop(self, child: Child) -> None:
        if child in self._living:
            reason = "died" if child.has_ended else "ended"
            self._ending.add(child)
            await child.stop()
            self._ending.discard(child)
            if self._living.pop(child, None) is not None:
                metrics.child_ended(reason)

    async def _round(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(5.0, self.server.child_idle / 4))
            for child in [child for child in self._living if child.has_ended]:
                await self._stop(child)
            for key, slot in list(self._slots.items()):
                is_idle = not slot.calls and slot.starting is None
                patience = self.server.child_idle
                if isinstance(key, Sessionless) and key.is_spare:
                    patience = min(patience, EVICTABLE)
                if is_idle and (slot.is_left or loop.time() - slot.used_at >= patience):
                    # Another slot may have the key by now: the end of each child takes a while.
                    if not slot.outbounds and self._slots.get(key) is slot:
                        del self._slots[key]
                    await self._vacate(slot)

    async def _make_room(self, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + WAITS
        # Check again after each wait: others wait for the same room.
        while self.room.left < 1:
            if await self._end_one() or await self.give_up(slot.share):
                continue
            free_at = min(self.room.free_at(), self.gives_up_at(slot.share))
            if max(free_at, loop.time()) > until:
                raise self.no_room()
            await asyncio.sleep(LOOKS)

    def no_room(self) -> UpstreamError:
        most = self.server.max_children
        self._say_now_and_then(
            f"the limit max_children ({most}) is reached; raise it with --max-children"
        )
        metrics.limited("max_children")
        return UpstreamError(wire_error(LimitReached("max_children", most, WAITS)))

    def _say_now_and_then(self, what: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= _SAID_AGAIN:
            self._said_at = now
            logger.warning("%s: %s", self.server.title, what)

    async def _end_one(self) -> bool:
        """End a child. A child that has ended or is ending goes first, then one that no client
        needs, then the one that is idle for longest. False: none may end.
        """
        ended = self.room.ended()
        if ended is not None:
            await self._stop(ended)
            return True
        slot = self.room.first()
        if slot is None:
            return False
        if slot.is_replaceable:
            # No client has anything of it to read again.
            del self._slots[slot.key]
        await self._vacate(slot)
        return True

    # --- another server --------------------------------------------------------------------------

    def use(self, server: ExternalServer) -> None:
        """Start the next children of this server.

        Args:
            server: See :func:`can_follow`.
        """
        self.server = server
        self.services = self._services()
        self.starter.use(server)
        self._failures = Failures()
        self.is_of_the_era_before = self.is_of_the_modern_era = self.names_requests = False
        for slot in self.slots(lambda _: True):
            if slot.clients.is_sessionless or not slot.clients.is_one_client:
                self._background.run("the change of a child", self._change(slot))

    async def _change(self, slot: Slot) -> None:
        if slot.starting is not None:
            await asyncio.wait({slot.starting})
        calls, child = set(slot.calls), slot.vacate()
        if child not in self._living:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.server.child_idle):
                while True:
                    if not calls & slot.calls.keys():
                        break
                    await asyncio.sleep(LOOKS)
        await self._stop(child)


def can_follow(before: ExternalServer, after: ExternalServer) -> bool:
    """Whether a layer of one server can start the children of the other. It asks each client for
    the scopes that it began with, speaks the same eras, turns the same calls into tasks, and finds
    request keys in the same places.
    """
    if before.tasks != after.tasks or before.eras != after.eras:
        return False
    if before.request_keys != after.request_keys:
        return False
    if before.scopes != after.scopes or before.tool_scopes != after.tool_scopes:
        return False
    return type(before) is type(after) and before.per == after.per
