"""Of whom one child is: what it was told, what runs there, and who hears what it says.

One child follows the other there, each started by the request that needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from mcp_sessions.background import watched
from mcp_sessions.core.listening import LEVELS, SET_LEVEL, level_of
from mcp_sessions.core.messages import PROGRESS
from mcp_sessions.errors import INVALID_REQUEST, METHOD_NOT_FOUND
from mcp_sessions.ids import digest
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.call_in_rounds import CallInRounds
from mcp_sessions.server.upstream.external.cause import UNKNOWN, Cause
from mcp_sessions.server.upstream.external.child import (
    ANSWERING,
    Child,
    Forgotten,
    NotStarted,
    Refused,
    Sender,
    raised_anew,
)
from mcp_sessions.server.upstream.external.failures import description_of
from mcp_sessions.server.upstream.external.telling import Telling, Way
from mcp_sessions.server.upstream.external.unsure import Unsure
from mcp_sessions.server.upstream.port import (
    Call,
    OnProgress,
    Outbound,
    PeerError,
    PeerRequest,
    UpstreamError,
)

logger = logging.getLogger(__name__)

LISTS = ("tools", "prompts", "resources")
UPDATED = "notifications/resources/updated"
_WHOSE = (
    "the server did not say which request it asks for, and several can be: "
    "its client is not known, and nobody is asked"
)
_CHANGED = frozenset({UPDATED, *(f"notifications/{name}/list_changed" for name in LISTS)})
_READS = frozenset({"ping", *(f"{name}/list" for name in (*LISTS, "resources/templates"))})


@dataclass(eq=False)
class Place:
    """Of one session, one connection, one principal or all: its child, if there is one now."""

    start: Callable[[Place, Principal], Awaitable[Child]]
    """Starts a child for it; raises UpstreamError: it cannot be started."""

    announce: Callable[[str, Mapping[str, Any] | None], Awaitable[object]]
    """Takes a change of a server that everybody shares."""

    telling: Telling

    key: Hashable
    """A session's id, or whose else it is."""

    client: Mapping[str, Any]
    """The params of ``initialize``."""

    is_one_client: bool
    """All who ask here are one client, which hears what the child says by itself."""

    is_sessionless: bool
    """Of whoever asks here outside of sessions: those listen for changes of its lists on a bus."""

    is_shared: bool
    """Anybody asks here: what the child says by itself is told as the server's own changes."""

    was_served: bool
    """There was a child before: what its clients read of it may be gone."""

    title: str
    """What the server is called in the log."""

    is_spare: bool = False
    """It is one of several for the same, and nobody would notice if it were not there."""

    outbounds: dict[Hashable, Outbound] = field(default_factory=dict[Hashable, Outbound])
    """By session, or by peer."""

    calls: dict[Call, Sender | None] = field(default_factory=dict[Call, "Sender | None"])
    """What runs, and who asks it, if that is a client of the modern era."""

    unsure: Unsure = field(default_factory=Unsure)
    """What is asked about one of several calls of one client."""

    subscribers: dict[str, set[Hashable]] = field(default_factory=dict[str, set[Hashable]])
    """By URI."""

    turns: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary[str, asyncio.Lock]
    )
    """By URI: one subscription after the other."""

    level: str | None = None
    """Of the last ``logging/setLevel``."""

    holder: str | None = None
    """By which name this process has it, if others could; None: it did not claim it yet."""

    child: Child | None = None
    starting: asyncio.Task[Child | UpstreamError] | None = None
    used_at: float = 0.0
    is_over: bool = False
    """Nobody asks here any more who was not here before: it starts no child."""

    asked_by: set[bytes] = field(default_factory=set[bytes])
    """Outside of sessions: two of those who ask there, as they describe themselves."""

    keeps_nothing: bool = True
    """Its children were asked nothing that one may remember."""

    @property
    def is_unused(self) -> bool:
        """Its child, which runs nothing, is as one that was just started."""
        is_quiet = self.starting is None and not self.calls and not self.subscribers
        return self.living is not None and self.keeps_nothing and is_quiet

    @property
    def is_nobodys(self) -> bool:
        """Of all who ask outside of sessions nobody would notice another child."""
        is_idle = self.living is not None and self.starting is None and not self.calls
        # One that may work on what was given up is replaced by whoever asks next.
        is_left = self.living is not None and self.living.unanswered.has_given_up
        is_as_new = self.is_unused or (is_idle and (self.is_spare or is_left))
        return self.is_sessionless and is_as_new and not self.outbounds

    def another(self, key: Hashable) -> Place:
        """One for the same, with a child of its own."""
        return Place(
            self.start,
            self.announce,
            self.telling,
            key,
            self.client,
            self.is_one_client,
            self.is_sessionless,
            self.is_shared,
            False,
            self.title,
            is_spare=True,
        )

    def label(self) -> str:
        """Whose it is, for the log."""
        return f"{self.title} of {digest(self.key) if isinstance(self.key, str) else 'a client'}"

    @property
    def living(self) -> Child | None:
        """Its child, if that can be asked."""
        return self.child if self.child is not None and not self.child.is_over else None

    async def request(
        self,
        call: Call,
        sender: Sender | None,
        method: str,
        params: dict[str, Any] | None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> dict[str, Any]:
        """Ask its child, which is started if there is none.

        Args:
            sender: See :meth:`Child.request`.
            check: Asked last, before the child is: what it raises, this does.

        Raises:
            UpstreamError: The child's error, or -31012; or it cannot be started.
        """
        self.calls[call] = sender
        if sender is not None:
            self.is_asked_by(sender.client)
        if method not in _READS:
            self.keeps_nothing = False
        try:
            child = self.living or await self.started(call.principal)
            if check is not None:
                await check()
            try:
                result = await child.request(call, method, params, sender)
            except Forgotten:
                # The request did not run. Where it is forgotten again, that is its answer.
                child = self.living or await self.started(call.principal)
                if check is not None:
                    await check()
                result = await child.request(call, method, params, sender)
            if self.telling.is_telling(call):
                await self.telling.told(call)
        finally:
            self.calls.pop(call, None)
            self.unsure.is_over(call)
            self.telling.forget(call)
            self.used_at = asyncio.get_running_loop().time()
        if method == SET_LEVEL:
            self.level = level_of(params)
        return result

    async def notify(self, child: Child, method: str, params: Mapping[str, Any] | None) -> None:
        """Notify its child."""
        self.keeps_nothing = False
        await child.notify(method, params)

    async def started(self, principal: Principal) -> Child:
        """Its child, which is started: once, whoever else waits for that or leaves.

        Raises:
            UpstreamError: It cannot be started.
        """
        task = self.starting
        if task is None:
            task = self.starting = asyncio.create_task(self._started(principal))
            watched("starting a child", task)
            task.add_done_callback(self._is_started)
        await asyncio.wait({task})
        self.used_at = asyncio.get_running_loop().time()
        if task.cancelled():
            # Before it began to start one; and whoever waits for it was not.
            raise Forgotten
        started = task.result()
        if isinstance(started, UpstreamError):
            failed = raised_anew(started)
            raise failed if isinstance(failed, Refused) else NotStarted(failed.error)
        return started

    async def _started(self, principal: Principal) -> Child | UpstreamError:
        try:
            return await self.start(self, principal)
        except UpstreamError as failed:
            return failed

    def _is_started(self, task: asyncio.Task[Child | UpstreamError]) -> None:
        # Also of one that was cancelled before its first step.
        if self.starting is task:
            self.starting = None

    def end(self) -> None:
        """Whoever is still here has the child that it has, and no other."""
        self.is_over = True

    def occupy(self, child: Child) -> None:
        """That is its child from now on, for whoever waits for it."""
        self.child = child
        self.used_at = asyncio.get_running_loop().time()

    def vacate(self) -> Child | None:
        """It has no child any more: who asks now has the next one. The one it had."""
        child, self.child = self.child, None
        return child

    def serves(self) -> bool:
        """Its child serves from now on; whether there was one before."""
        was_served, self.was_served = self.was_served, True
        return was_served

    def held_by(self, holder: str) -> None:
        """This process has it by that name."""
        self.holder = holder

    def belongs_to(self, key: Hashable) -> None:
        """All of it is somebody's from now on."""
        self.key = key

    def rename(self, who: Hashable, name: Hashable) -> None:
        """A client is known by another name from now on."""
        way = self.outbounds.pop(who, None)
        if way is not None:
            self.outbounds[name] = way
        for subscribed in self.subscribers.values():
            if who in subscribed:
                subscribed.remove(who)
                subscribed.add(name)

    def is_asked_by(self, client: Mapping[str, Any]) -> None:
        """Outside of sessions somebody asks here, who describes itself so."""
        if self.is_sessionless and self.keeps_nothing and len(self.asked_by) < 2:
            self.asked_by.add(description_of(client.get("clientInfo")))

    def is_heard_by(self, who: Outbound, uris: Collection[str]) -> None:
        """A client of the modern era listens, for changes of these resources as well."""
        self.outbounds[who] = who
        for uri in uris:
            self.subscribers.setdefault(uri, set()).add(who)

    def listens_for(self, who: Hashable, uris: Collection[str]) -> set[str]:
        """A client wants to hear of these resources and of no others; those where that is new."""
        before = {uri for uri, subscribed in self.subscribers.items() if who in subscribed}
        for uri in before.difference(uris):
            self._unsubscribe(who, uri)
        for uri in uris:
            self.subscribers.setdefault(uri, set()).add(who)
        return before.symmetric_difference(uris)

    async def settle(self, uris: Iterable[str], principal: Principal) -> None:
        """Have its child, if it can, tell of these resources' changes where anybody here wants to
        hear them, for whom it is started, and not where nobody does. What is not asked within
        :data:`ANSWERING` seconds is not asked.

        Raises:
            UpstreamError: It cannot be started.
        """
        asked = sorted(uris)
        if self.living is None and any(uri in self.subscribers for uri in asked):
            # Which subscribes to all.
            await self.started(principal)
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWERING
        for uri in asked:
            if loop.time() >= until:
                logger.warning("%s: it does not answer: not all is subscribed to", self.label())
                return
            await self._settle(uri, until)

    async def _settle(self, uri: str, until: float) -> None:
        turn = self.turns.setdefault(uri, asyncio.Lock())
        async with turn:
            is_wanted, child = uri in self.subscribers, self.living
            if child is None or is_wanted == (uri in child.subscribed):
                return
            if not child.has_subscriptions:
                return
            method = "resources/subscribe" if is_wanted else "resources/unsubscribe"
            try:
                async with asyncio.timeout_at(until):
                    await child.request(None, method, {"uri": uri})
            except TimeoutError:
                logger.warning("%s: it does not answer %s", self.label(), method)
                # It may have it all the same; and whoever wants to hear it next would wait, too.
                change = child.subscribed.add if is_wanted else child.subscribed.discard
                change(uri)
            except UpstreamError as refused:
                logger.warning("%s: it refuses %s: %s", self.label(), method, refused)

    def leave(self, who: Hashable) -> None:
        """Nothing is told to that client any more."""
        self.outbounds.pop(who, None)
        for uri in [uri for uri, subscribed in self.subscribers.items() if who in subscribed]:
            self._unsubscribe(who, uri)

    def _unsubscribe(self, who: Hashable, uri: str) -> None:
        self.subscribers[uri].discard(who)
        if not self.subscribers[uri]:
            del self.subscribers[uri]

    # --- what its child says by itself ---------------------------------------------------------

    async def notified(
        self, method: str, params: dict[str, Any] | None, cause: Cause = UNKNOWN
    ) -> None:
        """See :class:`~mcp_sessions.server.upstream.external.client.Client`."""
        if method in _CHANGED:
            for who, way in self._concerned(method, params):
                await self._tell((self.key, who), way, method, params)
            return
        is_log = method == "notifications/message"
        for call in self._hearers(method, cause):
            if not is_log or _is_wanted(params, self._least(self.calls[call])):
                await self._tell(call, call.notify, method, params)
                return
        is_told = self.is_one_client and not self.calls and not cause.may_be_others
        if is_told and (not is_log or _is_wanted(params, self._least(None))):
            for who, outbound in list(self.outbounds.items()):
                await self._tell((self.key, who), outbound.notify, method, params)

    def _hearers(self, method: str, cause: Cause) -> Iterable[Call]:
        """The calls that may hear what is no change, the best first."""
        if self.is_one_client:
            # Where nothing says which: that is taken to be the newest.
            if cause.said is None:
                return () if cause.may_be_others else reversed(self.calls)
            return (cause.said,) if cause.said in self.calls else ()
        # Whoever shares with other users hears nothing that is only likely.
        call = cause.said if self.is_shared else cause.known
        if call not in self.calls:
            logger.debug("%s: %s is left out: whose it is is not known", self.label(), method)
            return ()
        return (call,)

    def _least(self, sender: Sender | None) -> str | None:
        """The least of a log message that a client wants to hear; None: none."""
        if sender is not None:
            return sender.level
        # A child says what it was told: less only for who wants less than another one.
        says = self.child.level if self.child is not None else self.level
        return self.level if self.level is not None and self.level != says else LEVELS[0]

    async def reported(self, call: Call, params: dict[str, Any]) -> None:
        """See :class:`~mcp_sessions.server.upstream.external.client.Client`."""
        await self._tell(call, lambda _, members: call.report(members or {}), PROGRESS, params)

    def _concerned(
        self, method: str, params: Mapping[str, Any] | None
    ) -> list[tuple[Hashable, Way]]:
        """Who is told a change, and how."""
        if self.is_shared or (self.is_sessionless and method != UPDATED):
            return [(None, self.announce)]
        told = list(self.outbounds.items())
        if method == UPDATED and not self.is_one_client:
            uri = (params or {}).get("uri")
            subscribed = self._subscribed(uri) if isinstance(uri, str) else ()
            told = [(who, outbound) for who, outbound in told if who in subscribed]
        return [(who, outbound.notify) for who, outbound in told]

    def _subscribed(self, uri: str) -> Collection[Hashable]:
        """Who subscribed to a resource; if nobody did, to one that it is below of."""
        by_name = self.subscribers.get(uri)
        if by_name:
            return by_name
        above = (who for each, who in self.subscribers.items() if _is_below(uri, each))
        return set[Hashable]().union(*above)

    async def _tell(
        self, who: Hashable, way: Way, method: str, params: Mapping[str, Any] | None
    ) -> None:
        is_change = method in _CHANGED
        if self.is_one_client:
            await self.telling.now(who, way, method, params, is_change=is_change)
        else:
            self.telling.later(who, way, method, params, is_change=is_change)

    async def asked(
        self,
        method: str,
        params: dict[str, Any] | None,
        on_progress: OnProgress | None,
        cause: Cause = UNKNOWN,
    ) -> dict[str, Any]:
        """See :class:`~mcp_sessions.server.upstream.external.client.Client`."""
        if not self.is_one_client:
            return await self._asked_there(method, params, cause.known)
        about = cause.known
        failed: PeerError | None = None
        while True:
            open_calls = [call for call in self.calls if call.can_send_request]
            way: Outbound
            if about in open_calls:
                way = about
            elif open_calls:
                way = open_calls[-1]
            elif failed is None and self.outbounds:
                way = next(reversed(self.outbounds.values()))
            else:
                raise failed or PeerError(METHOD_NOT_FOUND, "Method not found", method)
            try:
                if way is not about and len(open_calls) > 1:
                    asked = PeerRequest(method, params, on_progress=on_progress, about=open_calls)
                    return await self.unsure.ask(asked, way)
                return await way.send_request(PeerRequest(method, params, on_progress=on_progress))
            except PeerError as refused:
                if way is about or not open_calls or open_calls[-1].can_send_request:
                    raise
                # The request that it was taken to be about is over. It may be another's.
                failed = refused

    async def _asked_there(
        self, method: str, params: dict[str, Any] | None, about: Call | None
    ) -> dict[str, Any]:
        """Ask one of several clients: the one whose request caused it."""
        if not any(isinstance(call, CallInRounds) for call in self.calls):
            raise PeerError(METHOD_NOT_FOUND, "Method not found", method)
        if about is None:
            logger.info("%s: a question is refused: several requests may ask it", self.label())
            raise PeerError(INVALID_REQUEST, _WHOSE)
        if about not in self.calls:
            raise PeerError(INVALID_REQUEST, "the request that asks is over")
        if not isinstance(about, CallInRounds):
            raise PeerError(METHOD_NOT_FOUND, "Method not found", method)
        return await about.send_request(PeerRequest(method, params))


def _is_below(uri: str, other: str) -> bool:
    """Whether one URI continues another, from the end of one of its parts on."""
    rest = uri.removeprefix(other)
    return uri.startswith(other) and (other.endswith("/") or rest.startswith(("/", "?", "#")))


def _is_wanted(params: Mapping[str, Any] | None, least: str | None) -> bool:
    if least not in LEVELS:
        return False
    level = (params or {}).get("level")
    return level not in LEVELS or LEVELS.index(level) >= LEVELS.index(least)
