"""Serve each server of a file (``serve --config FILE``), and read the file again.

Rules, owned by ``tests/cli/test_reload_config.py``:

1. A new server is served. A removed one is drained, and its path is then no longer served.
2. A changed server gets new processes for new sessions. The sessions that it has keep theirs. If
   its kind, ``per``, ``auth``, ``eras``, ``requestKeys`` or ``tasks`` changed, it is drained, and
   served anew.
3. A server that did not change notices nothing.
4. A wrong file or store changes nothing.
5. A wrong certificate, such as one that expired, is not used. It keeps nothing else from being read
   again, and the log says what is wrong with it.
"""

from __future__ import annotations

import argparse
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mcp_sessions.access import SERVER
from mcp_sessions.assembly import DRAIN_DELAY, Assembly
from mcp_sessions.cli.access import access_given
from mcp_sessions.cli.arguments import INTERRUPTED
from mcp_sessions.cli.check import CheckedEndpoint
from mcp_sessions.cli.servers_file import servers_of
from mcp_sessions.cli.settings_from_options import given_options, options_over, task_policy
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.external_server import ExternalServer
from mcp_sessions.layer_settings import LayerSettings
from mcp_sessions.serve.endpoint import EndpointSettings
from mcp_sessions.serve.open_connections import connection_limits
from mcp_sessions.serve.reloading import Reloading
from mcp_sessions.serve.tls import Certificate, certificate_of
from mcp_sessions.serve.together import Part, Together, run_together
from mcp_sessions.serve.uvicorn_server import HttpSettings
from mcp_sessions.server.upstream.external.children import can_follow
from mcp_sessions_transports.origin import Guards, SecuritySettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReloadedFile:
    _read: Callable[[], Mapping[str, ExternalServer]]
    _make: Callable[[str, ExternalServer], Assembly]
    _part: Callable[[str, Assembly], Part]
    _together: Together
    _layers: dict[str, Assembly]
    _parts: dict[str, Part]
    _certificate: Certificate | None

    async def reload(self) -> str:
        """Serve what the file names now, and return what has changed.

        Raises:
            ConfigurationError: The file or a server is wrong.
            StoreUnavailable: The store of a new server is away.
        """
        layers, parts = dict[str, Assembly](), dict[str, Part]()
        new, changed, anew = list[str](), dict[str, ExternalServer](), list[str]()
        for path, server in self._read().items():
            layer = self._layers.get(path)
            before = _server_of(layer) if layer is not None else None
            failed = layer is not None and not self._together.holds(self._parts[path])
            if layer is None or before is None or failed or not can_follow(before, server):
                (new if layer is None else anew).append(path)
                layer = self._make(path, server)
                parts[path] = self._part(path, layer)
            else:
                parts[path] = self._parts[path]
                if vars(before) != vars(server):
                    changed[path] = server
            layers[path] = layer
        await self._together.serve(list(parts.values()))
        removed = [path for path in self._layers if path not in layers]
        self._layers, self._parts = layers, parts
        for path, server in changed.items():
            external = layers[path].external
            if external is not None:
                external.use(server)
        said = [
            f"{what} {', '.join(paths)}"
            for what, paths in (
                ("new", new),
                ("removed", removed),
                ("changed", [*changed, *anew]),
            )
            if paths
        ]
        if self._certificate is not None:
            try:
                said += ["the certificate"] if self._certificate.read_again() else []
            except ConfigurationError as failed:
                logger.error("the certificate was not reloaded, the one before is used: %s", failed)
        return "; ".join(said) or "nothing has changed"


def _server_of(layer: Assembly) -> ExternalServer | None:
    return layer.external.children.server if layer.external is not None else None


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
    options: argparse.Namespace, store: str
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
    over = options_over(options, LayerSettings())
    authentication = access_given(options).authenticating()

    def make(path: str, server: ExternalServer) -> Assembly:
        name = _name_at(path, options)
        try:
            settings = replace(
                over,
                store=store.replace(SERVER, name),
                authentication=partial(authentication, name),
                tasks=server.tasks,
                eras=server.eras,
                request_keys=server.request_keys,
            )
            return Assembly(server, settings, clock=time.time)
        except ConfigurationError as failed:
            raise ConfigurationError(f"{options.config}: {name}: {failed}") from failed

    return make


def _name_at(path: str, options: argparse.Namespace) -> str:
    return path.removesuffix(options.path)[1:]


def guards_of(layer: Assembly, settings: EndpointSettings) -> Guards:
    return layer.endpoint(settings).guards


def served_of(
    options: argparse.Namespace,
    make: Callable[[str, ExternalServer], Assembly],
    store_name: str,
    security: SecuritySettings | None,
) -> list[CheckedEndpoint]:
    return [
        CheckedEndpoint(
            path,
            layer,
            store_name.replace(SERVER, _name_at(path, options)),
            _server_of(layer),
            partial(guards_of, layer, _settings(options, path, security)),
        )
        for path, layer in layers_of(options, make).items()
    ]


def servers_by_path(options: argparse.Namespace) -> dict[str, ExternalServer]:
    """Read the file, and return each server by its path.

    Raises:
        ConfigurationError: A server cannot be served.
    """
    env: dict[str, str] = dict(options.env or ())
    given = given_options(options)
    eras = options.eras or "both"
    keys = tuple(options.request_key or ())
    servers = servers_of(options.config, given, env, task_policy(options), eras, keys)
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
        app, extra_routes = endpoint.app(layer.lifespan.run), endpoint.metadata()
        return Part(path, app, layer.lifespan, layer.draining, layer.health, extra_routes)

    parts = {path: part(path, layer) for path, layer in layers.items()}
    certificate = certificate_of(options.ssl_certfile, options.ssl_keyfile)
    is_shared = any(layer.bus.is_shared for layer in layers.values())
    delay = options.drain_delay
    if delay is None:
        delay = DRAIN_DELAY if is_shared else 0
    together = Together(list(parts.values()), delay, options.grace)
    read = partial(servers_by_path, options)
    served = ReloadedFile(read, make, part, together, layers, parts, certificate)
    files = (options.config, *(certificate.files if certificate is not None else ()))
    try:
        settings = HttpSettings(
            limits=connection_limits([layer.policy for layer in layers.values()]),
            health=options.health,
            access_log=bool(options.access_log),
            forwarded_allow_ips=options.forwarded_allow_ips,
            certificate=certificate,
            reloading=Reloading(served.reload, files if options.reload_config else None),
        )
        run_together(together, sock, on_started, settings)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
