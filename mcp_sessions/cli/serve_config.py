"""Serve each server of a file, on a path of its own: ``mcp-sessions serve --config FILE``."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable

from mcp_sessions.assembly import DRAIN_DELAY, Assembly
from mcp_sessions.cli.access import SERVER, authenticating
from mcp_sessions.cli.arguments import INTERRUPTED
from mcp_sessions.cli.check import Served
from mcp_sessions.cli.config_file import servers_of
from mcp_sessions.cli.external import given_options
from mcp_sessions.conversations import Conversations
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity
from mcp_sessions.serve.open_connections import connection_limits
from mcp_sessions.serve.tls import certificate_of
from mcp_sessions.serve.together import Part, run_together
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.origin import SecuritySettings


def layers_of(
    options: argparse.Namespace,
    store: str,
    policy: SessionPolicy,
    conversations: Conversations | None,
) -> dict[str, Assembly]:
    """Make a layer for each server of the file, by its path.

    Args:
        store: Its URL. The servers have no session in common: each has a store of its own.

    Raises:
        ConfigurationError: A server cannot be served, or the servers would share one store.
    """
    servers = servers_of(options.config, given_options(options))
    if SERVER not in store and store != "memory://":
        raise ConfigurationError(
            f"--store: each server of the file has a store of its own: write {SERVER} where its "
            "name is to stand, as in sqlite:///{server}.db or redis://host?namespace={server}"
        )
    security = SessionSecurity.default(sign_only=True) if options.readable_state else None
    layers: dict[str, Assembly] = {}
    authentication = authenticating(options)
    for name, server in servers.items():
        try:
            layers[f"/{name}{options.path}"] = Assembly(
                server,
                store=open_store(store.replace(SERVER, name)),
                policy=policy,
                security=security,
                clock=time.time,
                conversations=conversations,
                hidden=options.hide or (),
                authentication=authentication(name),
            )
        except ConfigurationError as failed:
            raise ConfigurationError(f"{options.config}: {name}: {failed}") from failed
    return layers


def served_of(
    options: argparse.Namespace,
    store: str,
    store_name: str,
    policy: SessionPolicy,
    conversations: Conversations | None,
) -> list[Served]:
    """Return each server of the file, to be checked. Arguments and errors are those of
    :func:`layers_of`.

    Args:
        store_name: The URL of the store without its password.
    """
    layers = layers_of(options, store, policy, conversations)
    servers = servers_of(options.config, given_options(options))
    return [
        Served(
            path,
            layer.store,
            store_name.replace(SERVER, name),
            layer.policy,
            server,
            layer.authenticates,
        )
        for (name, server), (path, layer) in zip(servers.items(), layers.items(), strict=True)
    ]


def paths_of(options: argparse.Namespace) -> list[str]:
    """Return the path of each server of the file.

    Raises:
        ConfigurationError: A server cannot be served.
    """
    return [f"/{name}{options.path}" for name in servers_of(options.config, given_options(options))]


def serve_all(
    options: argparse.Namespace,
    layers: dict[str, Assembly],
    sock: socket.socket,
    security: SecuritySettings | None,
    on_started: Callable[[], None],
) -> int:
    """Serve all layers until stopped, and return the exit status."""
    parts: list[Part] = []
    for path, layer in layers.items():
        endpoint = layer.endpoint(path=path, host=options.host, security=security)
        app, beside = endpoint.app(layer.lifetime.run), endpoint.metadata()
        parts.append(Part(path, app, layer.lifetime, layer.draining, layer.health, beside))
    is_shared = any(layer.bus.is_shared for layer in layers.values())
    delay = options.drain_delay
    try:
        run_together(
            parts,
            sock,
            on_started=on_started,
            grace=options.grace,
            drain_delay=delay if delay is not None else DRAIN_DELAY if is_shared else 0,
            health=options.health,
            limits=connection_limits([layer.policy for layer in layers.values()]),
            access_log=options.access_log,
            forwarded_allow_ips=options.forwarded_allow_ips,
            certificate=certificate_of(options.ssl_certfile, options.ssl_keyfile),
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
