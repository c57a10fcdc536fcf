"""Make everything that serves one wrapped server: each object from those above it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mcp_sessions.conversations import Conversations
from mcp_sessions.core.availability import Availability
from mcp_sessions.core.conversation_keys import Rule, place_of
from mcp_sessions.core.visibility import Visibility
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer, HTTPServer, StdioServer
from mcp_sessions.ids import GET_STREAM, replica_name
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.policy import DEFAULT_GRACE, FORGET_AFTER
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.security import SessionSecurity, mint_process
from mcp_sessions.serve.draining import Draining
from mcp_sessions.serve.endpoint import Endpoint, EndpointSettings
from mcp_sessions.serve.health import Health
from mcp_sessions.serve.lifespan import Lifespan, Preparation
from mcp_sessions.serve.sealing_key_file import encrypted_store, key_path_of
from mcp_sessions.server.cluster.child_host import ChildHost
from mcp_sessions.server.cluster.codec import VERSION
from mcp_sessions.server.cluster.fleet import Fleet
from mcp_sessions.server.cluster.relay import RequestRelay
from mcp_sessions.server.cluster.remote_children import RemoteChildren
from mcp_sessions.server.cluster.replica import ClusterBus, Replica
from mcp_sessions.server.cluster.shared_bus import SharedBus
from mcp_sessions.server.delivery.attachments import Attachments
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.delivery.connections import ConnectionRegistry
from mcp_sessions.server.delivery.delivery import Delivery
from mcp_sessions.server.delivery.hidden_updates import HiddenUpdates
from mcp_sessions.server.delivery.pending_writes import PendingWrites
from mcp_sessions.server.delivery.publisher import Publisher
from mcp_sessions.server.delivery.questions import PendingQuestions, RemoteQuestions
from mcp_sessions.server.delivery.stored_connection import StoredConnection
from mcp_sessions.server.delivery.streams import StreamLog
from mcp_sessions.server.delivery.transport_sessions import TransportSessions
from mcp_sessions.server.dispatch.admin import Sessions
from mcp_sessions.server.dispatch.capabilities import advertise
from mcp_sessions.server.dispatch.cluster_handlers import ClusterHandlers, RelayedRequests
from mcp_sessions.server.dispatch.conversation_sessions import ConversationSessions
from mcp_sessions.server.dispatch.history import History
from mcp_sessions.server.dispatch.joint_admissions import JointAdmissions
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.listening import Listening
from mcp_sessions.server.dispatch.own_facts import Gauges, OwnFacts
from mcp_sessions.server.dispatch.path import Features, Stages
from mcp_sessions.server.dispatch.router import Router
from mcp_sessions.server.dispatch.sealed_state import SealedState
from mcp_sessions.server.dispatch.stages.association import Association
from mcp_sessions.server.dispatch.stages.audited import Audited
from mcp_sessions.server.dispatch.stages.conversation_stage import (
    ConversationStage,
    HandleTools,
    LearnedTools,
)
from mcp_sessions.server.dispatch.stages.handler_session import HandlerSession
from mcp_sessions.server.dispatch.stages.host_keys import HostKeys, KeyOutside
from mcp_sessions.server.dispatch.stages.idempotency import Idempotency
from mcp_sessions.server.dispatch.stages.serving import UpstreamPeers
from mcp_sessions.server.dispatch.stages.session_methods import SessionMethods
from mcp_sessions.server.dispatch.stages.tasks import TaskCalls, TaskMethods, TaskTools
from mcp_sessions.server.reporting.audit import Audit
from mcp_sessions.server.reporting.store_watch import StoreWatch
from mcp_sessions.server.reporting.stories import Stories
from mcp_sessions.server.requests.long_calls import LongSilences
from mcp_sessions.server.requests.outbound import Ways
from mcp_sessions.server.requests.outcome import Outcomes
from mcp_sessions.server.requests.runner import RequestRunner
from mcp_sessions.server.requests.session_visibility import check_patterns
from mcp_sessions.server.requests.tasks import Tasks
from mcp_sessions.server.upstream.external.command import StdioChildren
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders
from mcp_sessions.server.upstream.external.starts import Starter
from mcp_sessions.server.upstream.external.upstream import ExternalUpstream, shell_of
from mcp_sessions.server.upstream.external.url import HttpChildren
from mcp_sessions.server.upstream.handle_argument import HandleArgument
from mcp_sessions.server.upstream.modern_rules import ModernRules
from mcp_sessions.server.upstream.port import Upstream
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.server.upstream.sdk.authentication import Authentication, OnDenied
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, primes_streams
from mcp_sessions.server.upstream.sdk.sdk_modern_rules import SdkModernRules
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.stores.stateless import Stateless
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.http.channel import ResponseStreams
from mcp_sessions_transports.http.cluster_streams import ClusterStreams
from mcp_sessions_transports.http.endpoint import Arrivals
from mcp_sessions_transports.http.sse import HttpTransport

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
        settings: LayerSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        conversations, tasks = settings.conversations, settings.tasks
        self.clock = clock
        self.eras: Eras = settings.eras
        # Each part is made of those before it.
        declared = DeclaredHeaders()
        if isinstance(server, ExternalServer):
            self.shell = shell_of(server, remembers=settings.store is not None)
        else:
            self.shell = SdkUpstream(server, adds_subscriptions=settings.store is not None)
        schema_of = declared.schema_of if isinstance(server, ExternalServer) else None
        self.rules: ModernRules = SdkModernRules(self.shell, schema_of, eras=self.eras)
        self.authentication, needed = _admitting(server, settings.authentication(), self.shell)
        self.security = (settings.security or SessionSecurity.default()).bound_to(self.shell.name)
        self._visibility = _visibility_of(settings.hidden, self.security, needed)
        self._replica = replica = _replica_of(settings, self.security, clock)
        self.store, self.bus, self.policy = replica.store, replica.bus, replica.policy
        self.remembers = self.store.remembers
        if conversations is not None:
            _check_conversations(self.store, self.security)
        if tasks is not None and not self.remembers:
            raise ConfigurationError(
                "tasks need a store: make the layer with one instead of store=None"
            )

        self._request_keys = _places_of(settings.request_keys, remembers=self.remembers)
        self._relay = RequestRelay(self.bus)
        self._remote_children: RemoteChildren | None = None
        """The children of other replicas."""

        if self.store.exchange is not None:
            self._remote_children = RemoteChildren(self._relay, self.store, self.store.exchange)
        room = server.max_children if isinstance(server, ExternalServer) else None
        process = self.bus.process if self.bus.is_shared else None
        rounds = Rounds(self.policy, room, process, other_replicas=self._remote_children)
        self._rounds = rounds if self.policy.question_timeout else None
        """The questions that clients of the 2026 era answer with their next request."""

        self.external: ExternalUpstream | None = None
        """The wrapped server if it is outside of this process."""

        if isinstance(server, ExternalServer):
            self.external = self._outside(server, declared, rounds)
        self.upstream: Upstream = self.shell if self.external is None else self.external
        self._delivery = delivery = self._delivered()
        self.connections, self.attachments = delivery.connections, delivery.attachments
        self.publisher, self.broadcaster = delivery.publisher, delivery.broadcaster
        self.questions = delivery.questions
        self.sealed = SealedState(self.store, self.security, clock)
        self.runner = runner = RequestRunner(
            Outcomes(replica, delivery.pending_writes, stamp=self.sealed.stamp),
            delivery.questions,
            self.policy,
            process=replica.process,
            tasks=Tasks(replica, tasks, self.publisher.publish) if tasks is not None else None,
        )
        self.transport_sessions = TransportSessions(
            replica,
            delivery.connections,
            delivery.attachments,
            broadcaster=delivery.broadcaster,
            held=runner.held,
            listed=self.upstream.listed,
        )
        self._audit = Audit(
            self.security,
            replica.process,
            runner.shared.names,
            names_keys=settings.audit_key_names,
        )
        self._store_watch = StoreWatch(self.store, clock)
        self._gauges = Gauges(replica, delivery, runner, self._store_watch)
        self.lifecycle = Lifecycle(
            replica,
            delivery,
            runner,
            sealed=self.sealed,
            history=History(replica, self._audit),
            session_ended=self.upstream.session_ended,
            binds=conversations is not None,
            measure=self._gauges.measure,
        )
        self.sessions = Sessions(self.store, clock, self.lifecycle.finish)
        self.conversations = self._bound(conversations) if conversations is not None else None
        self._dispatch()
        self._serve()

    def _outside(
        self, server: ExternalServer, declared: DeclaredHeaders, rounds: Rounds
    ) -> ExternalUpstream:
        lasting = self.store.remembers and self.store.survives_process
        return ExternalUpstream(
            server,
            _starter(server, self.policy.max_answer, lasting=lasting),
            self.shell,
            other_replicas=self._remote_children,
            policy=self.policy,
            declared=declared,
            rounds=rounds,
            remembers=self.store.remembers,
            prefers_modern=self.eras == "2026",
        )

    def _delivered(self) -> Delivery:
        replica, store, bus, policy = self._replica, self.store, self.bus, self.policy
        pending_writes = PendingWrites()
        questions = PendingQuestions(bus.process if bus.is_shared else None, self._rounds)
        streams = partial(StreamLog, store, self.clock, pending_writes)

        def new_connection(record: SessionRecord, peer: Peer) -> StoredConnection:
            primes = primes_streams(peer.protocol_version)
            responses = ResponseStreams(record.session_id, streams, policy, primes=primes)
            transport = HttpTransport(responses, policy, bus.is_shared)
            log = streams(record.session_id, GET_STREAM)
            return StoredConnection(
                record,
                peer,
                transport,
                log,
                store=store,
                clock=self.clock,
                bus=bus,
                stories=replica.stories,
            )

        connections = ConnectionRegistry(replica, new_connection)
        attachments = Attachments(
            replica, connections, questions=questions, pending_writes=pending_writes
        )
        remote_questions = RemoteQuestions(self._relay, connections, questions)
        publisher = Publisher(
            replica,
            connections,
            attachments,
            questions=questions,
            remote_questions=remote_questions,
            streams=streams,
        )
        hidden_updates = HiddenUpdates(store, connections, self._visibility)
        broadcaster = ChangeBroadcaster(
            replica,
            publisher,
            connections=connections,
            attachments=attachments,
            hidden_updates=hidden_updates if self._visibility.outside else None,
        )
        return Delivery(
            connections=connections,
            attachments=attachments,
            publisher=publisher,
            broadcaster=broadcaster,
            hidden_updates=hidden_updates,
            questions=questions,
            remote_questions=remote_questions,
            pending_writes=pending_writes,
        )

    def _bound(self, conversations: Conversations) -> ConversationSessions:
        argument = None
        if conversations.handle:
            argument = HandleArgument(sorted(set(conversations.handle)), conversations.handle_name)
        return ConversationSessions(
            conversations,
            self._replica,
            self.lifecycle,
            security=self.security,
            argument=argument,
            held=self.runner.held,
            visibility=self._visibility,
        )

    def _dispatch(self) -> None:
        replica, delivery, runner = self._replica, self._delivery, self.runner
        add_capabilities = partial(advertise, policy=self.policy, remembers=self.remembers)
        self._peers = peers = UpstreamPeers(
            replica,
            self.upstream,
            runner,
            ways=Ways(self.store, delivery),
            visibility=self._visibility,
            advertise=partial(add_capabilities, tasks=runner.tasks is not None),
        )
        association = Association(replica, delivery, runner, sealed=self.sealed)
        keys = Idempotency(replica, runner, association, sealed=self.sealed, relay=self._relay)
        self._joining = keys.joining
        self.router = Router(
            replica,
            runner,
            self._stages(keys),
            joining=keys.joining,
            questions=delivery.remote_questions,
            peers=peers,
            advertise=add_capabilities,
            visibility=self._visibility,
        )
        self.listening = Listening(
            replica,
            self.router,
            peers,
            attachments=delivery.attachments,
            runner=runner,
            sealed=self.sealed,
            visibility=self._visibility,
        )
        # One step would record no key of a host's.
        is_joint = self.store.exchange is not None and not self._request_keys
        self.joint_admissions = (
            JointAdmissions(delivery.connections, runner, keys) if is_joint else None
        )

    def _stages(self, keys: Idempotency) -> Stages:
        conversations, tasks, sealed = self.conversations, self.runner.tasks, self.sealed
        argument = conversations.argument if conversations is not None else None
        handles = None
        if conversations is not None and argument is not None:
            handles = (
                LearnedTools(argument, conversations, self._peers),
                HandleTools(argument, conversations),
            )
        return Stages(
            audited=Audited(self._audit),
            methods=SessionMethods(
                self._replica,
                self.attachments,
                self.lifecycle,
                held=self.runner.held,
                sealed=sealed,
            ),
            association=keys.association,
            session=HandlerSession(
                self._replica,
                self._delivery,
                attach=keys.association.attach_if_free,
                check_token=sealed.check_state,
                visibility=self._visibility,
            ),
            serving=self._peers,
            features=Features(
                idempotency=keys if self.remembers else None,
                conversation=ConversationStage(conversations)
                if conversations is not None
                else None,
                handles=handles,
                host_keys=(
                    HostKeys(self._request_keys),
                    partial(KeyOutside, keys, self.lifecycle),
                )
                if self._request_keys
                else None,
                tasks=(TaskCalls(tasks), TaskMethods(tasks)) if tasks is not None else None,
                task_tools=TaskTools(tasks, sealed.stamp)
                if tasks is not None and tasks.policy.tools
                else None,
            ),
        )

    def _serve(self) -> None:
        replica, delivery, runner = self._replica, self._delivery, self.runner
        children = self._child_host()
        self.availability = availability = Availability()
        processes = self.external.children if self.external is not None else None
        own = OwnFacts(
            replica, self.connections, runner, availability, self.shell.name, self._gauges.read,
            processes,
        )  # fmt: skip
        self.fleet = Fleet(replica.bus, own.read)
        handlers = ClusterHandlers(
            replica,
            delivery,
            runner,
            relayed=RelayedRequests(
                relay=self._relay,
                joining=self._joining,
                children=children,
                questions=delivery.remote_questions,
            ),
            streams=ClusterStreams(
                replica, self.connections, self.transport_sessions, calls=runner.calls
            ),
            fleet=self.fleet,
            forget=self.lifecycle.forget_here,
            publish=self.upstream.echo,
        )
        self.endpoints: list[Endpoint] = []
        self._arrivals = Arrivals()
        self.health = Health(self.store, self.clock, availability)
        self.draining = draining = Draining(
            replica,
            delivery,
            runner,
            endpoints=self.endpoints,
            availability=availability,
            arrivals=self._arrivals,
            upstream=self.upstream,
            child_host=children,
        )
        self.fleet.acts["drain"] = lambda _: draining.drain(DEFAULT_GRACE)
        if processes is not None:
            self.fleet.acts["stop"] = processes.stop_process
        argument = self.conversations.argument if self.conversations is not None else None
        self.lifespan = Lifespan(
            replica,
            Preparation(replica, self.security, self.upstream, argument=argument),
            self.upstream,
            handlers=handlers,
            lifecycle=self.lifecycle,
            silences=LongSilences(runner, self.policy.progress_every, self.clock),
            gauges=self._gauges,
            store_watch=self._store_watch,
            broadcaster=self.broadcaster,
            draining=draining,
            tasks=runner.tasks,
        )

    def _child_host(self) -> ChildHost | None:
        if self._remote_children is None or (self.external is None and self._rounds is None):
            return None
        return ChildHost(
            self._relay,
            self.store,
            self._remote_children,
            upstream=self.external,
            rounds=self._rounds,
            way_to=self._peers.way_to,
            ask_there=self.questions.ask_there,
        )

    @property
    def denied(self) -> OnDenied:
        return self._audit.denied

    @property
    def authenticates(self) -> bool:
        return self.authentication is not None or self.shell.authenticates

    def endpoint(self, settings: EndpointSettings) -> Endpoint:
        """An endpoint of this layer, which drains with it. It raises as :class:`Endpoint` does."""
        endpoint = Endpoint(
            settings,
            self.shell,
            self,
            arrivals=self._arrivals,
            clock=self.clock,
            authentication=self.authentication,
            denied=self._audit.denied,
        )
        self.endpoints.append(endpoint)
        return endpoint


def _places_of(request_keys: Sequence[str], *, remembers: bool) -> Sequence[Rule]:
    try:
        places = [place_of(where) for where in request_keys]
    except ConfigurationError as wrong:
        raise ConfigurationError(f"request_keys {wrong}") from None
    if places and not remembers:
        raise ConfigurationError(
            "request_keys need a store: make the layer with one instead of store=None"
        )
    return places


def _check_conversations(store: SessionStore, security: SessionSecurity) -> None:
    if not store.remembers:
        raise ConfigurationError(
            "conversations need a store: make the layer with one instead of store=None"
        )
    is_kept = not security.is_ephemeral or key_path_of(store, security) is not None
    if not is_kept and (store.survives_process or store.exchange is not None):
        raise ConfigurationError(
            "the sessions of conversations outlive this process, but the keys by which they are "
            "found do not: set MCP_SESSIONS_KEYS"
        )


def _admitting(
    server: object, authentication: Authentication | None, shell: SdkUpstream
) -> tuple[Authentication | None, Mapping[str, Collection[str]]]:
    if authentication is not None and shell.authenticates:
        raise ConfigurationError("the server has authentication of its own: it needs no second one")
    if not isinstance(server, ExternalServer) or not server.asks_for_scopes:
        return authentication, {}
    if authentication is None:
        raise ConfigurationError("scopes need authentication, such as --api-keys FILE")
    return authentication.requiring(server.scopes), server.tool_scopes


def _visibility_of(
    hidden: Collection[str], security: SessionSecurity, needed: Mapping[str, Collection[str]]
) -> Visibility:
    try:
        check_patterns("hidden", hidden)
    except TypeError as wrong:
        raise ConfigurationError(str(wrong)) from None
    pseudonym = partial(security.pseudonym, "hidden")
    return Visibility(pseudonym, tuple(hidden), needed=needed)


def _replica_of(
    settings: LayerSettings, security: SessionSecurity, clock: Callable[[], float]
) -> Replica:
    store, policy = settings.store, settings.policy
    if store is None:
        store = Stateless(security)
    elif isinstance(store, (str, os.PathLike)):
        store = open_store(store)
    if settings.encrypt_store:
        store = encrypted_store(store, security)
    if policy.forget_after is None and store.remembers and store.survives_process:
        # A sleeping session costs little there, and its client finds it again.
        policy = replace(policy, forget_after=FORGET_AFTER)
    process, exchange = mint_process(VERSION), store.exchange
    bus = ClusterBus(process) if exchange is None else SharedBus(store, exchange, process)
    stories = Stories(store, replica_name(process), clock)
    return Replica(store=store, bus=bus, policy=policy, clock=clock, stories=stories)


def _starter(server: ExternalServer, longest: int, *, lasting: bool) -> Starter:
    if isinstance(server, HTTPServer):
        return HttpChildren(server, longest)
    if isinstance(server, StdioServer):
        return StdioChildren(server, longest, lasting=lasting)
    raise ConfigurationError(f"cannot wrap {type(server).__name__}")
