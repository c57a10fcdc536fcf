"""Represent one client to a server outside of this process, and find its child.

A child's changes outside of sessions go to the listens of the modern era. Rules, owned by
``tests/server/upstream/test_port.py`` and ``tests/server/upstream/external``:

1. A listener gets changes after its acknowledgement. Each carries the id of the listen.
2. A resource is subscribed at the child as long as a client listens for it there. If the child
   ended, idle or dead, the next request starts another, which sends changes again.
3. If the child refuses a subscription, its changes are not delivered, as from a server without such
   a resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from mcp_sessions import method_names
from mcp_sessions.core.listen_messages import LEVELS, SUBSCRIPTION_ID, Filter
from mcp_sessions.core.messages import with_meta
from mcp_sessions.core.named import NAMING
from mcp_sessions.errors import METHOD_NOT_FOUND, LimitReached, NotBegun, StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.principal import Principal
from mcp_sessions.protocol_versions import NEWEST_MODERN
from mcp_sessions.server.upstream.accepted_questions import NOTHING_ASKED, Askable
from mcp_sessions.server.upstream.external.child import Child
from mcp_sessions.server.upstream.external.child_requests import ANSWERING
from mcp_sessions.server.upstream.external.child_spans import Spans
from mcp_sessions.server.upstream.external.children import Children
from mcp_sessions.server.upstream.external.other_replicas import (
    Lease,
    Moved,
    OtherReplicas,
    RemoteRequest,
    ServedResult,
)
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders
from mcp_sessions.server.upstream.external.sharing import (
    Sharing,
    client_of,
    hand_over,
    spare,
    take_over,
)
from mcp_sessions.server.upstream.external.slot import (
    ONE_CLIENT,
    Clients,
    Sessionless,
    Slot,
    Subscribers,
)
from mcp_sessions.server.upstream.own_methods import notifying_by
from mcp_sessions.server.upstream.port import Outbound, PeerError, PeerRequest, UpstreamCall, Wanted
from mcp_sessions.server.upstream.sdk.kernel import HANDSHAKE_VERSIONS, SdkUpstream

Json = dict[str, Any]

OURS: Final[Mapping[str, Any]] = {
    "protocolVersion": max(HANDSHAKE_VERSIONS),
    "capabilities": {},
    "clientInfo": {"name": "mcp-sessions", "version": version("mcp-sessions")},
}
"""Params of ``initialize`` for a child that serves several clients."""

_ENDED_HERE: Final = frozenset(
    {method_names.INITIALIZED, method_names.CANCELLED, method_names.PROGRESS}
)
"""Notifications of a client to the layer. The layer sends each child its own."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    shell: SdkUpstream
    """Serves methods that the server has no part in."""

    children: Children
    sharing: Sharing
    declared: DeclaredHeaders
    spans: Spans
    other_replicas: OtherReplicas | None
    """The processes that serve the same sessions. None: there are none, or no child belongs to a
    session.
    """

    remembers: bool
    """Whether there is a store."""

    max_subscriptions: int
    """Resources of one listen, at most."""


