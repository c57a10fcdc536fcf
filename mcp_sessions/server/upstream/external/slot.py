"""Hold one child and its clients: its settings, its requests, and the receivers of its messages.

Children follow each other at a slot. The request that needs one starts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

from mcp_sessions import method_names
from mcp_sessions.background import watched
from mcp_sessions.core.listen_messages import LEVELS, level_of
from mcp_sessions.errors import INVALID_REQUEST, METHOD_NOT_FOUND
from mcp_sessions.ids import digest
from mcp_sessions.principal import Principal
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import (
    ANSWERING,
    ChildRefused,
    Forgotten,
    NotStarted,
    RequestSender,
    raised_anew,
)
from mcp_sessions.server.upstream.external.server_messages import Notifier, SendNotification
from mcp_sessions.server.upstream.port import (
    LEFT,
    LISTENS,
    TOO_FAR,
    OnProgress,
    Outbound,
    PeerError,
    PeerRequest,
    UpstreamCall,
    UpstreamError,
)

logger = logging.getLogger(__name__)

_UNKNOWN_CALLER = (
    "the server did not say which request it asks for, and several clients share it: "
    "its client is not known, and nobody is asked"
)
_READS = method_names.LISTING | {method_names.PING}


@dataclass(frozen=True, slots=True)
class Clients:
    is_one_client: bool = False
    """Whether only one client ever asks there. It gets every message of the child."""

    is_sessionless: bool = False
    """Whether they are clients outside of sessions. They listen for changes of the lists on a
    bus.
    """

    is_shared: bool = False
    """Whether any client may ask there. Changes are published as the server's own."""


ONE_CLIENT = Clients(is_one_client=True)


class Announce(Protocol):
    def __call__(
        self, method: str, params: Mapping[str, Any] | None, *, is_outside: bool = False
    ) -> Awaitable[object]:
        """Announce a change.

        Args:
            is_outside: Only to listens outside of sessions: all others have children of their own,
                which say it themselves.
        """
        ...


@dataclass(frozen=True, slots=True)
class Services:
    start: Callable[[Slot, Principal], Awaitable[Child]]
    """Starts a child for a slot. Raises ``UpstreamError`` if it cannot be started."""

    announce: Announce
    """Takes a change of a server that several clients share."""

    notifier: Notifier
    title: str
    """Name of the server in the log."""


@dataclass(frozen=True, slots=True)
class Sessionless:
    """Key of a child for requests of the modern era outside of sessions."""

    principal: Principal
    kind: frozenset[str] = frozenset()
    """Requests that its clients accept, as
    :func:`~mcp_sessions.server.upstream.accepted_questions.kind_of` names them.
    """

    client: Hashable = None
    """The client that has the child for itself. None: all others of the principal share it."""

    number: int = 0
    """Number among the children of that client."""

    share: Hashable = field(default=None, compare=False)
    """What that client is counted for: see :attr:`UpstreamCall.share`."""

    @property
    def is_modern(self) -> bool:
        """Whether the child has the modern era, if the server speaks both."""
        return not self.kind

    @property
    def has_left(self) -> bool:
        """Whether that client can send no more requests."""
        return getattr(self.client, "has_left", False)

    @property
    def is_spare(self) -> bool:
        """Whether its client has others, or may have left: nothing shows when it does."""
        return self.number > 0 or isinstance(self.client, tuple)


