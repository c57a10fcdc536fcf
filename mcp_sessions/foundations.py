"""What a layer stands on, made before the requests have a path: see ``assembly.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mcp_sessions.core.visibility import Visibility
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.http_server import HTTPServer
from mcp_sessions.ids import GET_STREAM, replica_name
from mcp_sessions.policy import FORGET_AFTER, SessionPolicy
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.security import SessionSecurity, mint_process
from mcp_sessions.serve.sealing_key_file import encrypted_store
from mcp_sessions.server.cluster.codec import VERSION
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
from mcp_sessions.server.reporting.stories import Stories
from mcp_sessions.server.requests.session_visibility import check_patterns
from mcp_sessions.server.upstream.external.command import StdioChildren
from mcp_sessions.server.upstream.external.param_headers import DeclaredHeaders
from mcp_sessions.server.upstream.external.starts import Starter
from mcp_sessions.server.upstream.external.upstream import ExternalUpstream, shell_of
from mcp_sessions.server.upstream.external.url import HttpChildren
from mcp_sessions.server.upstream.modern_rules import ModernRules
from mcp_sessions.server.upstream.rounds import Rounds
from mcp_sessions.server.upstream.sdk.authentication import Authentication
from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, primes_streams
from mcp_sessions.server.upstream.sdk.sdk_modern_rules import SdkModernRules
from mcp_sessions.stdio_server import StdioServer
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.records import Peer, SessionRecord
from mcp_sessions.stores.stateless import Stateless
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.http.channel import ResponseStreams
from mcp_sessions_transports.http.sse import HttpTransport


def wrapped(
    server: object, *, remembers: bool, eras: Eras
) -> tuple[SdkUpstream, ModernRules, DeclaredHeaders]:
    declared = DeclaredHeaders()
    if isinstance(server, ExternalServer):
        shell = shell_of(server, remembers=remembers)
        return shell, SdkModernRules(shell, declared.schema_of, eras=eras), declared
    shell = SdkUpstream(server, adds_subscriptions=remembers)
    return shell, SdkModernRules(shell, eras=eras), declared


def admitting(
    server: object, authentication: Authentication | None, shell: SdkUpstream
) -> tuple[Authentication | None, Mapping[str, Collection[str]]]:
    if authentication is not None and shell.authenticates:
        raise ConfigurationError("the server has authentication of its own: it needs no second one")
    if not isinstance(server, ExternalServer) or not server.asks_for_scopes:
        return authentication, {}
    if authentication is None:
        raise ConfigurationError("scopes need authentication, such as --api-keys FILE")
    return authentication.requiring(server.scopes), server.tool_scopes


def visibility_of(
    hidden: Collection[str],
    security: SessionSecurity,
    *,
    needed: Mapping[str, Collection[str]],
) -> Visibility:
    try:
        check_patterns("hidden", hidden)
    except TypeError as wrong:
        raise ConfigurationError(str(wrong)) from None
    pseudonym = partial(security.pseudonym, "hidden")
    return Visibility(pseudonym, tuple(hidden), needed=needed)


def replica_of(
    store: SessionStore | str | os.PathLike[str] | None,
    policy: SessionPolicy,
    security: SessionSecurity,
    *,
    encrypts: bool,
    clock: Callable[[], float],
) -> Replica:
    if store is None:
        store = Stateless(security)
    elif isinstance(store, (str, os.PathLike)):
        store = open_store(store)
    if encrypts:
        store = encrypted_store(store, security)
    if policy.forget_after is None and store.remembers and store.survives_process:
        # A sleeping session costs little there, and its client finds it again.
        policy = replace(policy, forget_after=FORGET_AFTER)
    process, exchange = mint_process(VERSION), store.exchange
    bus = ClusterBus(process) if exchange is None else SharedBus(store, exchange, process)
    stories = Stories(store, replica_name(process), clock)
    return Replica(store=store, bus=bus, policy=policy, clock=clock, stories=stories)


@dataclass(frozen=True, slots=True)
class Outside:
    relay: RequestRelay
    """Sends requests to other replicas, and serves theirs."""

    external: ExternalUpstream | None
    remote_children: RemoteChildren | None
    """The children of other replicas."""

    rounds: Rounds | None
    """The questions that clients of the 2026 era answer with their next request."""

    @staticmethod
    def make(
        server: object,
        replica: Replica,
        shell: SdkUpstream,
        *,
        declared: DeclaredHeaders,
        eras: Eras,
    ) -> Outside:
        store, bus, policy = replica.store, replica.bus, replica.policy
        relay, remote_children = RequestRelay(bus), None
        if store.exchange is not None:
            remote_children = RemoteChildren(relay, store, store.exchange)
        room = server.max_children if isinstance(server, ExternalServer) else None
        process = bus.process if bus.is_shared else None
        rounds = Rounds(policy, room, process, other_replicas=remote_children)
        asking = rounds if policy.question_timeout else None
        if isinstance(server, ExternalServer):
            lasting = store.remembers and store.survives_process
            starter = _starter(server, policy.max_answer, lasting=lasting)
            external = ExternalUpstream(
                server,
                starter,
                shell,
                other_replicas=remote_children,
                policy=policy,
                declared=declared,
                rounds=rounds,
                remembers=store.remembers,
                prefers_modern=eras == "2026",
            )
            return Outside(relay, external, remote_children, rounds=asking)
        return Outside(relay, None, remote_children, rounds=asking)


def _starter(server: ExternalServer, longest: int, *, lasting: bool) -> Starter:
    if isinstance(server, HTTPServer):
        return HttpChildren(server, longest)
    if isinstance(server, StdioServer):
        return StdioChildren(server, longest, lasting=lasting)
    raise ConfigurationError(f"cannot wrap {type(server).__name__}")


def delivery_of(
    replica: Replica,
    visibility: Visibility,
    *,
    relay: RequestRelay,
    rounds: Rounds | None,
) -> Delivery:
    store, bus, policy, clock = (
        replica.store,
        replica.bus,
        replica.policy,
        replica.clock,
    )
    pending_writes, questions = (
        PendingWrites(),
        PendingQuestions(bus.process if bus.is_shared else None, rounds),
    )
    streams = partial(StreamLog, store, clock, pending_writes)

    def new_connection(record: SessionRecord, peer: Peer) -> StoredConnection:
        primes = primes_streams(peer.protocol_version)
        responses = ResponseStreams(record.session_id, streams, policy, primes=primes)
        transport = HttpTransport(responses, policy, bus.is_shared)
        log = streams(record.session_id, GET_STREAM)
        return StoredConnection(
            record, peer, transport, log, store=store, clock=clock, bus=bus, stories=replica.stories
        )

    connections = ConnectionRegistry(replica, new_connection)
    attachments = Attachments(
        replica, connections, questions=questions, pending_writes=pending_writes
    )
    remote_questions = RemoteQuestions(relay, connections, questions)
    publisher = Publisher(
        replica,
        connections,
        attachments,
        questions=questions,
        remote_questions=remote_questions,
        streams=streams,
    )
    hidden_updates = HiddenUpdates(store, connections, visibility)
    broadcaster = ChangeBroadcaster(
        replica,
        publisher,
        connections=connections,
        attachments=attachments,
        hidden_updates=hidden_updates if visibility.outside else None,
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