@dataclass(eq=False)
class ExternalPeer:
    _wrapped: Wrapped
    _client: Mapping[str, Any]
    _outbound: Outbound | None
    """None: it came on no connection."""

    _session_id: SessionId | None
    _wanted: Wanted
    _was_served: bool
    _connection_peer: ExternalPeer | None = None
    """The same client outside of its session."""

    _asks: Askable | None = None
    """Requests that the client accepts in results, as in :attr:`RemoteRequest.asks`."""

    _came_back: bool = field(init=False, default=False)
    """Whether an unused child of its connection was already released."""

    _hears: bool = field(init=False, default=False)
    """Whether the request of a modern-era client wants log messages."""

    _asks_by_result: bool = field(init=False, default=False)
    """Whether the request of a modern-era client goes in the modern era."""

    _pipe: Hashable = field(init=False, default=None)
    """The connection of a modern-era client at standard input and output. None: it has none."""

    _sessionless: Sessionless | None = field(init=False, default=None)
    """Key of its child outside of sessions. None: it did not ask there yet."""

    async def request(
        self,
        call: UpstreamCall,
        method: str,
        params: dict[str, Any] | None,
        level: str | None = "debug",
    ) -> dict[str, Any]:
        """Send a request to the client's child, and return its result.

        Args:
            level: Lowest log level that this request's client wants. None: no log messages.
        """
        return (await self.served(call, method, params, level))[0]

    async def served(
        self,
        call: UpstreamCall,
        method: str | None,
        params: dict[str, Any] | None,
        level: str | None,
    ) -> ServedResult:
        """Send a request to its child, in this process or another; see :meth:`request`.

        Args:
            method: None: no request, but a child is started if there is none.
        """
        work = self._served(call, method, params, level)
        if method is None:
            return await work
        spans = self._wrapped.spans
        if spans.are_made:
            version = (
                NEWEST_MODERN if self._asks is not None else self._client.get("protocolVersion")
            )
            work = spans.around(call, method, params, version, work)
        served = await work
        if method == method_names.LIST_TOOLS:
            self._wrapped.declared.learn(served[0])
        return served

    async def _served(
        self,
        call: UpstreamCall,
        method: str | None,
        params: dict[str, Any] | None,
        level: str | None,
    ) -> ServedResult:
        asked = RemoteRequest(self._client, method, params, level, self._asks)
        self._hears = self._asks is not None and level in LEVELS
        self._pipe = call.client if self._asks is not None and call.transport == "stdio" else None
        if self._asks:
            self._asks_by_result = self._wrapped.sharing.asks_by_result(method, params)
        other_replicas = self._wrapped.other_replicas
        if other_replicas is None:
            return await self.here(call, asked, None)
        key = self._key(call, self._who(call))
        if not isinstance(key, str):
            return await self.here(call, asked, None)
        session_id = SessionId(key)
        while True:
            try:
                lease = await other_replicas.lease(session_id)
            except StoreUnavailable as failed:
                raise NotBegun(failed) from failed
            try:
                if lease.is_here:
                    return await self.here(call, asked, lease)
                # Another process has the session now. The child here is of no use.
                self._wrapped.children.remove(session_id)
                return await other_replicas.ask(lease, call, asked)
            except Moved:
                # The request was not sent.
                continue

    async def here(
        self, call: UpstreamCall, asked: RemoteRequest, lease: Lease | None
    ) -> ServedResult:
        """Send a request to its child in this process.

        Args:
            lease: This process's right to the child. None: no other process can have it.

        Raises:
            Moved: Another process has it now.
        """
        check = None
        if lease is None or self._wrapped.other_replicas is None:
            slot = self.slot(call)
            if self._asks_by_result and isinstance(slot.key, Sessionless):
                slot = await self._in_its_era(slot, call)
        else:
            self._leave_old(lease)
            slot = self.slot(call, lease.inherited)
            slot.holder = lease.holder
            check = partial(self._wrapped.other_replicas.check, lease)
        try:
            return await self._here(slot, call, asked, check)
        finally:
            if isinstance(slot.key, Sessionless) and slot.key.client is call:
                # No other request is known to be of the same client.
                self._wrapped.children.remove(slot.key)

    async def _here(
        self,
        slot: Slot,
        call: UpstreamCall,
        asked: RemoteRequest,
        check: Callable[[], Awaitable[None]] | None,
    ) -> ServedResult:
        key, sharing = slot.key, self._wrapped.sharing
        method, params = asked.method, asked.params
        if method == method_names.PING and slot.living is None:
            return {}, {}
        if method is None:
            return {}, (await self._discovered(slot, call)).result
        if method in method_names.SUBSCRIPTIONS:
            result = await self._subscribe(slot, call, method, params or {}, check)
        elif method == method_names.LISTEN:
            result = await self._listen(slot, call, Filter(params or {}), check)
        elif isinstance(key, Sessionless):
            find = partial(self.slot, call)
            result = await sharing.request(find, call, asked.sender, method, params)
        else:
            sender = asked.sender if asked.asks is not None else None
            result = await sharing.sent(slot, call, sender, method, params, check)
        child = slot.living
        if child is None and isinstance(key, Sessionless):
            child = sharing.child(call.principal)
        return result, child.result if child is not None else {}

    async def _discovered(self, slot: Slot, call: UpstreamCall) -> Child:
        """Return a child that describes the server. If there is no room for its own, another child
        of its principal outside of sessions gives the same description.
        """
        key, children, other = slot.key, self._wrapped.children, None
        if slot.living is None and isinstance(key, Sessionless):
            if children.room.left < 1:
                other = self._wrapped.sharing.child(call.principal)
        return slot.living or other or await slot.started(call.principal)

    def _leave_old(self, lease: Lease) -> None:
        """End a child of this process from before another process had the session."""
        known = self._wrapped.children.known(lease.session_id)
        if known is None or known.holder == lease.holder:
            return
        if known.holder is not None or lease.inherited is not None:
            self._wrapped.children.remove(lease.session_id)

    async def _subscribe(
        self,
        slot: Slot,
        call: UpstreamCall,
        method: str,
        params: dict[str, Any],
        check: Callable[[], Awaitable[None]] | None,
    ) -> dict[str, Any]:
        """Subscribe or unsubscribe a client. The child is subscribed as long as any client here is,
        if it can be.
        """
        uri, subscribers = params[NAMING[method]], slot.subscribers
        subscribes = method == method_names.SUBSCRIBE
        child = slot.living or await slot.started(call.principal)
        who = self._who(call)
        is_new = subscribes and who not in subscribers.get(uri, ())
        if is_new:
            # Another client may unsubscribe during the wait, and must not unsubscribe the child.
            subscribers.add(who, [uri])
        result: dict[str, Any] = {}
        others = subscribers.get(uri, set()) - {who}
        try:
            if child.has_subscriptions and (subscribes or not others):
                result = await slot.request(call, None, method, params, check)
        except BaseException:
            if is_new:
                subscribers.remove(self._who(call), [uri])
            raise
        # Its session may have begun during the wait.
        change = subscribers.add if subscribes else subscribers.remove
        change(self._who(call), [uri])
        if not (subscribes or others) and uri in subscribers and slot.living is child:
            # Another client subscribed during the wait, and the child may have taken that first.
            child.subscribed.discard(uri)
            await slot.settle([uri], call.principal)
        return result

    async def _listen(
        self,
        slot: Slot,
        call: UpstreamCall,
        wanted: Filter,
        check: Callable[[], Awaitable[None]] | None,
    ) -> dict[str, Any]:
        changed = slot.subscribers.replace(self._who(call), wanted.uris)
        if check is not None:
            await check()
        # Resources of earlier listens are asked for as well: it may be another child.
        await slot.settle(changed | wanted.uris, call.principal)
        return {}

    async def listen(self, call: UpstreamCall, uris: Collection[str]) -> None:
        """Subscribe its session's child to these resources, and to no others.

        Raises:
            UpstreamError: It cannot be started, or the outcome is unknown.
            TimeoutError: It did not answer in the time that its start has.
            StoreUnavailable: It is unknown which process has it.
        """
        wanted = {"notifications": {"resourceSubscriptions": sorted(uris)}}
        async with asyncio.timeout(self._wrapped.children.server.start_timeout + ANSWERING):
            await self._served(call, method_names.LISTEN, wanted, None)

    @asynccontextmanager
    async def listens(
        self, call: UpstreamCall, params: Mapping[str, Any] | None
    ) -> AsyncGenerator[UpstreamCall]:
        """Deliver the changes that a listen outside of sessions wants, as long as it lasts.

        Yields:
            The call to use for the acknowledgement.

        Raises:
            UpstreamError: Its params are malformed, or its child cannot be started.
            LimitReached: It names more than ``max_subscriptions`` resources.
        """
        self._wrapped.shell.validate(method_names.LISTEN, NEWEST_MODERN, params)
        listen = Listen(call, Filter(params or {}))
        most = self._wrapped.max_subscriptions
        if len(listen.uris) > most:
            raise LimitReached("max_subscriptions", most)
        self._pipe = call.client if call.transport == "stdio" else None
        slot = self.slot(call)
        slot.outbounds[listen] = listen
        slot.subscribers.add(listen, listen.uris)
        try:
            await slot.settle(listen.uris, call.principal)
            yield listen.call
        finally:
            self._wrapped.children.remove_listener(slot, listen)
            if isinstance(slot.key, Sessionless) and slot.key.client is call:
                self._wrapped.children.remove(slot.key)

    async def notify(self, call: UpstreamCall, method: str, params: dict[str, Any] | None) -> None:
        """Send a notification to a child that runs and serves this client only (rule 6 of
        ``child.py``).
        """
        if method in _ENDED_HERE:
            return
        key, other_replicas = self._key(call, self._who(call)), self._wrapped.other_replicas
        if other_replicas is not None and isinstance(key, str):
            if await other_replicas.notify(SessionId(key), method, params):
                return
        slot = self.slot(call)
        if slot.living is not None and slot.clients.is_one_client:
            await slot.notify(slot.living, method, params)

    def belongs_to(self, session_id: SessionId) -> None:
        self._session_id = session_id
        if self._wrapped.children.server.names_sessions:
            # The child of this handshake was started without the session's name.
            self._wrapped.children.remove(self)
        else:
            self._wrapped.children.rename(self, session_id)

    async def close(self) -> None:
        """End the connection's child. A session's child continues."""
        if self._session_id is None and self._outbound is not None:
            self._wrapped.children.remove(self)

    async def shakes_hands(self, call: UpstreamCall) -> Child:
        """Return a child for the answer to the handshake: its own, which is started if there is
        none.

        If there is no room for it, it is another child of its principal, whose handshake had a
        client with the same description. A client that reconnects for a session gets the session's
        child later.

        Raises:
            UpstreamError: It cannot be started.
        """
        slot, children = self.slot(call), self._wrapped.children
        alike = None
        if slot.living is None and children.room.left < 1:
            alike = children.alike(slot.client, call.principal)
        return slot.living or alike or await slot.started(call.principal)

    async def _in_its_era(self, slot: Slot, call: UpstreamCall) -> Slot:
        """Return the slot of a request of the modern era. Its child is started, which shows whether
        the server speaks that. Otherwise the request has a child of its client.
        """
        child = slot.living or await slot.started(call.principal)
        if child.is_modern:
            return slot
        self._asks_by_result, self._sessionless = False, None
        return self.slot(call)

    def slot(self, call: UpstreamCall, inherited: Wanted | None = None) -> Slot:
        who = self._who(call)
        key = self._key(call, who)
        make = partial(self._new_slot, key, inherited)
        children = self._wrapped.children
        known = children.known(key)
        if known is not None and known.is_empty:
            # The next child gets the description of this client.
            children.forget(known)
            known = None
        if known is None and inherited is None:
            slot = self._begun(key, call, make)
        else:
            slot = children.slot(key, make)
        if known is not None and known.living is not None and not self._came_back:
            self._came_back = True
            self._leave_unused(known)
        if isinstance(key, Sessionless) and key.client is None and slot.keeps_nothing:
            slot.is_asked_by(client_of(call))
        if self._outbound is not None and self._wrapped.remembers:
            slot.outbounds[who] = self._outbound
        return slot

    def _begun(self, key: Hashable, call: UpstreamCall, make: Callable[[], Slot]) -> Slot:
        """Make a slot. A new session takes the child that its client used before, if that was used
        for nothing else (``sharing.py``).
        """
        children = self._wrapped.children
        own = self._own if self._connection_peer is None else self._connection_peer._own
        is_new = not self._was_served and (
            call.conversation_session is not None or not self._wanted.subscriptions
        )
        if not is_new or self._wrapped.children.server.per != "session":
            return children.slot(key, make)
        if own in (None, key):
            # A client of the modern era used it before it started a session.
            own = self._pipe
        if own is not None and own != key:
            hand_over(children, own, key)
        slot = children.slot(key, make)
        if own in (None, key) and self._asks is not None and not isinstance(key, Sessionless):
            outside = children.known(self._wrapped.sharing.key(call, self._asks, hears=False))
            if outside is not None:
                take_over(children, outside, slot, client_of(call))
        return slot

    def _leave_unused(self, slot: Slot) -> None:
        """Release the child of this connection's handshake: a session that continues here has its
        own.
        """
        own = self._connection_peer._own if self._connection_peer is not None else None
        if own is not None and own != slot.key:
            spare(self._wrapped.children, own)

    @property
    def _own(self) -> Hashable:
        if self._session_id is not None:
            return self._session_id
        return self if self._outbound is not None else None

    def _key(self, call: UpstreamCall, who: Hashable) -> Hashable:
        match self._wrapped.children.server.per:
            case "shared":
                return None
            case "principal":
                return call.principal
            case "session":
                if self._asks is None or not isinstance(who, Principal):
                    return who
                if self._sessionless is None:
                    asks = self._asks if not self._asks_by_result else NOTHING_ASKED
                    self._sessionless = self._wrapped.sharing.key(call, asks, hears=self._hears)
                return self._sessionless

    def _who(self, call: UpstreamCall) -> Hashable:
        if call.conversation_session is not None:
            return call.conversation_session
        if self._session_id is not None:
            return self._session_id
        if self._outbound is not None:
            return self
        # Nobody else is at the other end of a pipe (rule 2 of ``sharing.py``).
        has_own = self._pipe is not None and not self._asks_by_result
        return self._pipe if has_own else call.principal

    def _new_slot(self, key: Hashable, inherited: Wanted | None) -> Slot:
        if self._wrapped.children.server.per == "shared":
            return shared_slot(self._wrapped)
        wanted = self._wanted if inherited is None else inherited
        was_served = self._was_served or inherited is not None
        client = OURS if isinstance(key, Principal) else self._client
        if self._asks is not None:
            # A server of the handshake era learns from it which requests the client accepts. In the
            # modern era it learns that from each request.
            is_modern = isinstance(key, Sessionless) and key.is_modern
            client = {**client, "capabilities": NOTHING_ASKED if is_modern else self._asks}
        services = self._wrapped.children.services
        if isinstance(key, Sessionless):
            if key.is_modern:
                client = {**client, "protocolVersion": NEWEST_MODERN}
            slot = Slot(services, key, client, Clients(key.client is not None, True))
            if key.client is not None:
                slot.is_asked_by(key.client)
            return slot
        if isinstance(key, Principal):
            return Slot(services, key, client, Clients())
        has_session = isinstance(key, (str, ExternalPeer))
        return Slot(
            services,
            key,
            client,
            ONE_CLIENT if has_session else Clients(is_one_client=True, is_sessionless=True),
            was_served,
            subscribers=Subscribers((uri, {key}) for uri in wanted.subscriptions),
            level=wanted.log_level,
        )


def shared_slot(wrapped: Wrapped) -> Slot:
    return Slot(wrapped.children.services, None, OURS, Clients(is_shared=True))


class Listen:
    def __init__(self, call: UpstreamCall, wanted: Filter) -> None:
        self._call = call
        self._wanted = wanted
        self._is_acknowledged = asyncio.Event()

    @property
    def uris(self) -> frozenset[str]:
        return self._wanted.uris

    @property
    def call(self) -> UpstreamCall:
        return notifying_by(self._call, self._acknowledge)

    async def _acknowledge(self, method: str, params: Mapping[str, Any] | None) -> None:
        await self._call.notify(method, params)
        if method == method_names.ACKNOWLEDGED:
            self._is_acknowledged.set()

    async def notify(self, method: str, params: Mapping[str, Any] | None) -> None:
        if (
            method != method_names.RESOURCE_UPDATED
            and method_names.CHANGED_KIND.get(method) not in self._wanted.lists
        ):
            return
        await self._is_acknowledged.wait()
        about = {SUBSCRIPTION_ID: self._call.request_id}
        await self._call.notify(method, with_meta(params, about))

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        raise PeerError(METHOD_NOT_FOUND, "Method not found", asked.method)