class Subscribers(dict[str, set[Hashable]]):
    """Clients by URI. A URI without a client is removed."""

    def add(self, who: Hashable, uris: Iterable[str]) -> None:
        for uri in uris:
            self.setdefault(uri, set()).add(who)

    def replace(self, who: Hashable, uris: Collection[str]) -> set[str]:
        """Subscribe a client to these resources and to no others. Return those that changed."""
        before = self._of(who)
        self.remove(who, before.difference(uris))
        self.add(who, uris)
        return before.symmetric_difference(uris)

    def remove(self, who: Hashable, uris: Iterable[str] | None = None) -> None:
        """Unsubscribe a client from these resources. None: from all."""
        known = self._of(who)
        for uri in known if uris is None else known.intersection(uris):
            self[uri].discard(who)
            if not self[uri]:
                del self[uri]

    def _of(self, who: Hashable) -> set[str]:
        return {uri for uri, subscribed in self.items() if who in subscribed}

    def rename(self, who: Hashable, name: Hashable) -> None:
        for uri in self._of(who):
            self[uri] = self[uri] - {who} | {name}

    def clients_of(self, uri: str) -> Collection[Hashable]:
        """Return the clients that subscribed to a resource. If none did, those that subscribed to
        one above it.
        """
        above = (who for each, who in self.items() if _is_below(uri, each))
        return self.get(uri) or set[Hashable]().union(*above)


