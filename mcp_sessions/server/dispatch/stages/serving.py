"""Run a request: present its client to the wrapped server, which serves it.

A connection is one peer for itself, and one for each session that is used there. A modern-era
request, and one that came on no connection, is a peer of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypedDict

from mcp_sessions import method_names
from mcp_sessions.core.states import Mode
from mcp_sessions.core.visibility import Visibility
from mcp_sessions.ids import SessionId
from mcp_sessions.server.calls.table import Call, Outcome, Stage, stopping
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.connection.connection import ClientConnection, Inbound
from mcp_sessions.server.requests.outbound import (
    ConnectionOutbound,
    LateOutbound,
    SessionOutbound,
    Ways,
)
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import RunningRequest
from mcp_sessions.server.upstream.own_methods import (
    Discovery,
    LogLevel,
    Subscriptions,
    TaskListen,
)
from mcp_sessions.server.upstream.port import (
    NewPeer,
    Outbound,
    Upstream,
    UpstreamPeer,
    Wanted,
    wanted_by,
)
from mcp_sessions.stores.limits import check_subscriptions
from mcp_sessions.stores.record_changes import SetLogLevel
from mcp_sessions.stores.records import SessionRecord


class _Past(TypedDict, total=False):
    wanted: Wanted
    was_served: bool


class UpstreamPeers(Stage):
    def __init__(
        self,
        replica: Replica,
        upstream: Upstream,
        runner: RequestRunner,
        *,
        ways: Ways,
        visibility: Visibility,
        advertise: Callable[[dict[str, Any]], None],
    ) -> None:
        self.upstream = upstream
        self._store, self._policy = replica.store, replica.policy
        self._ways, self._connections = ways, ways.delivery.connections
        self._runner, self._shared = runner, runner.shared
        self._visibility, self._advertise = visibility, advertise
        self._began_at = replica.clock()
        """Sessions made before that were served by another process."""

    def adopt(self, peer: NewPeer, outbound: LateOutbound, connection: ClientConnection) -> None:
        outbound.bind(self._of_connection(connection))
        if connection.transport_session is not None:
            peer.belongs_to(connection.transport_session)
        connection.upstream_peers[None] = peer
        self._connections.add(connection)

    def running(self, call: Call) -> RunningRequest:
        return RunningRequest(
            self._shared, call, partial(self.standalone, call.inbound, call.record)
        )

    def peer_and_call(self, call: Call) -> tuple[UpstreamPeer, RunningRequest]:
        return self.peer_for(call.inbound, call.record), self.running(call)

    async def before(self, call: Call) -> Outcome | None:
        if self._shared.calls.has_ended:
            # Since it was accepted. A key that it recorded is one of a run that never began.
            return stopping()
        request, inbound, record = call.request, call.inbound, call.record
        method, peer = request.method, self.peer_for(inbound, record)
        if inbound.peer.modern:
            if method == method_names.DISCOVER:
                peer = Discovery(peer, self._advertise)
            elif (listen := call.tasking) is not None and listen.ids is not None:
                report = partial(listen.tasks.report, listen.ids, inbound.principal)
                peer = TaskListen(peer, listen.ids, report)
        elif method in method_names.SUBSCRIPTIONS and self._store.remembers:
            remember = self._remember_subscription(inbound, record)
            peer = Subscriptions(peer, self.upstream, remember)
        elif method == method_names.SET_LEVEL and self.upstream.is_outside:
            session_id = _session_of(inbound, record)
            if session_id is not None:

                async def remember_level(level: str) -> None:
                    await self._store.change(session_id, SetLogLevel(level))

                peer = LogLevel(peer, remember_level)
        way = partial(self.standalone, inbound, record)
        running = RunningRequest(self._shared, call, way)
        admitted = call.admitted
        if admitted is not None and admitted.run is not None and call.key is not None:
            self._runner.runs.settle(admitted.run)
        running.start(peer, close_peer=inbound.connection is None or inbound.peer.modern)
        return None

    def peer_for(self, inbound: Inbound, record: SessionRecord | None) -> UpstreamPeer:
        connection = inbound.connection
        if connection is None or inbound.peer.modern:
            outbound = None
            if record is not None:
                outbound = self._of_session(record)
            session_id = record.session_id if record is not None else None
            past = self._past(record)
            if inbound.peer.modern:
                return self.upstream.modern_peer(inbound.peer, outbound, session_id, **past)
            way = outbound or LateOutbound()
            return self.upstream.peer(inbound.peer, way, session_id, is_alone=True, **past)
        session_id = record.session_id if record is not None else None
        known = connection.upstream_peers.get(session_id)
        if known is not None:
            return known
        if record is not None:
            outbound = self._of_session(record)
            self._connections.used(record.session_id, connection)
            past = self._past(record)
            connection_peer = connection.upstream_peers.get(None)
            peer = self.upstream.peer(
                inbound.peer, outbound, record.session_id, connection_peer=connection_peer, **past
            )
        else:
            outbound = self._of_connection(connection)
            session_id = connection.transport_session
            # On a pipe a client may speak before its handshake. The server decides how to answer.
            ready = inbound.peer.initialize_params is not None
            past = self._past(inbound.http.record)
            peer = self.upstream.peer(inbound.peer, outbound, session_id, ready=ready, **past)
            if not ready:
                return peer
            session_id = None
        connection.upstream_peers[session_id] = peer
        return peer

    def standalone(self, inbound: Inbound, record: SessionRecord | None) -> Outbound:
        if record is not None:
            return self._of_session(record)
        if inbound.connection is not None:
            return self._of_connection(inbound.connection)
        return LateOutbound()

    def way_to(self, record: SessionRecord) -> Outbound | None:
        """Return the way to the client of a session of any mode, whichever process serves it. None:
        it has no way of its own.
        """
        match record.mode:
            case Mode.PROTOCOL:
                return self._of_session(record)
            case Mode.TRANSPORT:
                return self._of_connection(self._connections.stored(record))
            case _:
                return None

    def _past(self, record: SessionRecord | None) -> _Past:
        if record is None:
            return {}
        was_served = record.life.created_at < self._began_at
        wanted = wanted_by(record)
        if wanted.subscriptions:
            may_receive = self._visibility.with_rules_in(record.state.values).may_receive
            wanted = wanted._replace(subscriptions=list(filter(may_receive, wanted.subscriptions)))
        return {"wanted": wanted, "was_served": was_served}

    def _of_session(self, record: SessionRecord) -> SessionOutbound:
        return SessionOutbound(self._ways, record)

    def _of_connection(self, connection: ClientConnection) -> ConnectionOutbound:
        return ConnectionOutbound(self._ways, connection)

    def _remember_subscription(
        self, inbound: Inbound, record: SessionRecord | None
    ) -> Callable[[str, bool], Awaitable[bool]]:
        connection, session_id = inbound.connection, _session_of(inbound, record)

        async def remember(uri: str, on: bool) -> bool:
            if session_id is not None:
                change = self._store.subscribe if on else self._store.unsubscribe
                return await change(session_id, uri)
            if connection is None:
                return False
            if on:
                own = self._connections.sessionless_subscriptions(connection)
                check_subscriptions({*own, uri}, self._policy)
            self._connections.subscribe_sessionless(connection, uri, on=on)
            return True

        return remember


def _session_of(inbound: Inbound, record: SessionRecord | None) -> SessionId | None:
    if record is not None:
        return record.session_id
    return inbound.connection.transport_session if inbound.connection is not None else None
