"""Everything that serves one wrapped server, made in one place: each object from those above it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from mcp_sessions.conversations import Conversations
from mcp_sessions.core.availability import Availability
from mcp_sessions.core.visibility import Visibility
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.http_server import HTTPServer
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.security import SessionSecurity, mint_process
from mcp_sessions.serve.draining import Draining
from mcp_sessions.serve.endpoint import Endpoint
from mcp_sessions.serve.health import Health
from mcp_sessions.serve.lifetime import Lifetime
from mcp_sessions.server.audit import Audit
from mcp_sessions.server.cluster.bus import ClusterBus
from mcp_sessions.server.cluster.child_host import ChildHost
from mcp_sessions.server.cluster.children import ChildrenElsewhere
from mcp_sessions.server.cluster.shared_bus import SharedBus
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.hearing import Hearing
from mcp_sessions.server.delivery.owed import Owed
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.admin import Sessions
from mcp_sessions.server.dispatch.capabilities import advertise
from mcp_sessions.server.dispatch.cluster_handlers import ClusterHandlers
from mcp_sessions.server.dispatch.conversations import BoundSessions
from mcp_sessions.server.dispatch.history import History
from mcp_sessions.server.dispatch.joint_admissions import JointAdmissions
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.dispatch.path import Stages
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.dispatch.session_methods import SessionMethods
from mcp_sessions.server.dispatch.stages.association import Association
from mcp_sessions.server.dispatch.stages.audited import Audited
from mcp_sessions.server.dispatch.stages.conversation import Conversation
from mcp_sessions.server.dispatch.stages.handle_tools import HandleTools, LearnedTools
from mcp_sessions.server.dispatch.stages.handler_session import HandlerSession
from mcp_sessions.server.dispatch.stages.idempotency import Idempotency
from mcp_sessions.server.dispatch.stages.serving import UpstreamPeers
from mcp_sessions.server.environment import Environment
from mcp_sessions.server.requests.outbound import Ways
from mcp_sessions.server.requests.outcome import Outcomes
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.silence import LongSilences
from mcp_sessions.server.requests.visibility import check_patterns
from mcp_sessions.server.upstream.external.beginning import Starter
from mcp_sessions.server.upstream.external.declared import DeclaredHeaders
from mcp_sessions.server.upstream.external.upstream import ExternalUpstream, shell_of
from mcp_sessions.server.upstream.handle_argument import HandleArgument
from mcp_sessions.server.upstream.modern_rules import ModernRules
from mcp_sessions.server.upstream.port import Upstream
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.server.upstream.sdk.authentication import Authentication
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, primes_streams
from mcp_sessions.server.upstream.sdk.modern import SdkModernRules
from mcp_sessions.server.upstream.stdio.child import StdioChildren
from mcp_sessions.stdio_server import StdioServer
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.stores.stateless import Stateless
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.http.channel import ResponseStreams
from mcp_sessions_transports.http.cluster import ClusterStreams
from mcp_sessions_transports.http.sse import HttpTransport
from mcp_sessions_transports.http.upstream.children import HttpChildren
from mcp_sessions_transports.origin import SecuritySettings

DRAIN_DELAY = 3.0
"""Seconds in which a proxy's idle connections to this process come to an end, so that none is
closed just when a request is sent on it."""


class Assembly:
    """Holds the parts of one layer, and serves its bindings.

    The bindings see it as a :class:`~mcp_sessions_transports.served.Served`. See also
    :class:`~mcp_sessions.layer.SessionLayer`.

    Raises:
        ConfigurationError: The server cannot be wrapped, the URL names no store, or conversations
            would not be found again; or ``hidden`` is not a collection of patterns; or there is
            ``authentication`` before a server that has its own, or none and the server needs
            scopes.
    """

    def __init__(
        self,
        server: object,
        *,
        store: SessionStore | str | None,
        policy: SessionPolicy,
        security: SessionSecurity | None,
        clock: Callable[[], float],
        conversations: Conversations | None = None,
        hidden: Collection[str] = (),
        authentication: Authentication | None = None,
    ) -> None:
        self.clock = clock
        remembers, declared = store is not None, DeclaredHeaders()
        if isinstance(server, ExternalServer):
            self.shell = shell_of(server, remembers=remembers)
            self.rules: ModernRules = SdkModernRules(self.shell, declared.of)
        else:
            self.shell = SdkUpstream(server, adds_subscriptions=remembers)
            self.rules = SdkModernRules(self.shell)
        if authentication is not None and self.shell.authenticates:
            raise ConfigurationError(
                "the server has authentication of its own: it needs no second one"
            )
        needed: Mapping[str, Collection[str]] = {}
        if isinstance(server, ExternalServer) and server.asks_for_scopes:
            if authentication is None:
                raise ConfigurationError("scopes need authentication, such as --api-keys FILE")
            needed = server.tool_scopes
            authentication = authentication.requiring(server.scopes)
        self.authentication = authentication
        security = (security or SessionSecurity.default()).bound_to(self.shell.name)
        self.security = security
        try:
            check_patterns("hidden", hidden)
        except TypeError as wrong:
            raise ConfigurationError(str(wrong)) from None
        pseudonym = partial(security.pseudonym, "hidden")
        visibility = Visibility(pseudonym, tuple(hidden), needed=needed)
        if store is None:
            store = Stateless(security)
        elif isinstance(store, str):
            store = open_store(store)
        if conversations is not None:
            _check_conversations(store, security)
        if policy.forget_after is None and store.remembers and store.survives_process:
            # What sleeps there costs little, and whoever comes back finds it.
            policy = replace(policy, forget_after=FORGET_AFTER)
        self.policy = policy
        self.store, self.remembers = store, store.remembers
        self.bus = bus = _bus(store)
        environment = Environment(store, bus, policy, clock)
        upstream: Upstream = self.shell
        external = elsewhere = None
        if store.exchange is not None:
            elsewhere = ChildrenElsewhere(bus, store, store.exchange)
        if isinstance(server, ExternalServer):
            lasting = store.remembers and store.survives_process
            starter = _starter(server, policy.max_answer, lasting=lasting)
            upstream = external = ExternalUpstream(
                server,
                starter,
                self.shell,
                elsewhere,
                policy,
                declared,
                remembers=remembers,
            )
        self.upstream = upstream
        """The wrapped server."""

        self.external = external
        """The same if it is outside of this process."""

        add_capabilities = partial(advertise, policy=policy, remembers=store.remembers)

        owed = Owed()
        self.sealed = sealed = SealedState(store, security, clock)
        process = bus.process if bus.is_shared else None
        rounds = None
        if external is None and policy.question_timeout:
            rounds = Rounds(policy, None, process, elsewhere)
        self.questions = questions = PendingQuestions(process, rounds)
        streams = partial(StreamLog, store, clock)

        def new_connection(record: SessionRecord, peer: Peer) -> StoredConnection:
            primes = primes_streams(peer.protocol_version)
            responses = ResponseStreams(record.session_id, streams, policy, primes)
            transport = HttpTransport(responses, policy, bus.is_shared)
            return StoredConnection(record, peer, transport, store=store, clock=clock, bus=bus)

        self.connections = connections = ConnectionRegistry(store, clock, bus, new_connection)
        self.attachments = attachments = Attachments(
            store, connections, questions, bus, owed, clock
        )
        self.publisher = publisher = Publisher(
            store, connections, attachments, policy, clock, bus, questions
        )
        hearing = Hearing(store, connections, visibility)
        self.broadcaster = broadcaster = ChangeBroadcaster(
            store,
            connections,
            attachments,
            publisher,
            policy,
            clock,
            bus,
            hearing if hidden else None,
        )
        outcomes = Outcomes(store, policy, clock, owed, sealed.stamp)
        self.runner = runner = RequestRunner(outcomes, questions, policy, process=bus.process)
        self._audit = audit = Audit(security, bus.process)
        self.lifecycle = lifecycle = Lifecycle(
            store,
            connections,
            attachments,
            runner,
            sealed,
            bus,
            owed,
            History(store, audit, policy, clock),
            policy,
            clock,
            upstream.session_over,
            conversations is not None,
        )
        self.transport_sessions = TransportSessions(
            store, connections, attachments, clock, bus, runner.held, upstream.listed
        )
        ways = Ways(store, connections, publisher, questions, hearing, runner.spawn)
        peers = UpstreamPeers(
            environment,
            upstream,
            runner,
            ways=ways,
            visibility=visibility,
            advertise=add_capabilities,
        )
        self.conversations = bound = argument = None
        if conversations is not None:
            if conversations.handle:
                argument = HandleArgument(
                    sorted(set(conversations.handle)), conversations.handle_name
                )
            self.conversations = bound = BoundSessions(
                conversations,
                store,
                lifecycle,
                security,
                argument,
                clock,
                runner.held,
                visibility,
            )
        association = Association(store, connections, attachments, runner, sealed, clock)
        idempotency = Idempotency(runner, association, sealed, bus, policy.request_key_bytes)
        self.joint_admissions = None
        if store.exchange is not None:
            self.joint_admissions = JointAdmissions(connections, runner, idempotency)
        stages = Stages(
            Audited(audit),
            SessionMethods(store, attachments, runner.held, lifecycle, sealed, clock),
            association,
            HandlerSession(
                environment,
                publisher,
                connections,
                attach=association.attach_if_free,
                check_token=sealed.check_state,
                visibility=visibility,
            ),
            peers,
            idempotency if store.remembers else None,
            Conversation(bound) if bound is not None else None,
            (LearnedTools(argument, bound, peers), HandleTools(argument, bound))
            if argument is not None and bound is not None
            else None,
        )
        self.router = Router(
            environment,
            runner,
            stages,
            joining=idempotency.joining,
            questions=questions,
            peers=peers,
            advertise=add_capabilities,
            visibility=visibility,
        )
        self.listening = Listening(
            store, attachments, runner, peers, self.router, sealed, upstream, visibility
        )
        self.sessions = Sessions(store, clock, lifecycle.finish)
        children = None
        if elsewhere is not None and (external is not None or rounds is not None):
            children = elsewhere, ChildHost(bus, store, elsewhere, external, rounds, peers.way_to)
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
            ClusterStreams(connections, bus, self.transport_sessions, runner.calls, policy, clock),
            lifecycle.forget_here,
            upstream.echo,
            children,
        )
        self.endpoints: list[Endpoint] = []
        self.availability = availability = Availability()
        self.health = Health(store, clock, availability)
        self.draining = draining = Draining(
            self.endpoints,
            store,
            connections,
            attachments,
            runner,
            owed,
            policy,
            bus,
            availability,
            upstream,
            children[1] if children is not None else None,
        )
        self.lifetime = Lifetime(
            store,
            policy,
            security,
            upstream,
            bus,
            handlers,
            lifecycle,
            LongSilences(runner, policy.progress_every, clock),
            broadcaster,
            draining,
            availability,
            argument,
        )

    @property
    def authenticates(self) -> bool:
        """Whether each HTTP request to the endpoint needs a credential."""
        return self.authentication is not None or self.shell.authenticates

    def endpoint(
        self,
        *,
        path: str,
        host: str,
        security: SecuritySettings | None,
        max_body: int | None = None,
        application: Callable[[], ASGIApp] | None = None,
    ) -> Endpoint:
        """An endpoint of this layer, which drains with it; arguments and errors are those of
        :class:`Endpoint`.
        """
        endpoint = Endpoint(
            self.shell,
            self,
            self.clock,
            path=path,
            host=host,
            security=security,
            max_body=self.policy.max_message if max_body is None else max_body,
            application=application,
            authentication=self.authentication,
            denied=self._audit.denied,
        )
        self.endpoints.append(endpoint)
        return endpoint


def _check_conversations(store: SessionStore, security: SessionSecurity) -> None:
    if not store.remembers:
        raise ConfigurationError("conversations need a store; this layer has none")
    if security.is_ephemeral and (store.survives_process or store.exchange is not None):
        raise ConfigurationError(
            "the sessions of conversations outlive this process, but the keys by which they are "
            "found do not: set MCP_SESSIONS_KEYS"
        )


def _starter(server: ExternalServer, longest: int, *, lasting: bool) -> Starter:
    if isinstance(server, HTTPServer):
        return HttpChildren(server, longest)
    if isinstance(server, StdioServer):
        return StdioChildren(server, longest, lasting=lasting)
    raise ConfigurationError(f"cannot wrap {type(server).__name__}")


def _bus(store: SessionStore) -> ClusterBus:
    process, exchange = mint_process(), store.exchange
    return ClusterBus(process) if exchange is None else SharedBus(store, exchange, process)
