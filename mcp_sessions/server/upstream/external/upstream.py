"""Implement the port to a wrapped server outside of this process.

A bare server of the SDK stands in if the wrapped server has no part. It checks a client's
handshake. It also has the bus on which modern-era clients outside of any session listen for
changes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mcp_sessions import method_names
from mcp_sessions.background import Background
from mcp_sessions.core.client_description import ENVELOPE, described
from mcp_sessions.core.messages import error_body, members_of, meta_of, with_meta
from mcp_sessions.errors import METHOD_NOT_FOUND
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.ids import SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.server.upstream.accepted_questions import Askable, asks_of
from mcp_sessions.server.upstream.external.child_spans import Spans
from mcp_sessions.server.upstream.external.children import Children, Tried
from mcp_sessions.server.upstream.external.other_replicas import OtherReplicas
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders
from mcp_sessions.server.upstream.external.peer import OURS, ExternalPeer, Wrapped, shared_slot
from mcp_sessions.server.upstream.external.sharing import Sharing
from mcp_sessions.server.upstream.external.starts import Starter
from mcp_sessions.server.upstream.port import (
    NOTHING_WANTED,
    Outbound,
    UpstreamCall,
    UpstreamError,
    UpstreamPeer,
    Wanted,
)
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.server.upstream.sdk.kernel import (
    HANDSHAKE_VERSIONS,
    SdkUpstream,
    advertise_subscriptions,
    bare_server,
)
from mcp_sessions.stores.records import Peer

Json = dict[str, Any]

logger = logging.getLogger(__name__)


class ExternalUpstream:
    keeps_state_in_memory = False
    is_outside = True

    def __init__(
        self,
        server: ExternalServer,
        starter: Starter,
        shell: SdkUpstream,
        *,
        other_replicas: OtherReplicas | None,
        policy: SessionPolicy,
        declared: DeclaredHeaders,
        rounds: Rounds,
        remembers: bool,
        prefers_modern: bool = False,
    ) -> None:
        self._asks_clients = policy.question_timeout > 0
        reachable = other_replicas if server.per == "session" else None
        away = rounds.give_up_oldest, rounds.gives_up_at
        self.children = Children(
            *(server, starter, HANDSHAKE_VERSIONS, OURS, shell.publish),
            *away,
            prefers_modern=prefers_modern,
        )
        self._trials = Background()
        self._wrapped = Wrapped(
            shell,
            self.children,
            Sharing(self.children, rounds),
            declared,
            Spans(),
            reachable,
            remembers,
            policy.max_subscriptions,
        )

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        async with self._wrapped.shell.lifespan():
            self._wrapped.spans.look()
            self.children.run()
            self._try()
            try:
                yield
            finally:
                await self._trials.close()
                await self.children.close()

    def use(self, server: ExternalServer) -> None:
        self.children.use(server)
        self._try()

    def _try(self) -> None:
        children = self.children
        if children.server.try_at_start and not children.starter.start_first():
            slot = None
            if children.server.per == "shared":
                # All clients get its child.
                slot = children.slot(None, lambda: shared_slot(self._wrapped))
            first = children.warn_unless_it_starts(slot)
            self._trials.run("the first start of a server", first)

    async def try_once(self) -> Tried:
        """Start a child once, and stop it.

        Raises:
            UpstreamError: It cannot be started.
        """
        return await self.children.try_once()

    def peer(
        self,
        peer: Peer,
        outbound: Outbound,
        session_id: SessionId | None,
        *,
        ready: bool = True,
        is_alone: bool = False,
        connection_peer: UpstreamPeer | None = None,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> UpstreamPeer:
        if not ready:
            return self._wrapped.shell.peer(peer, outbound, session_id, ready=False)
        client = {**OURS, **(peer.initialize_params or {})}
        client["protocolVersion"] = peer.protocol_version
        way = None if is_alone and session_id is None else outbound
        outside = connection_peer if isinstance(connection_peer, ExternalPeer) else None
        return ExternalPeer(self._wrapped, client, way, session_id, wanted, was_served, outside)

    async def initialize(
        self, call: UpstreamCall, params: dict[str, Any] | None, outbound: Outbound
    ) -> tuple[dict[str, Any], Peer, ExternalPeer]:
        # This refuses params that are no handshake.
        _, checked, stand_in = await self._wrapped.shell.initialize(call, params, outbound)
        await stand_in.close()
        peer = ExternalPeer(self._wrapped, described(params), outbound, None, NOTHING_WANTED, False)
        try:
            child = await peer.shakes_hands(call)
        except BaseException:
            await peer.close()
            raise
        result = dict(child.result)
        if self.children.server.per != "session":
            result["protocolVersion"] = min(checked.protocol_version, result["protocolVersion"])
        result["capabilities"] = deepcopy(dict(child.capabilities))
        if self._wrapped.remembers:
            advertise_subscriptions(result["capabilities"])
        return result, Peer(result["protocolVersion"], described(params)), peer

    def modern_peer(
        self,
        peer: Peer,
        outbound: Outbound | None,
        session_id: SessionId | None,
        *,
        wanted: Wanted = NOTHING_WANTED,
        was_served: bool = False,
    ) -> UpstreamPeer:
        may_ask = self.children.server.per == "session" and self._asks_clients
        capabilities = peer.capabilities
        asks: Askable = asks_of(capabilities) if may_ask else {}
        client = {**OURS, **(peer.initialize_params or {}), "capabilities": capabilities}
        outside = ExternalPeer(
            self._wrapped, client, outbound, session_id, wanted, was_served, None, asks
        )
        shell = partial(self._wrapped.shell.modern_peer, peer, outbound, session_id)
        return ModernPeer(outside, shell, self._wrapped.remembers)

    def validate(self, method: str, version: str, params: Mapping[str, Any] | None) -> None:
        self._wrapped.shell.validate(method, version, params)

    def serves(self, method: str) -> bool:
        """Return True: a child itself answers for methods that it does not serve."""
        return True

    def listed(self) -> frozenset[str]:
        known = self.children.capabilities
        return frozenset(name for name in method_names.LISTED if known is None or name in known)

    async def listed_tools(self) -> None:
        """Return None: no process runs before a client asks."""

    def on_change(
        self, listener: Callable[[str, Mapping[str, Any] | None, bool], None]
    ) -> Callable[[], None]:
        return self._wrapped.shell.on_change(listener)

    async def publish(self, method: str, params: Mapping[str, Any] | None) -> bool:
        return await self._wrapped.shell.publish(method, params)

    async def echo(self, method: str, params: Mapping[str, Any] | None) -> None:
        await self._wrapped.shell.echo(method, params)

    async def leave(self, grace: float) -> None:
        await self.children.leave(grace)

    async def listen(self, peer: UpstreamPeer, call: UpstreamCall, uris: Collection[str]) -> None:
        if not isinstance(peer, ModernPeer):
            raise AssertionError("only a client of the modern era listens")
        try:
            await peer.external.listen(call, uris)
        except TimeoutError:
            logger.warning(
                "a listen gets no resource updates for now: its server starts too slowly"
            )
        except UpstreamError as failed:
            said = failed.error.get("message")
            logger.warning("a listen gets no resource updates for now: %s", said)

    async def session_ended(self, session_id: SessionId, *, sleeps: bool = False) -> None:
        if self._wrapped.other_replicas is not None:
            self._wrapped.other_replicas.release(session_id)
        self.children.remove(session_id)
        if not sleeps:
            self.children.starter.session_ended(session_id)

    def hosted(
        self,
        client: Mapping[str, Any],
        outbound: Outbound | None,
        session_id: SessionId | None,
        asks: Askable | None,
        *,
        wanted: Wanted,
    ) -> ExternalPeer:
        asks = asks_of(asks) if asks is not None else None
        return ExternalPeer(self._wrapped, client, outbound, session_id, wanted, False, None, asks)

    async def notify_here(
        self, session_id: SessionId, method: str, params: Mapping[str, Any] | None
    ) -> None:
        slot = self.children.known(session_id)
        if slot is not None and slot.living is not None:
            await slot.notify(slot.living, method, params)


def shell_of(server: ExternalServer, *, remembers: bool) -> SdkUpstream:
    return SdkUpstream(bare_server(server.identity), adds_subscriptions=remembers)


_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"
_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
_REMOVED: Final = method_names.SUBSCRIPTIONS | {
    method_names.INITIALIZE,
    method_names.PING,
    method_names.SET_LEVEL,
}
"""Methods of the handshake era that the modern era removed."""

_CACHED: Final = method_names.LISTING | {method_names.READ_RESOURCE}
"""Methods whose modern-era results say how long they are valid."""


@dataclass(eq=False)
class ModernPeer:
    """A client of the modern era, for one request. Its child speaks the handshake era."""

    external: ExternalPeer
    _make_shell: Callable[[], UpstreamPeer]
    """Makes the object that serves methods without a child. Most requests need none."""

    _adds_subscriptions: bool
    """Whether the layer sends changes, whatever the server does."""

    _shell: UpstreamPeer | None = None

    async def request(
        self, call: UpstreamCall, method: str, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        if method == method_names.LISTEN:
            async with self.external.listens(call, params) as acknowledging:
                return await self._stand_in().request(acknowledging, method, params)
        if method == method_names.DISCOVER:
            return await self._discover(call, params)
        if method in _REMOVED:
            raise UpstreamError(error_body(METHOD_NOT_FOUND, "Method not found", method))
        meta = meta_of(params)
        level = meta.get(_LOG_LEVEL)
        left = {name: value for name, value in (params or {}).items() if name != "_meta"}
        others = {name: value for name, value in meta.items() if name not in ENVELOPE}
        if others:
            left["_meta"] = others
        least = level if isinstance(level, str) else None
        result, handshake = await self.external.served(call, method, left, least)
        result = {"resultType": "complete", **result}
        is_good_for_a_while = method in _CACHED and result["resultType"] == "complete"
        return _stamped(result, handshake, is_good_for_a_while)

    async def _discover(self, call: UpstreamCall, params: dict[str, Any] | None) -> dict[str, Any]:
        result = await self._stand_in().request(call, method_names.DISCOVER, params)
        _, handshake = await self.external.served(call, None, None, None)
        result["capabilities"] = deepcopy(dict(members_of(handshake.get("capabilities"))))
        if self._adds_subscriptions:
            advertise_subscriptions(result["capabilities"])
        result.pop("instructions", None)
        if "instructions" in handshake:
            result["instructions"] = handshake["instructions"]
        return _stamped(result, handshake, True)

    async def notify(self, call: UpstreamCall, method: str, params: dict[str, Any] | None) -> None:
        """Do nothing: the modern era has no notifications to a server."""

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()

    def _stand_in(self) -> UpstreamPeer:
        if self._shell is None:
            self._shell = self._make_shell()
        return self._shell


def _stamped(
    result: dict[str, Any], handshake: Mapping[str, Any], is_cached: bool
) -> dict[str, Any]:
    info = handshake.get("serverInfo")
    if info is not None:
        result = with_meta(result, {_SERVER_INFO: info})
    return {"ttlMs": 0, "cacheScope": "private", **result} if is_cached else result
