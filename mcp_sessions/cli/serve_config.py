from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from functools import partial

from mcp_sessions.assembly import DRAIN_DELAY, Assembly
from mcp_sessions.cli.access import SERVER, authenticating
from mcp_sessions.cli.arguments import INTERRUPTED
from mcp_sessions.cli.check import Served
from mcp_sessions.cli.config_file import servers_of
from mcp_sessions.cli.external import given_options
from mcp_sessions.cli.reload_config import ServedFile
from mcp_sessions.conversations import Conversations
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.security import SessionSecurity
from mcp_sessions.serve.endpoint import EndpointSettings
from mcp_sessions.serve.open_connections import connection_limits
from mcp_sessions.serve.reloading import Reloading
from mcp_sessions.serve.tls import certificate_of
from mcp_sessions.serve.together import Part, Together, run_together
from mcp_sessions.stores.urls import open_store
from mcp_sessions_transports.origin import Guards, SecuritySettings


def layers_of(
    options: argparse.Namespace, make: Callable[[str, ExternalServer], Assembly]
) -> dict[str, Assembly]:
    """Make a layer for each server of the file, by its path.

    Args:
        make: See :func:`layer_maker`.

    Raises:
        ConfigurationError: A server cannot be served.
    """
    return {path: make(path, server) for path, server in servers_by_path(options).items()}


def layer_maker(
    options: argparse.Namespace,
    store: str,
    policy: SessionPolicy,
    conversations: Conversations | None,
) -> Callable[[str, ExternalServer], Assembly]:
    """Return the function that makes the layer of a server at a path.

    Args:
        store: Its URL. The servers have no session in common: each has a store of its own.

    Raises:
        ConfigurationError: The servers would share one store, or the file of keys cannot be read.
    """
    if SERVER not in store and store != "memory://":
        raise ConfigurationError(
            f"--store: each server of the --config file needs its own store: put {SERVER} into "
            "the URL, such as sqlite:///{server}.db or redis://host?namespace={server}"
        )
    security = SessionSecurity.default(sign_only=True) if options.readable_state else None
    authentication = authenticating(options)

    def make(path: str, server: ExternalServer) -> Assembly:
        name = path.removesuffix(options.path)[1:]
        try:
            return Assembly(
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

    return make


def guards_of(layer: Assembly, settings: EndpointSettings) -> Guards:
    return layer.endpoint(settings).guards


def served_of(
    options: argparse.Namespace,
    make: Callable[[str, ExternalServer], Assembly],
    store_name: str,
    security: SecuritySettings | None,
) -> list[Served]:
    layers = layers_of(options, make)
    servers = servers_of(options.config, given_options(options))
    return [
        Served(
            path,
            layer.store,
            store_name.replace(SERVER, name),
            layer.policy,
            server,
            layer.authenticates,
            partial(guards_of, layer, _settings(options, path, security)),
        )
        for (name, server), (path, layer) in zip(servers.items(), layers.items(), strict=True)
    ]


def servers_by_path(options: argparse.Namespace) -> dict[str, ExternalServer]:
    """Read the file, and return each server by its path.

    Raises:
        ConfigurationError: A server cannot be served.
    """
    servers = servers_of(options.config, given_options(options))
    return {f"/{name}{options.path}": server for name, server in servers.items()}


def _settings(
    options: argparse.Namespace, path: str, security: SecuritySettings | None
) -> EndpointSettings:
    return EndpointSettings(path=path, host=options.host, security=security)


def serve_all(
    options: argparse.Namespace,
    layers: dict[str, Assembly],
    make: Callable[[str, ExternalServer], Assembly],
    sock: socket.socket,
    security: SecuritySettings | None,
    on_started: Callable[[], None],
) -> int:
    def part(path: str, layer: Assembly) -> Part:
        endpoint = layer.endpoint(_settings(options, path, security))
        app, extra_routes = endpoint.app(layer.lifetime.run), endpoint.metadata()
        return Part(path, app, layer.lifetime, layer.draining, layer.health, extra_routes)

    parts = {path: part(path, layer) for path, layer in layers.items()}
    certificate = certificate_of(options.ssl_certfile, options.ssl_keyfile)
    is_shared = any(layer.bus.is_shared for layer in layers.values())
    delay = options.drain_delay
    if delay is None:
        delay = DRAIN_DELAY if is_shared else 0
    together = Together(list(parts.values()), delay, options.grace)
    read = partial(servers_by_path, options)
    served = ServedFile(read, make, part, together, layers, parts, certificate)
    files = (options.config, *(certificate.files if certificate is not None else ()))
    try:
        run_together(
            together,
            sock,
            on_started=on_started,
            health=options.health,
            limits=connection_limits([layer.policy for layer in layers.values()]),
            access_log=options.access_log,
            forwarded_allow_ips=options.forwarded_allow_ips,
            certificate=certificate,
            reloading=Reloading(served.reload, files if options.reload_config else None),
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