class Unsure:
    def __init__(self) -> None:
        self.questions: dict[asyncio.Timeout, list[UpstreamCall]] = {}
        """Time limits of the questions → the calls that each may be about."""

    async def ask(self, asked: PeerRequest, way: Outbound) -> dict[str, Any]:
        """Ask the client of several calls about one of them. The question ends with the last of
        them.

        Raises:
            PeerError: See :meth:`Outbound.send_request`.
        """
        try:
            async with asyncio.timeout(None) as limit:
                self.questions[limit] = list(asked.about)
                try:
                    return await way.send_request(asked)
                finally:
                    del self.questions[limit]
        except TimeoutError:
            raise PeerError(INVALID_REQUEST, "the request that asks has ended") from None

    def remove(self, call: UpstreamCall) -> None:
        """End the questions that were about this call only. Others continue."""
        for limit, calls in self.questions.items():
            if call in calls:
                calls.remove(call)
                if not calls:
                    limit.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class Slot:
    """The child of one session, one connection, one principal or all, if there is one now."""

    services: Services
    key: Hashable
    """Id of a session, or another key of its owner."""

    client: Mapping[str, Any]
    """The params of ``initialize``."""

    clients: Clients
    was_served: bool = False
    """Whether there was a child before. Data that its clients read from it may be outdated."""

    subscribers: Subscribers = field(default_factory=Subscribers)
    level: str | None = None
    """Level of the last ``logging/setLevel``."""

    outbounds: dict[Hashable, Outbound] = field(
        init=False, default_factory=dict[Hashable, Outbound]
    )
    """Ways to the clients, by session or by peer."""

    calls: dict[UpstreamCall, RequestSender | None] = field(
        init=False, default_factory=dict[UpstreamCall, "RequestSender | None"]
    )
    """Running calls, and the modern-era client of each."""

    asking: set[UpstreamCall] = field(init=False, default_factory=set["UpstreamCall"])
    """Running calls of clients of the modern era that certainly asked."""

    unsure: Unsure = field(init=False, default_factory=Unsure)
    """Questions about one of several calls of one client."""

    turns: WeakValueDictionary[str, asyncio.Lock] = field(
        init=False, default_factory=WeakValueDictionary[str, asyncio.Lock]
    )
    """Locks by URI, for one subscription after the other."""

    holder: str | None = field(init=False, default=None)
    """Name by which this process claimed it, if others could. None: it is not claimed yet."""

    child: Child | None = field(init=False, default=None)
    starting: asyncio.Task[Child | UpstreamError] | None = field(init=False, default=None)
    used_at: float = field(init=False, default=0.0)
    has_ended: bool = field(init=False, default=False)
    """Whether it has ended. Requests that are still here keep their child, and get no other."""

    asked_by: set[Hashable] = field(init=False, default_factory=set[Hashable])
    """Clients that ask here outside of sessions, two at most."""

    keeps_nothing: bool = field(init=False, default=True)
    """Whether its children got only requests that leave no state behind."""

    @property
    def is_unused(self) -> bool:
        is_quiet = self.starting is None and not self.calls and not self.subscribers
        return self.living is not None and self.keeps_nothing and is_quiet

    @property
    def is_replaceable(self) -> bool:
        """Whether the child can end for another client: outside of sessions nothing lasts from one
        request to the next.
        """
        is_idle = self.living is not None and self.starting is None and not self.calls
        return self.clients.is_sessionless and is_idle and not self.outbounds

    @property
    def is_empty(self) -> bool:
        """Whether no client outside of sessions uses it, or would find a child."""
        has_child = self.living is not None or self.starting is not None
        return self.clients.is_sessionless and not (has_child or self.calls or self.outbounds)

    @property
    def is_left(self) -> bool:
        return getattr(self.key, "has_left", False)

    @property
    def is_one_client(self) -> bool:
        return self.clients.is_one_client

    @property
    def share(self) -> Hashable:
        """Return the client whose request waits for the child. None: no request does."""
        return next((call.share for call in self.calls), None)

    def label(self) -> str:
        title = self.services.title
        return f"{title} of {digest(self.key) if isinstance(self.key, str) else 'a client'}"

    @property
    def living(self) -> Child | None:
        return self.child if self.child is not None and not self.child.has_ended else None

    async def request(
        self,
        call: UpstreamCall,
        sender: RequestSender | None,
        method: str,
        params: dict[str, Any] | None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> dict[str, Any]:
        """Send a request to its child, which is started if there is none.

        Args:
            sender: See :meth:`Child.request`.
            check: Called last, before the request is sent. Its errors are raised.

        Raises:
            UpstreamError: The child's error, or -31012, or the child cannot be started.
        """
        self.calls[call] = sender
        if method not in _READS:
            self.keeps_nothing = False
        try:
            child = self.living or await self.started(call.principal)
            if check is not None:
                await check()
            try:
                result = await child.request(call, method, params, sender)
            except Forgotten:
                # The request did not run. If that happens again, it is the answer.
                child = self.living or await self.started(call.principal)
                if check is not None:
                    await check()
                result = await child.request(call, method, params, sender)
            await self.services.notifier.flush(call)
        except UpstreamError:
            # What the child said before its error comes before that.
            await self.services.notifier.flush(call)
            raise
        finally:
            self.calls.pop(call, None)
            self.services.notifier.forget(call)
            if self.unsure.questions:
                self.unsure.remove(call)
            self.used_at = asyncio.get_running_loop().time()
        if method == method_names.SET_LEVEL:
            self.level = level_of(params)
        return result

    async def notify(self, child: Child, method: str, params: Mapping[str, Any] | None) -> None:
        self.keeps_nothing = False
        await child.notify(method, params)

    async def started(self, principal: Principal) -> Child:
        """Start its child, once, even if other requests wait for it or leave.

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
            # It was cancelled before it began; the request that waits here was not.
            raise Forgotten
        started = task.result()
        if isinstance(started, UpstreamError):
            failed = raised_anew(started)
            raise failed if isinstance(failed, ChildRefused) else NotStarted(failed.error)
        return started

    async def _started(self, principal: Principal) -> Child | UpstreamError:
        try:
            return await self.services.start(self, principal)
        except UpstreamError as failed:
            return failed

    def _is_started(self, task: asyncio.Task[Child | UpstreamError]) -> None:
        # This also runs if it was cancelled before its first step.
        if self.starting is task:
            self.starting = None

    def occupy(self, child: Child) -> None:
        self.child = child
        self.used_at = asyncio.get_running_loop().time()

    def vacate(self) -> Child | None:
        child, self.child = self.child, None
        return child

    def serves(self) -> bool:
        was_served, self.was_served = self.was_served, True
        return was_served

    def rename(self, who: Hashable, name: Hashable) -> None:
        way = self.outbounds.pop(who, None)
        if way is not None:
            self.outbounds[name] = way
        self.subscribers.rename(who, name)

    def is_asked_by(self, client: Hashable) -> None:
        if len(self.asked_by) < 2:
            self.asked_by.add(client)

    async def settle(self, uris: Iterable[str], principal: Principal) -> None:
        """Subscribe its child to those of these resources that a client here wants, and unsubscribe
        it from the others. If a client wants one, a child is started. After :data:`ANSWERING`
        seconds the rest is left out.

        Raises:
            UpstreamError: It cannot be started.
        """
        asked = sorted(uris)
        if self.living is None and any(uri in self.subscribers for uri in asked):
            # The new child gets all subscriptions.
            await self.started(principal)
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWERING
        for uri in asked:
            if loop.time() >= until:
                logger.warning(
                    "%s: it does not answer subscriptions: some updates are missing", self.label()
                )
                return
            await self._settle(uri, until)

    async def _settle(self, uri: str, until: float) -> None:
        turn = self.turns.setdefault(uri, asyncio.Lock())
        async with turn:
            is_wanted, child = uri in self.subscribers, self.living
            if child is None or not child.has_subscriptions:
                return
            if is_wanted == (uri in child.subscribed):
                return
            method = method_names.SUBSCRIBE if is_wanted else method_names.UNSUBSCRIBE
            try:
                async with asyncio.timeout_at(until):
                    await child.request(None, method, {"uri": uri})
            except TimeoutError:
                logger.warning("%s: it does not answer %s", self.label(), method)
                # It may have taken effect all the same. And the next listener would wait, too.
                change = child.subscribed.add if is_wanted else child.subscribed.discard
                change(uri)
            except UpstreamError as refused:
                logger.warning("%s: it refuses %s: %s", self.label(), method, refused)

    def leave(self, who: Hashable) -> None:
        self.outbounds.pop(who, None)
        self.subscribers.remove(who)

    # --- messages that its child sends by itself -----------------------------------------------

    async def notified(
        self, method: str, params: dict[str, Any] | None, about: UpstreamCall | None = None
    ) -> None:
        if method in method_names.CHANGES:
            for who, way in self._concerned(method, params):
                await self._deliver((self.key, who), way, method, params)
            return
        is_log = method == method_names.LOGGED
        for call in self._hearers(method, about):
            if not is_log or _is_wanted(params, self._least(self.calls[call])):
                await self._deliver(call, call.notify, method, params)
                return
        is_delivered = self.clients.is_one_client and not self.calls
        if is_delivered and (not is_log or _is_wanted(params, self._least(None))):
            for who, outbound in list(self.outbounds.items()):
                await self._deliver((self.key, who), outbound.notify, method, params)

    def _hearers(self, method: str, about: UpstreamCall | None) -> Iterable[UpstreamCall]:
        """Return the calls that may get a message that is no change, the best first."""
        if about in self.calls:
            return (about,)
        if self.clients.is_one_client and about is None:
            # If the child names no call, the newest one counts whose client is nearest. What comes
            # behind a message that waits does not overtake it.
            waits = self.services.notifier.waits
            return sorted(reversed(self.calls), key=lambda call: (not waits(call), -call.reach))
        logger.debug("%s: %s is left out: whose it is is not known", self.label(), method)
        return ()

    def _least(self, sender: RequestSender | None) -> str | None:
        if sender is not None:
            return sender.level
        # A child has one level. It is filtered only for a client that wants less than another one.
        says = self.child.level if self.child is not None else self.level
        return self.level if self.level is not None and self.level != says else LEVELS[0]

    async def reported(self, call: UpstreamCall, params: dict[str, Any]) -> None:
        await self._deliver(
            call, lambda _, members: call.report(members or {}), method_names.PROGRESS, params
        )

    def _concerned(
        self, method: str, params: Mapping[str, Any] | None
    ) -> list[tuple[Hashable, SendNotification]]:
        if self.clients.is_shared:
            return [(None, self.services.announce)]
        if self.clients.is_sessionless and method != method_names.RESOURCE_UPDATED:
            return [(None, partial(self.services.announce, is_outside=True))]
        receivers = list(self.outbounds.items())
        is_one = self.clients.is_one_client and not self.clients.is_sessionless
        if method == method_names.RESOURCE_UPDATED and not is_one:
            uri = (params or {}).get("uri")
            subscribed = self.subscribers.clients_of(uri) if isinstance(uri, str) else ()
            receivers = [(who, outbound) for who, outbound in receivers if who in subscribed]
        return [(who, outbound.notify) for who, outbound in receivers]

    async def _deliver(
        self, who: Hashable, way: SendNotification, method: str, params: Mapping[str, Any] | None
    ) -> None:
        notifier, is_change = self.services.notifier, method in method_names.CHANGES
        if self.clients.is_one_client and who in self.calls:
            await notifier.of_call(who, way, method, params)
        elif self.clients.is_one_client:
            await notifier.now(who, way, method, params, is_change=is_change)
        else:
            notifier.later(who, way, method, params, is_change=is_change)

    async def asked(
        self,
        method: str,
        params: dict[str, Any] | None,
        on_progress: OnProgress | None,
        about: UpstreamCall | None = None,
    ) -> dict[str, Any]:
        if not self.clients.is_one_client:
            return await self._asked_there(method, params, about)
        if about is not None and self.calls.get(about) is not None:
            self.asking.add(about)
        failed: PeerError | None = None
        asked = PeerRequest(method, params, on_progress=on_progress)
        # What begins later cannot be its cause.
        causes = list(self.calls)
        farther = dict[UpstreamCall, int]()
        while True:
            open_calls = [call for call in causes if call in self.calls and call.can_send_request]
            # A client that does not listen now may never come back, and others wait.
            reach = {call: min(call.reach, farther.get(call, LISTENS)) for call in open_calls}
            newest = max(reversed(open_calls), key=reach.__getitem__, default=None)
            cause = about if about in open_calls else newest
            way: Outbound | None = cause
            if way is None and failed is None and self.outbounds:
                way = next(reversed(self.outbounds.values()))
            if way is None:
                raise failed or PeerError(METHOD_NOT_FOUND, "Method not found", method)
            try:
                asked.about = open_calls if cause is not about and len(open_calls) > 1 else ()
                asked.least = reach[cause] if cause is not None and asked.about else LEFT
                if asked.about:
                    return await self.unsure.ask(asked, way)
                return await way.send_request(asked)
            except PeerError as refused:
                if cause is None or cause is about:
                    raise
                if asked.least > LEFT and refused.data == TOO_FAR:
                    farther[cause] = asked.least - 1
                    continue
                if cause.can_send_request:
                    raise
                # The request that was taken for the cause has completed. It may be another one's.
                failed = refused

    async def _asked_there(
        self, method: str, params: dict[str, Any] | None, about: UpstreamCall | None
    ) -> dict[str, Any]:
        asked = [call for call, sender in self.calls.items() if sender and sender.is_asked]
        if not asked:
            raise PeerError(METHOD_NOT_FOUND, "Method not found", method)
        if about is None:
            logger.info(
                "%s: a question is refused: it may belong to several requests", self.label()
            )
            raise PeerError(INVALID_REQUEST, _UNKNOWN_CALLER)
        if about not in self.calls:
            raise PeerError(INVALID_REQUEST, "the request that asks has ended")
        if about not in asked:
            raise PeerError(METHOD_NOT_FOUND, "Method not found", method)
        return await about.send_request(PeerRequest(method, params))


def _is_wanted(params: Mapping[str, Any] | None, least: str | None) -> bool:
    if least not in LEVELS:
        return False
    level = (params or {}).get("level")
    return level not in LEVELS or LEVELS.index(level) >= LEVELS.index(least)


def _is_below(uri: str, other: str) -> bool:
    rest = uri.removeprefix(other)
    return uri.startswith(other) and (other.endswith("/") or rest.startswith(("/", "?", "#")))
