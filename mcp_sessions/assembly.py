"""Everything that serves one wrapped server, made in one place: each object from those above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mcp_sessions.conversations import Conversations
from mcp_sessions.core.availability import Availability
from mcp_sessions.draining import Draining
from mcp_sessions.endpoint import Endpoint
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.health import Health
from mcp_sessions.lifetime import Lifetime
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity, mint_process
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.handlers import ClusterHandlers
from mcp_sessions.server.cluster.shared_bus import SharedBus
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.admin import Sessions
from mcp_sessions.server.dispatch.association import Associations
from mcp_sessions.server.dispatch.capabilities import advertise
from mcp_sessions.server.dispatch.conversations import BoundSessions
from mcp_sessions.server.dispatch.idempotency import Idempotency
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.dispatch.session_methods import SessionMethods
from mcp_sessions.server.requests.handle import SessionHandles
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.running import Outcomes
from mcp_sessions.server.upstream.peers import UpstreamPeers
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, primes_streams
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.stores.stateless import Stateless
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.credentials import CredentialWatch, StillValid
from mcp_sessions_transports.http.cluster import ClusterStreams
from mcp_sessions_transports.http.transport import HttpTransport
from mcp_sessions_transports.served import Served

MAX_BODY = 4 * 1024 * 1024
"""Bytes of one HTTP request body; a larger one is answered 413."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What one layer consists of."""

    policy: SessionPolicy
    security: SessionSecurity
    store: SessionStore
    clock: Callable[[], float]
    upstream: SdkUpstream
    bus: ClusterBus
    sealed: SealedState
    questions: PendingQuestions
    connections: ConnectionRegistry
    attachments: Attachments
    publisher: Publisher
    broadcaster: ChangeBroadcaster
    runner: RequestRunner
    lifecycle: Lifecycle
    router: Router
    listening: Listening
    transport_sessions: TransportSessions
    conversations: BoundSessions | None
    associations: Associations
    sessions: Sessions
    endpoints: list[Endpoint]
    availability: Availability
    draining: Draining
    lifetime: Lifetime
    health: Health

    def served(self, max_body: int, still_valid: StillValid | None) -> Served:
        """What a binding serves, and with what.

        Args:
            max_body: Bytes of one HTTP request body.
            still_valid: Asks again whether a credential is good; None: there are none.
        """
        return Served(
            router=self.router,
            connections=self.connections,
            attachments=self.attachments,
            runner=self.runner,
            lifecycle=self.lifecycle,
            listening=self.listening,
            transport_sessions=self.transport_sessions,
            conversations=self.conversations,
            policy=self.policy,
            remembers=self.store.remembers,
            availability=self.availability,
            max_body=max_body,
            credentials=CredentialWatch(still_valid, self.policy.credential_check, self.clock),
            bus=self.bus,
        )


def assemble(
    server: object,
    *,
    store: SessionStore | str | None,
    policy: SessionPolicy,
    security: SessionSecurity | None,
    clock: Callable[[], float],
    conversations: Conversations | None = None,
) -> Assembly:
    """Make what serves ``server``; see :class:`~mcp_sessions.layer.SessionLayer`.

    Raises:
        ConfigurationError: The server cannot be wrapped, the URL names no store, or conversations
            would not be found again.
    """
    upstream = SdkUpstream(server, adds_subscriptions=store is not None)
    security = (security or SessionSecurity.default()).bound_to(upstream.name)
    if store is None:
        store = Stateless(security)
    elif isinstance(store, str):
        store = open_store(store)
    if conversations is not None:
        _check_conversations(store, security)
    bus = _bus(store)
    add_capabilities = partial(advertise, policy=policy, remembers=store.remembers)

    owed = Owed()
    sealed = SealedState(store, security, clock)
    questions = PendingQuestions(bus.process if bus.is_shared else None)
    streams = partial(StreamLog, store, clock)

    def new_connection(record: SessionRecord, peer: Peer) -> StoredConnection:
        transport = HttpTransport(
            record.session_id,
            streams,
            policy,
            primes=primes_streams(peer.protocol_version),
            is_shared=bus.is_shared,
        )
        return StoredConnection(record, peer, transport, store=store, clock=clock, bus=bus)

    connections = ConnectionRegistry(store, clock, bus, new_connection)
    attachments = Attachments(store, connections, questions, bus, owed, clock)
    publisher = Publisher(store, connections, attachments, policy, clock, bus, questions)
    broadcaster = ChangeBroadcaster(store, connections, attachments, publisher, policy, clock, bus)
    outcomes = Outcomes(store, policy, clock, owed, sealed.stamp)
    runner = RequestRunner(outcomes, questions, policy, process=bus.process)
    lifecycle = Lifecycle(store, connections, attachments, runner, sealed, bus, owed, policy, clock)
    transport_sessions = TransportSessions(
        store, connections, attachments, clock, bus, runner.held, upstream.listed
    )
    peers = UpstreamPeers(
        upstream, store, connections, publisher, runner, questions, policy, add_capabilities
    )
    bound = None
    if conversations is not None:
        bound = BoundSessions(conversations, store, lifecycle, security, clock, runner.held)
    associations = Associations(store, connections, attachments, runner, sealed, clock, bound)
    idempotency = Idempotency(runner, associations, sealed, bus)
    methods = SessionMethods(store, attachments, runner, lifecycle, sealed, clock)
    router = Router(
        store,
        connections,
        runner,
        questions,
        upstream,
        peers,
        associations,
        idempotency,
        methods,
        SessionHandles(store, publisher, policy, clock, sealed.check_state),
        policy,
        add_capabilities,
        clock,
        bus,
    )
    handlers = ClusterHandlers(
        bus,
        store,
        connections,
        attachments,
        publisher,
        broadcaster,
        questions,
        runner,
        idempotency.joining,
        ClusterStreams(connections, runner, bus, transport_sessions, policy, clock),
        lifecycle.forget_here,
        upstream.echo,
    )
    endpoints: list[Endpoint] = []
    availability = Availability()
    draining = Draining(
        endpoints, store, connections, attachments, runner, owed, policy, bus, availability
    )
    lifetime = Lifetime(
        store,
        policy,
        security,
        upstream,
        bus,
        handlers,
        lifecycle,
        broadcaster,
        draining,
        availability,
    )
    return Assembly(
        policy=policy,
        security=security,
        store=store,
        clock=clock,
        upstream=upstream,
        bus=bus,
        sealed=sealed,
        questions=questions,
        connections=connections,
        attachments=attachments,
        publisher=publisher,
        broadcaster=broadcaster,
        runner=runner,
        lifecycle=lifecycle,
        router=router,
        transport_sessions=transport_sessions,
        conversations=bound,
        listening=Listening(store, attachments, router, sealed, upstream),
        associations=associations,
        sessions=Sessions(store, clock, lifecycle.finish),
        endpoints=endpoints,
        availability=availability,
        draining=draining,
        lifetime=lifetime,
        health=Health(store, clock, availability),
    )


def _check_conversations(store: SessionStore, security: SessionSecurity) -> None:
    if not store.remembers:
        raise ConfigurationError("conversations need a store; this layer has none")
    if security.is_ephemeral and (store.survives_process or store.exchange is not None):
        raise ConfigurationError(
            "the sessions of conversations outlive this process, but the keys by which they are "
            "found do not: set MCP_SESSIONS_KEYS"
        )


def _bus(store: SessionStore) -> ClusterBus:
    process, exchange = mint_process(), store.exchange
    return ClusterBus(process) if exchange is None else SharedBus(store, exchange, process)
